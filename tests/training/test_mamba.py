"""Some AdamW steps of all mixers with states, and of hybrids, are equal in every layout, and resumed."""

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from megatron.model.init import stage_parameters
from megatron.training.setup import build_engine
from tests.model.stages import groups_of
from tests.pool import run_ranks
from tests.training.layout_runs import PACKED, UNPACKED, Run, args_of, assert_same, some_steps, train, zero
from tests.training.runs import cells

_COMMON: dict[str, Any] = {
    "norm": "rmsnorm", "pos_emb": "none", "no_weight_tying": True, "mamba_state_dim": 8,
    "use_bias_in_attn_linear": False, "use_bias_in_mlp": False,
}  # fmt: skip
_HEADS = {"mamba_head_dim": 8, "mamba_num_groups": 2, "mamba_chunk_size": 8}
MODELS: dict[str, dict[str, Any]] = {
    "mamba": {**_COMMON, "attention_config": [[["mamba"], "all"]], "mamba_use_bias_in_linears": True},
    "mamba2": {**_COMMON, **_HEADS, "attention_config": [[["mamba2"], "all"]], "mamba_time_step_limit": [0.02, 0.3]},
    "delta": {
        "norm": "rmsnorm", "no_weight_tying": True, "use_bias_in_attn_linear": False, "use_bias_in_mlp": False,
        "attention_config": ["gated_delta_net", "global", "short_conv", "mamba2_mlp"], "attention_output_gate": True,
        "num_layers": 4, "mamba_state_dim": 8, **_HEADS,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5,
        "linear_chunk_size": 8,
    },
    "kimi": {
        "norm": "rmsnorm", "pos_emb": "none", "no_weight_tying": True, "use_bias_in_attn_linear": False,
        "use_bias_in_mlp": False, "attention_config": [[["kimi_delta_attention", "global"], "all"]],
        "kv_lora_rank": 10, "qk_nope_head_dim": 5, "qk_rope_head_dim": 3, "v_head_dim": 7, "linear_num_key_heads": 4,
        "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 6, "linear_chunk_size": 12,
    },
    "hybrid": {
        **_COMMON, **_HEADS, "num_layers": 6, "pos_emb": "rotary", "num_kv_heads": 2, "activation": "relu2",
        "attention_config": ["mamba2", "moe", "attention", "mamba", "mlp", "global"], "mamba_bcdt_norm_epsilon": 1e-6,
        "moe_num_experts": 4, "moe_top_k": 2, "moe_router_type": "topk", "moe_aux_loss_coeff": 0.02,
        "moe_layer_freq": [0], "moe_shared_expert_intermediate_size": 32,
    },
}  # fmt: skip
TP2, SP, RECOMPUTE = {"model_parallel_size": 2}, {"sequence_parallel": True}, {"checkpoint_activations": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}), "tp2": (2, TP2), "tp2 sp": (2, TP2 | SP), "pp2": (2, {"pipe_parallel_size": 2}),
    **{f"dp2 zero{stage}": (2, zero(stage)) for stage in range(4)},
    **{f"dp2 deepspeed zero{stage}": (2, {"engine": "deepspeed", **zero(stage)}) for stage in range(4)},
    "tp2 dp2 zero3": (4, TP2 | SP | zero(3)),
    "recompute": (1, RECOMPUTE | {"checkpoint_num_layers": 2}),
    "zero bubble": (2, {"pipe_parallel_size": 2, "pipeline_schedule": "zero_bubble"}),
    "tp2 sp selective": (2, TP2 | SP | RECOMPUTE | {"recompute_granularity": "selective"}),
}  # fmt: skip
# Every model, packed or not: two halves of all pairs.
HALVES = {"first": [("mamba", PACKED), ("mamba2", UNPACKED), ("hybrid", PACKED), ("delta", PACKED), ("kimi", UNPACKED)]}
HALVES["other"] = [(model, not packed) for model, packed in HALVES["first"]]


def run(half: str, layout: str) -> list[list[Run]]:
    """Runs of every rank."""
    world, keys = LAYOUTS[layout]
    return run_ranks(some_steps, world, [(MODELS[model], packed) for model, packed in HALVES[half]], keys, timeout=250)


@pytest.fixture(scope="module")
def reference() -> Callable[[str], list[Run]]:
    """One process, by half."""
    return cache(lambda half: run(half, "one")[0])


AT_ONCE = [("tp2", "first"), ("pp2", "other"), ("dp2 zero3", "first")]
MORE_CELLS = [("tp2 sp selective", "first"), ("dp2 zero1", "other"), ("dp2 deepspeed zero1", "first")]
MORE_CELLS += [("dp2 deepspeed zero3", "other"), ("recompute", "other"), ("zero bubble", "first")]
PRODUCT = [case for case in product(list(LAYOUTS)[1:], HALVES) if case not in AT_ONCE + MORE_CELLS]


@pytest.mark.parametrize(("layout", "half"), cells(AT_ONCE, MORE_CELLS, PRODUCT))
def test_steps_are_those_of_one_process(layout: str, half: str, reference: Callable[[str], list[Run]]) -> None:
    # Selective recomputation asks of each of a scan's small operators whether its result is kept.
    ranks = run(half, layout)
    for i, (model, packed) in enumerate(HALVES[half]):
        args = args_of(MODELS[model], LAYOUTS[layout][1], LAYOUTS[layout][0])
        assert_same(args, [rank[i] for rank in ranks], reference(half)[i], (model, packed, layout))


@pytest.mark.more
@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_a_hybrid_with_two_stages_on_a_rank(schedule: str) -> None:
    model, keys = MODELS["hybrid"], {"pipe_parallel_size": 2, "pipeline_schedule": schedule}
    expected, actual = (run_ranks(some_steps, ranks, [(model, PACKED)], k) for ranks, k in ((1, {}), (2, keys)))
    assert_same(args_of(model, keys, 2), [rank[0] for rank in actual], expected[0][0], schedule)


def types_after_steps(rank: int, world_size: int, layouts: list[Any]) -> list[tuple[Any, list[float], torch.Tensor]]:
    """For the pool: after steps in bf16 the types of A_log and D, losses and norms, and A_log."""
    results = []
    for keys in layouts:
        args = args_of({**MODELS["hybrid"], "precision": "bfloat16"}, keys, world_size)
        engine = build_engine(args, groups_of(args, world_size))
        run, named_dtypes = (
            train(engine, range(4), 1e-3),
            [(n, param.dtype) for _, n, param in stage_parameters(engine.stage)],
        )
        kinds = (("A_log", "mixer.D"), "in_proj.weight")
        types, weight_types = ({dtype for name, dtype in named_dtypes if name.endswith(kind)} for kind in kinds)
        assert weight_types == {torch.float32 if "zero_optimization" in keys else torch.bfloat16}
        results.append((types, [*run.losses, *run.norms], run.weights[2]["mixer.A_log"]))
        engine.close()
    return results


def test_a_log_and_d_stay_fp32_with_bf16_weights() -> None:
    """In the native engine, whole on every rank or with weights cut; DeepSpeed has one type for all."""
    layouts = [{}, *map(zero, (1, 2, 3)), {"engine": "deepspeed"}]
    for (_, losses, reference), *sharded, (deepspeed_types, _, _) in run_ranks(types_after_steps, 2, layouts):
        for types, actual, a_log in sharded:
            assert types == {torch.float32} and actual == pytest.approx(losses, rel=2e-3)
            assert torch.allclose(a_log, reference, atol=2e-3) and not torch.equal(a_log.bfloat16().float(), a_log)
        assert deepspeed_types == {torch.bfloat16}
