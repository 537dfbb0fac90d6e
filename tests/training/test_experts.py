"""Some AdamW steps of mixtures of experts are the same in every layout, and experts stay busy."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.data.preferences.responses import batch_responses, with_responses
from megatron.methods.preferences.objective import dpo
from megatron.methods.preferences.pair_losses import PairSettings
from megatron.model import build_stage
from megatron.model.moe.experts import Experts
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.training.engine import Engine
from megatron.training.engine_choice import choose_engine
from megatron.training.native.engine import NativeEngine
from megatron.training.parallelize import parallelize
from megatron.training.reference.model import frozen_copy
from megatron.training.setup import build_engine
from tests.methods.preferences.test_preferences import pair_batches
from tests.model.stages import groups_of, random_batch, small
from tests.pool import run_ranks
from tests.training.layout_runs import PACKED, RATE, UNPACKED, Run, args_of, assert_same, some_steps, train, zero
from tests.training.runs import cells

MOE: dict[str, Any] = {
    "norm": "rmsnorm", "activation": "swiglu", "intermediate_size": 48, "compat_ffn_width": "none",
    "use_bias_in_attn_linear": False, "use_bias_in_mlp": False, "num_kv_heads": 2, "no_weight_tying": True,
    "moe_num_experts": 4, "moe_top_k": 2, "moe_router_type": "topk", "moe_aux_loss_coeff": 0.02,
    "moe_z_loss_coeff": 1e-3,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "topk": MOE,
    # All that models of today have, and more than one does.
    "options": {
        **MOE, "num_layers": 4, "moe_layer_freq": [0, 1, 1, 1], "moe_intermediate_size": 24, "moe_num_experts": 8,
        "moe_shared_expert_intermediate_size": 32, "moe_shared_expert_gate": True, "norm_topk_prob": True,
        "moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 1.5, "moe_router_num_groups": 4,
        "moe_router_group_topk": 2, "moe_router_bias": True, "moe_expert_bias": True,
        "moe_router_bias_update_rate": 0.01, "moe_aux_loss_scope": "sequence", "moe_jitter_eps": 0.05,
        "moe_latent_size": 20,
    },
    "neox": {"moe_num_experts": 4, "activation": "gelu", "moe_expert_interval": 2, "num_layers": 4,
             "gpt_j_residual": True},
    "muon": {**MOE, "moe_expert_bias": True, "moe_shared_expert_intermediate_size": 32, "moe_shared_expert_gate": True,
             "optimizer": {"type": "Muon", "params": {"lr": RATE, "adjust_lr_fn": "original"}}},
    "capacity": {**MOE, "num_layers": 4, "moe_expert_capacity_factor": 1.0, "moe_aux_loss_scope": "step"},
}  # fmt: skip
EP2, EP4, TP2 = {"expert_parallel_size": 2}, {"expert_parallel_size": 4}, {"model_parallel_size": 2}
PP2 = {"pipe_parallel_size": 2}
INTERLEAVED, ZBV, ZERO_BUBBLE = (PP2 | {"pipeline_schedule": name} for name in ("interleaved", "zbv", "zero_bubble"))
SHARDED_EXPERTS, SP = {"moe_expert_tensor_parallel": "cut"}, {"sequence_parallel": True}
RECOMPUTE, SELECTIVE = {"checkpoint_activations": True}, {"recompute_granularity": "selective"}
DEEPSPEED = {"engine": "deepspeed"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}), "dp2": (2, {}), "tp2": (2, TP2), "tp2 cut sp": (2, TP2 | SHARDED_EXPERTS | SP),
    "pp2": (2, PP2), "pp2 deepspeed": (2, PP2 | DEEPSPEED), "pp2 ep2 tp2": (8, PP2 | EP2 | TP2 | SP | zero(1)),
    **{f"pp2 ep2 zero{stage}": (4, PP2 | EP2 | zero(stage)) for stage in range(4)},
    "interleaved ep2 zero3": (4, INTERLEAVED | EP2 | zero(3)), "interleaved": (2, INTERLEAVED),
    "zero bubble ep2": (4, ZERO_BUBBLE | EP2), "zbv ep2 zero1": (4, ZBV | EP2 | zero(1)), "zbv": (2, ZBV),
    "dp2 deepspeed": (2, DEEPSPEED | zero(1)), "dp2 deepspeed zero3": (2, DEEPSPEED | zero(3)),
    **{f"ep2 dp2 zero{stage}": (2, EP2 | zero(stage)) for stage in range(4)},
    **{f"ep2 dp4 zero{stage}": (4, EP2 | zero(stage)) for stage in range(4)},
    **{f"ep4 dp4 zero{stage}": (4, EP4 | zero(stage)) for stage in range(4)},
    **{f"ep2 tp2 zero{stage}": (4, EP2 | TP2 | zero(stage)) for stage in (1, 2)},
    "ep2 tp2 sp zero3": (4, EP2 | TP2 | SP | zero(3)), "ep2 tp2 cut zero1": (4, EP2 | TP2 | SHARDED_EXPERTS | zero(1)),
    "ep2 recompute": (2, EP2 | RECOMPUTE | {"checkpoint_num_layers": 2}),
    "ep2 selective": (2, EP2 | RECOMPUTE | SELECTIVE),
    "tp2 zero3 selective": (4, TP2 | RECOMPUTE | SELECTIVE | zero(3)),
}  # fmt: skip
AT_ONCE = [("tp2", "topk", PACKED), ("pp2 deepspeed", "neox", UNPACKED), ("dp2 deepspeed", "topk", PACKED)]
MORE_CELLS = [
    ("pp2 ep2 zero1", "options", PACKED), ("ep2 dp4 zero3", "options", UNPACKED), ("ep2 tp2 sp zero3", "topk", PACKED),
    ("tp2 cut sp", "options", UNPACKED), ("pp2", "capacity", PACKED), ("interleaved ep2 zero3", "options", PACKED),
    ("pp2 ep2 zero0", "muon", UNPACKED), ("ep2 dp2 zero0", "capacity", UNPACKED), ("zbv", "neox", PACKED),
]  # fmt: skip
# Every model, and the model with all options in every way that cuts its experts; each of both packed and not.
SAMPLED_PRODUCT = [
    ("tp2 cut sp", "muon", UNPACKED), ("pp2 ep2 zero3", "neox", UNPACKED), ("pp2 ep2 tp2", "topk", UNPACKED),
    ("dp2 deepspeed zero3", "topk", PACKED), ("ep2 dp4 zero1", "topk", PACKED),
    ("ep2 dp4 zero2", "muon", UNPACKED), ("ep4 dp4 zero1", "neox", UNPACKED), ("ep4 dp4 zero2", "options", PACKED),
    ("ep2 tp2 cut zero1", "options", UNPACKED), ("ep2 recompute", "options", PACKED),
    ("tp2 zero3 selective", "options", UNPACKED), ("interleaved", "capacity", UNPACKED),
    ("zero bubble ep2", "muon", UNPACKED), ("zbv ep2 zero1", "options", UNPACKED),
]  # fmt: skip
PRODUCT = [
    (layout, model, PACKED if i % 2 else UNPACKED) for i, layout in enumerate(LAYOUTS) for model in ("topk", "options")
    if (layout, model) != ("dp2 deepspeed zero3", "options")  # DeepSpeed would cut the router's bias
    and not (model == "topk" and layout.startswith(("interleaved", "zbv")))  # it has two blocks
]  # fmt: skip
PRODUCT += [(layout, "muon", UNPACKED) for layout in ("ep2 dp2 zero0", "ep4 dp4 zero1", "ep2 tp2 sp zero3")]
PRODUCT += [(layout, "capacity", UNPACKED) for layout in ("dp2 deepspeed", "ep2 tp2 sp zero3", "ep4 dp4 zero1")]
PRODUCT = SAMPLED_PRODUCT + [case for case in PRODUCT if case not in AT_ONCE + MORE_CELLS + SAMPLED_PRODUCT]


Reference = Callable[[str, bool], Run]  # of one process, by model and packing


def run(layout: str, model: str, packed: bool) -> list[Run]:
    """Runs a model on every rank.

    Muon is in fp32 here: its iterations multiply a difference by up to 3.4445^5 = 485. Sums in another order,
    1e-6, cost 5e-4 of the rate at most; bf16's last bits would cost another update."""
    work = some_steps_with_muon_in_fp32 if model == "muon" else some_steps
    world, keys = LAYOUTS[layout]
    return [runs[0] for runs in run_ranks(work, world, [(MODELS[model], packed)], keys)]


def some_steps_with_muon_in_fp32(rank: int, world_size: int, *args: Any) -> list[Run]:
    """For the pool."""
    with mock.patch.object(Tensor, "bfloat16", Tensor.float):
        return some_steps(rank, world_size, *args)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return cache(lambda model, packed: run("one", model, packed)[0])


@pytest.mark.parametrize(("layout", "model", "packed"), cells(AT_ONCE, MORE_CELLS, PRODUCT))
def test_steps_are_those_of_one_process(layout: str, model: str, packed: bool, reference: Reference) -> None:
    args = args_of(MODELS[model], LAYOUTS[layout][1], LAYOUTS[layout][0])
    assert_same(args, run(layout, model, packed), reference(model, packed), (model, layout))


def routed(rank: int, world_size: int, capacities: list[float | None]) -> list[tuple[int, float, int]]:
    """For the pool: rows that this rank's experts computed, the share dropped, and all ranks' choices."""
    results, rows = [], list[int]()
    for capacity in capacities:
        rows.clear()
        values = {**MOE, "moe_expert_capacity_factor": capacity, "expert_parallel_size": world_size}
        args = small(**values, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=1).for_world(world_size)
        engine = build_engine(args, groups_of(args, world_size))
        for experts in (module for module in engine.stage.modules() if isinstance(module, Experts)):
            experts.register_forward_pre_hook(lambda _, inputs: rows.append(int(inputs[1][-1])))
        result = engine.train_step([random_batch(args, seed=rank)], RATE)
        engine.close()
        choices = world_size * 2 * args.seq_length * args.moe_top_k * args.num_layers
        results.append((sum(rows), float(result.metrics["moe_dropped"]), choices))
    return results


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_choice_is_computed_or_counted_as_dropped(ranks: int) -> None:
    capacities = [None, 0.5, 4.0]
    for capacity, *rank_results in zip(capacities, *run_ranks(routed, ranks, capacities), strict=True):
        computed, (_, dropped, choices) = sum(rows for rows, _, _ in rank_results), rank_results[0]
        assert computed == round(choices * (1.0 - dropped))
        # Half of the mean for each expert leaves half at most; four times the mean leaves all.
        assert dropped >= 0.5 - 1e-6 if capacity == 0.5 else dropped == 0.0


def loads(rank: int, world_size: int) -> list[Tensor]:
    """For the pool: mean loads of experts in the last steps, `[blocks, experts]`, balanced by nothing, a
    loss, a bias. The router begins with half of the experts far behind."""
    means = []
    bias_keys = {"moe_router_bias_update_rate": 0.05, "moe_router_score_function": "sigmoid"}
    for loss, keys in ((0.0, {}), (0.05, {}), (0.0, bias_keys)):
        values = {**MOE, "moe_num_experts": 8, "moe_z_loss_coeff": 0.0, "moe_aux_loss_coeff": loss, **keys}
        args = small(**values, train_micro_batch_size_per_gpu=16, gradient_accumulation_steps=1).for_world(1)
        engine = build_engine(args, groups_of(args, 1))
        weights, step_loads = engine.weights(master=True), []
        for layer in (2, 3):
            weights[layer]["mlp.router.layer.weight"] *= torch.tensor([20.0] * 4 + [0.02] * 4).unsqueeze(1)
        engine.set_weights(weights)
        for step in range(50):
            assert engine.train_step([random_batch(args, rows=16, seed=step)], 2e-3).metrics["moe_dropped"] == 0.0
            step_loads.append(engine.routing.load)  # type: ignore[union-attr]
        engine.close()
        means.append(torch.stack(step_loads[-10:]).mean(0))
    return means


def test_balanced_experts_have_tokens() -> None:
    control, *balanced = run_ranks(loads, 1)[0]
    for load in balanced:
        assert load.min() > 2 * control.min() and load.max() < control.max(), (load, control)


def preferences(rank: int, world_size: int, layouts: list[dict[str, Any]]) -> list[Run]:
    """For the pool: two steps of DPO on four pairs, shared out over data ranks."""
    runs = []
    for keys in layouts:
        data = world_size // keys.get("model_parallel_size", 1)
        values = {**MOE, "moe_aux_loss_scope": "sequence", **keys, "gradient_accumulation_steps": 4 // data}
        args = small(**values, seq_length=32, train_micro_batch_size_per_gpu=2).for_world(world_size)
        engine = engine_of_pairs(args, world_size)
        batches = pair_batches(packed=False)[engine.groups.rank("data") :: data]
        runs.append(train(engine, range(2), RATE, step_batches=batches))
        engine.close()
    return runs


def engine_of_pairs(args: NeoXArgs, world_size: int) -> Engine:
    groups, objective = groups_of(args, world_size), dpo({"sigmoid": 1.0}, PairSettings())
    return parallelize(build_stage(args, groups), objective, args, groups, choose_engine(args).load())


def test_preferences_with_the_loss_on_and_off() -> None:
    coefficients = [{"moe_aux_loss_coeff": 0.0}, {"moe_aux_loss_coeff": 0.5}]
    off, on = run_ranks(preferences, 1, coefficients)[0]
    layouts = [EP2, TP2, DEEPSPEED]
    for runs in run_ranks(preferences, 2, [layout | keys for layout in layouts for keys in coefficients]):
        for i, run in enumerate(runs):
            expected, cell = (off, on)[i % 2], (layouts[i // 2], i % 2)
            assert run.losses + run.norms == pytest.approx(expected.losses + expected.norms, rel=1e-5), cell
    assert off.losses[0] == pytest.approx(on.losses[0]) and off.norms[0] != pytest.approx(on.norms[0], rel=1e-3)
    assert on.metrics[0]["moe_aux_loss"] == pytest.approx(off.metrics[0]["moe_aux_loss"])


FROZEN: list[tuple[dict[str, Any], set[str]]] = [
    ({"trainable": {"names": [r"^3\.mlp\.router"]}}, {"3.mlp.router.layer.weight", "3.mlp.router.expert_bias"}),
    ({"trainable": {"names": [r"^3\.attention\.dense"]}}, {"3.attention.dense.weight"}),
    ({"lora": {"target": ["o_proj"], "r": 2}},
     {f"{layer}.attention.dense.lora.o_proj.lora_{matrix}" for layer in (2, 3) for matrix in "AB"}),
]  # fmt: skip
"""Keys, and what they let a step move."""


def moved(rank: int, world_size: int) -> list[set[str]]:
    """For the pool: the parameters that a step has moved."""
    moved_names = []
    for keys, _ in FROZEN:
        balanced = {"moe_router_bias_update_rate": 0.1, "moe_router_score_function": "sigmoid"}
        args = small(**MOE, **balanced, **keys, **EP2, train_micro_batch_size_per_gpu=2).for_world(2)
        engine = build_engine(args, groups_of(args, 2))
        old_weights = engine.weights(master=True)
        engine.train_step([random_batch(args, seed=rank)], RATE)
        moved_names.append({
            f"{layer}.{name}" for layer, tensors in engine.weights(master=True).items()
            for name, value in tensors.items() if not value.equal(old_weights[layer][name])
        })  # fmt: skip
        engine.close()
    return moved_names


def test_what_is_frozen_stays() -> None:
    """The biases of routers too, where these are not trained."""
    assert run_ranks(moved, 2) == [[names for _, names in FROZEN]] * 2


def norms(rank: int, world_size: int, variants: list[dict[str, Any]]) -> list[list[tuple[float, float]]]:
    """For the pool: loss and norm of two steps of each."""
    results_by_variant = []
    for keys in variants:
        batch = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
        args = small(**{**MOE, **batch, **keys}).for_world(1)
        engine = build_engine(args, groups_of(args, 1))
        results = [engine.train_step([random_batch(args, seed=seed) for seed in (1, 2)], 0.0) for _ in range(2)]
        results_by_variant.append([(float(result.loss), float(result.grad_norm or math.nan)) for result in results])
        engine.close()
    return results_by_variant


def test_the_loss_scale_of_fp16_is_that_of_the_balancing_loss() -> None:
    scaled = {"precision": "fp16", "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 8}}
    deepspeed, native = {**scaled, "engine": "deepspeed", **zero(1)}, {**scaled, "engine": "native"}
    on, off = {"moe_aux_loss_coeff": 20.0}, {"moe_aux_loss_coeff": 0.0}
    fp32_results, *halves, no_balancing = run_ranks(norms, 1, [on, deepspeed | on, native | on, off])[0]
    for half in halves:
        for actual, expected in zip(half, fp32_results, strict=True):
            assert actual == pytest.approx(expected, rel=2e-2)
    assert no_balancing[0][1] < 0.7 * fp32_results[0][1], "the loss does not show"


def references(rank: int, world_size: int) -> list[tuple[list[float], list[float]]]:
    """For the pool: scores of answers by the policy, and by its frozen copy, which has all experts."""
    args = small(**MOE, **EP2, seq_length=32, train_micro_batch_size_per_gpu=2, num_layers=2).for_world(world_size)
    engine = engine_of_pairs(args, world_size)
    batches = pair_batches(packed=False)[rank::world_size]
    filled: Any = frozen_copy(engine)([with_responses(batch, reference_logprobs=None) for batch in batches])
    scores = zip(engine.scores(batches), filled, strict=True)
    return [
        (policy_scores.tolist(), batch_responses(batch).reference_logprobs.tolist()) for policy_scores, batch in scores
    ]


def test_a_frozen_copy_has_all_experts() -> None:
    for rank_scores in run_ranks(references, 2):
        for policy_scores, copied in rank_scores:
            assert copied == pytest.approx(policy_scores, rel=1e-5)


def test_selective_recomputation_of_experts_that_zero_cuts_is_refused() -> None:
    args = small(**MOE, **EP2, **RECOMPUTE, **SELECTIVE, **zero(1), train_micro_batch_size_per_gpu=2).for_world(2)
    with pytest.raises(ConfigError, match="selective.*expert_parallel_size 2.*ZeRO 0"):
        NativeEngine.check(args)
