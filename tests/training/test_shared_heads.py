"""More tensor ranks than key-value heads, or than groups of Mamba 2: steps are those of one process, with
adapters too."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.model.runs import EVERY_OTHER, GATED, NO_BIASES, QK_NORMS
from tests.pool import run_ranks
from tests.training.layout_runs import PACKED, UNPACKED, Run, args_of, assert_same, some_steps, zero
from tests.training.runs import cells

_COMMON: dict[str, Any] = {**GATED, **NO_BIASES, "norm": "rmsnorm"}
_WIDE = {"use_qk_layernorm": True, "use_separate_qk_norms": True}
_LORA = {"lora": {"r": 4, "alpha": 8, "init": False, "dora": True, "target": ["q_proj", "k_proj", "v_proj"]}}
_MAMBA = {"mamba_head_dim": 8, "mamba_num_groups": 1, "mamba_state_dim": 8, "mamba_chunk_size": 8}
MODELS: dict[str, dict[str, Any]] = {
    "one head": {**_COMMON, **EVERY_OTHER, **QK_NORMS, "num_kv_heads": 1, "add_qkv_bias": True},
    "one head, one each": {**_COMMON, "num_kv_heads": [1, 4], "clip_qkv": 0.8},
    "two heads": {**_COMMON, **_WIDE, "num_kv_heads": 2, "num_attention_heads": 8, "head_dim": 8},
    "adapters": {**_COMMON, **_LORA, "num_kv_heads": 1},
    "one group": {
        **_COMMON, **_MAMBA, "num_kv_heads": 1, "attention_config": ["mamba2", "attention"], "mamba_expand": 1,
    },
    "two groups": {**_COMMON, **_MAMBA, "mamba_num_groups": 2, "attention_config": [[["mamba2"], "all"]]},
}  # fmt: skip
PAIRS = [(name, PACKED if name in ("two heads", "one group") else UNPACKED) for name in MODELS]
TP2, TP4, SP = {"model_parallel_size": 2}, {"model_parallel_size": 4}, {"sequence_parallel": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}), "tp2": (2, TP2), "tp2 sp": (2, TP2 | SP), "tp4": (4, TP4), "tp4 sp": (4, TP4 | SP),
    "tp4 sp, again": (4, TP4 | SP | {"checkpoint_activations": True, "recompute_granularity": "selective"}),
    "dp2 x tp2 zero3": (4, TP2 | SP | zero(3)), "dp2 x tp2 zero1": (4, TP2 | zero(1)),
    "tp4, deepspeed": (4, TP4 | {"engine": "deepspeed"}), "dp2 x tp2 zero1, deepspeed": (
        4, TP2 | SP | zero(1) | {"engine": "deepspeed"}
    ), "tp2 x pp2": (4, TP2 | {"pipe_parallel_size": 2}),
}  # fmt: skip


def run(layout: str) -> list[list[Run]]:
    """Runs of every rank, by model."""
    world, keys = LAYOUTS[layout]
    return run_ranks(some_steps, world, [(MODELS[model], packed) for model, packed in PAIRS], keys, timeout=250)


@pytest.fixture(scope="module")
def reference() -> Callable[[], list[Run]]:
    return cache(lambda: run("one")[0])


@pytest.mark.parametrize("layout", cells(
    ["tp2 sp"],
    product=["tp4", "tp4, deepspeed", "tp2", "tp4 sp", "tp4 sp, again", "dp2 x tp2 zero3", "dp2 x tp2 zero1",
             "dp2 x tp2 zero1, deepspeed", "tp2 x pp2"],
))  # fmt: skip
def test_steps_are_those_of_one_process(layout: str, reference: Callable[[], list[Run]]) -> None:
    ranks = run(layout)
    for i, (model, _) in enumerate(PAIRS):
        args = args_of(MODELS[model], LAYOUTS[layout][1], LAYOUTS[layout][0])
        assert_same(args, [rank[i] for rank in ranks], reference()[i], (model, layout))
