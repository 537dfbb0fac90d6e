"""Ten AdamW steps of Mamba, Mamba 2 and hybrids are the same in every layout, packed or not, and resumed."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from megatron.model.init import stage_parameters
from megatron.neox_arguments import NeoXArgs
from megatron.training.setup import build_engine
from tests.model.stages import groups_of, small
from tests.pool import run_ranks
from tests.training.layout_runs import Run, assert_same, train

STEPS, RATE, MICRO_BATCHES = 10, 1e-3, 4
_COMMON: dict[str, Any] = {
    "norm": "rmsnorm", "pos_emb": "none", "no_weight_tying": True, "mamba_state_dim": 8,
    "use_bias_in_attn_linear": False, "use_bias_in_mlp": False,
}  # fmt: skip
_HEADS = {"mamba_head_dim": 8, "mamba_num_groups": 2, "mamba_chunk_size": 8}
MODELS: dict[str, dict[str, Any]] = {
    "mamba": {**_COMMON, "attention_config": [[["mamba"], "all"]], "mamba_use_bias_in_linears": True},
    "mamba2": {**_COMMON, **_HEADS, "attention_config": [[["mamba2"], "all"]], "mamba_time_step_limit": [0.02, 0.3]},
    "hybrid": {
        **_COMMON, **_HEADS, "num_layers": 6, "pos_emb": "rotary", "num_kv_heads": 2, "activation": "relu2",
        "attention_config": ["mamba2", "moe", "attention", "mamba", "mlp", "global"], "mamba_bcdt_norm_epsilon": 1e-6,
        "moe_num_experts": 4, "moe_top_k": 2, "moe_router_type": "topk", "moe_aux_loss_coeff": 0.02,
        "moe_layer_freq": [0], "moe_shared_expert_intermediate_size": 32,
    },
}  # fmt: skip
TP2, SP, RECOMPUTE = {"model_parallel_size": 2}, {"sequence_parallel": True}, {"checkpoint_activations": True}


def zero(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}}


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, TP2),
    "tp2 sp": (2, TP2 | SP),
    "pp2": (2, {"pipe_parallel_size": 2}),
    **{f"dp2 zero{stage}": (2, zero(stage)) for stage in range(4)},
    **{f"dp2 deepspeed zero{stage}": (2, {"engine": "deepspeed", **zero(stage)}) for stage in range(4)},
    "tp2 dp2 zero3": (4, TP2 | SP | zero(3)),
    "recompute": (1, RECOMPUTE | {"checkpoint_num_layers": 2}),
    "tp2 sp selective": (2, TP2 | SP | RECOMPUTE | {"recompute_granularity": "selective"}),
}


def args_of(model: str, layout: str) -> NeoXArgs:
    world, keys = LAYOUTS[layout]
    data = world // keys.get("model_parallel_size", 1) // keys.get("pipe_parallel_size", 1)
    return small(
        **{"optimizer": {"type": "AdamW", "params": {"lr": RATE, "betas": [0.9, 0.95], "eps": 1e-6}},
           "gradient_clipping": 0.5, "train_iters": STEPS, "train_micro_batch_size_per_gpu": 2,
           "gradient_accumulation_steps": MICRO_BATCHES // data, **MODELS[model], **keys}
    ).for_world(world)  # fmt: skip


HALVES: dict[str, list[tuple[str, bool]]] = {
    "first": [("mamba", True), ("mamba2", False), ("hybrid", True)],
    "other": [("mamba", False), ("mamba2", True), ("hybrid", False)],
}
"""Every model, packed or not: two halves of all pairs."""


def ten_steps(rank: int, world_size: int, half: str, layout: str) -> list[Run]:
    """For the pool."""
    found = []
    for model, packed in HALVES[half]:
        args = args_of(model, layout)
        engine = build_engine(args, groups_of(args, world_size))
        found.append(train(engine, range(STEPS), RATE, packed))
        engine.close()
    return found


@pytest.fixture(scope="module")
def reference() -> Callable[[str], list[Run]]:
    """One process, by half."""
    return cache(lambda half: run_ranks(ten_steps, 1, half, "one", timeout=200)[0])


AT_ONCE = {"tp2": "first", "pp2": "other", "dp2 zero3": "first"}
"""What `make test` trains in a layout."""
MORE = {
    "tp2": "other", "tp2 sp": "first", "pp2": "first", "dp2 zero0": "first", "dp2 zero1": "other",
    "dp2 zero2": "first", "dp2 zero3": "other", "dp2 deepspeed zero0": "other", "dp2 deepspeed zero1": "first",
    "dp2 deepspeed zero2": "first", "dp2 deepspeed zero3": "other", "tp2 dp2 zero3": "first", "recompute": "other",
    "tp2 sp selective": "first",
}  # fmt: skip
"""What `make test-all` trains; `make test-all` has the rest."""
CASES = [
    pytest.param(layout, half, marks=() if AT_ONCE.get(layout) == half else mark)
    for layout, in_more in MORE.items() for half in HALVES
    for mark in [pytest.mark.more if half == in_more else pytest.mark.product]
]  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("layout", "half"), CASES)
def test_ten_steps_are_those_of_one_process(layout: str, half: str, reference: Callable[[str], list[Run]]) -> None:
    # Selective recomputation asks of each of a scan's small operators whether its result is kept.
    ranks = run_ranks(ten_steps, LAYOUTS[layout][0], half, layout, timeout=250)
    for i, (model, packed) in enumerate(HALVES[half]):
        ours = [rank[i] for rank in ranks]
        assert_same(args_of(model, layout), ours, reference(half)[i], (model, packed, layout))


def types_after_a_step(rank: int, world_size: int, keys: dict[str, Any]) -> tuple[set[torch.dtype], list[float], Any]:
    """For the pool: a few steps in bf16; types of A_log and D where they are read, losses, and A_log."""
    values = {**MODELS["hybrid"], "precision": "bfloat16", "gradient_clipping": 0.5, **keys}
    args = small(**values, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=4 // world_size)
    args = args.for_world(world_size)
    engine = build_engine(args, groups_of(args, world_size))
    run = train(engine, range(4), 1e-3)
    named = {(layer, name): param for layer, name, param in stage_parameters(engine.stage)}
    types = {param.dtype for (_, name), param in named.items() if name.endswith(("A_log", "mixer.D"))}
    assert {param.dtype for (_, name), param in named.items() if name.endswith("in_proj.weight")} == {
        torch.bfloat16 if keys.get("engine") == "deepspeed" or keys == {} else torch.float32
    }
    engine.close()
    return types, [*run.losses, *run.norms], run.weights[2]["mixer.A_log"]


def test_a_log_and_d_stay_fp32_beside_bf16_weights() -> None:
    """In the native engine, whole on every rank or with weights cut; DeepSpeed has one type for all."""
    _, losses, first = run_ranks(types_after_a_step, 2, {})[0]
    for stage in (1, 2, 3):
        for types, seen, a_log in run_ranks(types_after_a_step, 2, zero(stage)):
            assert types == {torch.float32} and seen == pytest.approx(losses, rel=2e-3), stage
            assert torch.allclose(a_log, first, atol=2e-3) and not torch.equal(a_log.bfloat16().float(), a_log)
    assert run_ranks(types_after_a_step, 1, {"engine": "deepspeed"})[0][0] == {torch.bfloat16}
