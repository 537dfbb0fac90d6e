"""Two ranks on GPUs of their own, over NCCL, beside one process. In a rehearsal two processes over gloo."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.gpu.runs import on_ranks
from tests.training.runs import LLAMA, NEOX, SGD, SP2, TABLE, config, curves, full_curve, furthest

pytestmark = pytest.mark.gpu
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{name: (LLAMA, TABLE[name][1]) for name in ("tp2", "tp2 sp")},
    "tp2 sp async": (LLAMA, {**SP2, "async_tensor_parallel": "auto"}),
    **{name: (NEOX, TABLE[name][1]) for name in ("dp2", "zero1", "zero2", "zero3")},
}
MOE = {**LLAMA, "moe_num_experts": 4, "moe_top_k": 2, "moe_router_type": "topk", "moe_aux_loss_coeff": 0.02,
       "moe_aux_loss_scope": "sequence"}  # fmt: skip
LAYOUTS["ep2"] = (MOE, {"expert_parallel_size": 2})
LAYOUTS["ep2 zero2"] = (MOE, {"expert_parallel_size": 2, "zero_optimization": {"stage": 2}})
LAYOUTS["tp2 experts"] = (MOE, TABLE["tp2"][1])
if find_spec("deepspeed") is not None:
    LAYOUTS |= {name: (NEOX, TABLE[name][1]) for name in ("pp2, deepspeed", "zero1, deepspeed", "zero3, deepspeed")}
STEPS = 4


def configuration(name: str, layout: dict[str, Any]) -> dict[str, Any]:
    keys = {"train_micro_batch_size_per_gpu": 4, "distributed_backend": "nccl", "engine": "native"}
    return config(LAYOUTS[name][0], SGD, keys, layout)


@pytest.fixture(scope="module")
def ran(device: torch.device) -> dict[str, tuple[float, float, float]]:
    """How far losses, gradient norms and weights of each layout are from one process's."""
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, there is {torch.cuda.device_count()}")
    one_process = [configuration(name, {}) for name in LAYOUTS]
    sharded = [configuration(name, LAYOUTS[name][1]) for name in LAYOUTS]
    ranks, (single,) = on_ranks(curves, 2, sharded, STEPS), on_ranks(curves, 1, one_process, STEPS)
    return {
        name: furthest(full_curve([parts[i] for parts in ranks], sharded[i]), full_curve([single[i]], one_process[i]))
        for i, name in enumerate(LAYOUTS)
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_are_as_one(name: str, ran: dict[str, tuple[float, float, float]]) -> None:
    """Sums of fp32 values in another order."""
    losses, norms, weights = ran[name]
    assert losses <= 1e-4 and norms <= 1e-4 and weights <= 1e-3, ran[name]
