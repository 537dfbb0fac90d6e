"""bf16 with fp32 master weights and fp32 accumulation stays beside fp32."""

from typing import Any

import pytest

from tests.marks import with_more
from tests.pool import run_ranks
from tests.training.runs import LAYOUTS, LLAMA, config, curves

# A bf16 value is off by up to 2^-9 = 2e-3; rounding errors mostly cancel in the mean over a step's 256
# tokens: measured 2.6e-4 in the worst layout over 50 steps, bounded here by four times that.
BOUND = 1e-3


def _values(**more: Any) -> dict[str, Any]:
    return config(LLAMA, train_micro_batch_size_per_gpu=4, train_iters=50, **more)


@pytest.fixture(scope="module")
def fp32() -> list[float]:
    return run_ranks(curves, 1, [_values()], steps=50, timeout=120)[0][0].losses


@pytest.mark.parametrize(
    "name", with_more([name for name in LAYOUTS if name != "dp2"], "pp2", "zero3", product=["plain", "zero1", "zero2"])
)
def test_bf16_beside_fp32(name: str, fp32: list[float]) -> None:
    ranks, layout = LAYOUTS[name]
    bf16 = run_ranks(curves, ranks, [_values(precision="bfloat16", **layout)], steps=50, timeout=120)[0][0].losses
    worst = max(abs(a - b) / b for a, b in zip(bf16, fp32, strict=True))
    assert worst <= BOUND, f"{worst:.1e}"
    assert fp32[-1] < fp32[0] - 0.5


def test_master_weights_start_from_fp32_values() -> None:
    """Not from values rounded to bf16, as DeepSpeed makes them."""
    for layout in ({}, {"zero_optimization": {"stage": 3}}):
        exact = run_ranks(curves, 1, [_values(**layout)], steps=0)[0][0].weights
        masters = run_ranks(curves, 1, [_values(precision="bfloat16", **layout)], steps=0)[0][0].weights
        for layer, tensors in exact.items():
            for name, tensor in tensors.items():
                assert masters[layer][name].equal(tensor), (layer, name)
