"""Ten AdamW steps of mixtures of experts are the same in every layout, and experts stay busy."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.model import build_stage
from megatron.model.moe.experts import Experts
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.objectives import PairSettings, dpo
from megatron.training.engine import Engine
from megatron.training.engine_choice import choose_engine
from megatron.training.native.engine import NativeEngine
from megatron.training.parallelize import parallelize
from megatron.training.preference.reference import frozen_copy
from megatron.training.setup import build_engine
from tests.marks import with_more
from tests.model.stages import groups_of, random_batch, small
from tests.pool import run_ranks
from tests.training.layout_runs import Run, assert_same, train
from tests.training.preference.test_preferences import pair_batches

STEPS, RATE, MICRO_BATCHES = 10, 1e-3, 4
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
        **MOE, "num_layers": 3, "moe_layer_freq": [0, 1, 1], "moe_intermediate_size": 24, "moe_num_experts": 8,
        "moe_shared_expert_intermediate_size": 32, "moe_shared_expert_gate": True, "norm_topk_prob": True,
        "moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 1.5, "moe_router_num_groups": 4,
        "moe_router_group_topk": 2, "moe_router_bias": True, "moe_expert_bias": True,
        "moe_router_bias_update_rate": 0.01, "moe_aux_loss_scope": "sequence", "moe_jitter_eps": 0.05,
        "moe_latent_size": 20,
    },
    "neox": {
        "moe_num_experts": 4, "activation": "gelu", "moe_expert_interval": 2, "num_layers": 4, "gpt_j_residual": True,
    },
    "muon": {
        **MOE, "moe_expert_bias": True, "moe_shared_expert_intermediate_size": 32, "moe_shared_expert_gate": True,
        "optimizer": {"type": "Muon", "params": {"lr": RATE, "adjust_lr_fn": "original"}},
    },
    "capacity": {**MOE, "moe_expert_capacity_factor": 1.0, "moe_aux_loss_scope": "step"},
}  # fmt: skip
EP2, EP4, TP2 = {"expert_parallel_size": 2}, {"expert_parallel_size": 4}, {"model_parallel_size": 2}
CUT, SP = {"moe_expert_tensor_parallel": "cut"}, {"sequence_parallel": True}
RECOMPUTE, SELECTIVE = {"checkpoint_activations": True}, {"recompute_granularity": "selective"}


def zero(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}}


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, TP2),
    "tp2 cut sp": (2, TP2 | CUT | SP),
    "pp2": (2, {"pipe_parallel_size": 2}),
    "dp2 deepspeed": (2, {"engine": "deepspeed", **zero(1)}),
    "dp2 deepspeed zero3": (2, {"engine": "deepspeed", **zero(3)}),
    **{f"ep2 dp2 zero{stage}": (2, EP2 | zero(stage)) for stage in range(4)},
    **{f"ep2 dp4 zero{stage}": (4, EP2 | zero(stage)) for stage in range(4)},
    **{f"ep4 dp4 zero{stage}": (4, EP4 | zero(stage)) for stage in range(4)},
    **{f"ep2 tp2 zero{stage}": (4, EP2 | TP2 | zero(stage)) for stage in (1, 2)},
    "ep2 tp2 sp zero3": (4, EP2 | TP2 | SP | zero(3)),
    "ep2 tp2 cut zero1": (4, EP2 | TP2 | CUT | zero(1)),
    "ep2 recompute": (2, EP2 | RECOMPUTE | {"checkpoint_num_layers": 2}),
    "ep2 selective": (2, EP2 | RECOMPUTE | SELECTIVE),
    "tp2 zero3 selective": (4, TP2 | RECOMPUTE | SELECTIVE | zero(3)),
}


def args_of(model: str, layout: str) -> NeoXArgs:
    world, keys = LAYOUTS[layout]
    data = world // keys.get("model_parallel_size", 1) // keys.get("pipe_parallel_size", 1)
    return small(
        **{"optimizer": {"type": "AdamW", "params": {"lr": RATE, "betas": [0.9, 0.95], "eps": 1e-6}},
           "gradient_clipping": 0.5, "train_iters": STEPS, "train_micro_batch_size_per_gpu": 2,
           "gradient_accumulation_steps": MICRO_BATCHES // data, **MODELS[model], **keys}
    ).for_world(world)  # fmt: skip


def ten_steps(rank: int, world_size: int, models: list[str], layout: str, packed: bool = False) -> list[Run]:
    """For the pool."""
    found = []
    for model in models:
        args = args_of(model, layout)
        assert args.moe_num_experts > 1
        engine = build_engine(args, groups_of(args, world_size))
        found.append(train(engine, range(STEPS), RATE, packed))
        engine.close()
    return found


@pytest.fixture(scope="module")
def reference() -> Callable[[str, bool], Run]:
    """One process, by model and packing."""
    return cache(lambda model, packed: run_ranks(ten_steps, 1, [model], "one", packed)[0][0])


PLAIN, PACKED = False, True
AT_ONCE = {
    "tp2": ("topk", PACKED), "pp2": ("neox", PLAIN), "dp2 deepspeed": ("topk", PLAIN),
    "ep2 dp4 zero3": ("options", PLAIN), "ep2 tp2 sp zero3": ("topk", PACKED),
}  # fmt: skip
"""What `make test` trains in a layout, (model, packed)."""
MORE = {
    "dp2": [("topk", PLAIN), ("options", PACKED)],
    "tp2": [("options", PLAIN)],
    "tp2 cut sp": [("topk", PACKED), ("options", PLAIN), ("muon", PLAIN)],
    "pp2": [("topk", PACKED), ("options", PLAIN), ("capacity", PACKED)],
    "dp2 deepspeed": [("neox", PACKED), ("capacity", PLAIN)],
    "dp2 deepspeed zero3": [("topk", PACKED)],
    "ep2 dp2 zero0": [("topk", PACKED), ("capacity", PLAIN)],
    "ep2 dp2 zero1": [("options", PACKED)],
    "ep2 dp2 zero2": [("topk", PLAIN)],
    "ep2 dp2 zero3": [("neox", PACKED)],
    "ep2 dp4 zero0": [("options", PLAIN)],
    "ep2 dp4 zero1": [("topk", PACKED)],
    "ep2 dp4 zero2": [("capacity", PACKED), ("muon", PLAIN)],
    "ep2 dp4 zero3": [("topk", PLAIN)],
    "ep4 dp4 zero0": [("topk", PLAIN)],
    "ep4 dp4 zero1": [("neox", PLAIN), ("capacity", PACKED)],
    "ep4 dp4 zero2": [("options", PACKED)],
    "ep4 dp4 zero3": [("topk", PACKED)],
    "ep2 tp2 zero1": [("topk", PLAIN)],
    "ep2 tp2 zero2": [("options", PACKED)],
    "ep2 tp2 sp zero3": [("options", PLAIN), ("capacity", PLAIN), ("neox", PACKED)],
    "ep2 tp2 cut zero1": [("options", PLAIN)],
    "ep2 recompute": [("options", PACKED)],
    "ep2 selective": [("topk", PLAIN)],
    "tp2 zero3 selective": [("options", PLAIN)],
}
"""What `make test-all` trains: every layout, every model in each kind of parallelism and at each ZeRO stage,
each of both packed and not."""
EVERYWHERE = ("topk", "options")  # the other models where something of theirs is cut
_SOME = ("ep2 dp4 zero2", "ep4 dp4 zero1", "ep2 tp2 sp zero3", "tp2 cut sp", "pp2", "dp2 deepspeed", "ep2 dp2 zero0")


def is_trained(layout: str, model: str, packed: bool) -> bool:
    """Whether `make test-all` trains it, where nothing else does."""
    if model == "muon" and (layout == "pp2" or "deepspeed" in layout):
        return False  # it is the native engine's
    if model == "options" and layout == "dp2 deepspeed zero3":
        return False  # its bias would be cut
    return not packed and (model in EVERYWHERE or layout in _SOME)


CASES = [
    *(pytest.param(layout, *case) for layout, case in AT_ONCE.items()),
    *(pytest.param(layout, *case, marks=pytest.mark.more) for layout, cases in MORE.items() for case in cases),
    *(
        pytest.param(layout, model, packed, marks=pytest.mark.product)
        for layout in MORE for model in MODELS for packed in (PLAIN, PACKED)
        if is_trained(layout, model, packed) and (model, packed) not in (AT_ONCE.get(layout), *MORE[layout])
    ),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "model", "packed"), CASES)
def test_ten_steps_are_those_of_one_process(
    layout: str, model: str, packed: bool, reference: Callable[[str, bool], Run]
) -> None:
    ranks = run_ranks(ten_steps, LAYOUTS[layout][0], [model], layout, packed)
    bounds = (1e-4, 2e-3) if model == "muon" else (1e-5, 2e-5)  # it multiplies in bf16
    assert_same(args_of(model, layout), [rank[0] for rank in ranks], reference(model, packed), (model, layout), *bounds)


def rows_of_experts(engine: Engine) -> list[int]:
    """A list that grows by the number of rows that each call of this rank's experts computes."""
    rows: list[int] = []
    for module in engine.stage.modules():
        if isinstance(module, Experts):
            module.register_forward_pre_hook(lambda _, given: rows.append(int(given[1][-1])))
    return rows


def routed(rank: int, world_size: int, capacity: float | None) -> tuple[int, float, int]:
    """For the pool: rows that this rank's experts have computed in a step, the share that was dropped, and
    how many choices of experts all ranks have made."""
    values = {**MOE, "moe_expert_capacity_factor": capacity, "expert_parallel_size": world_size}
    args = small(**values, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=1).for_world(world_size)
    engine = build_engine(args, groups_of(args, world_size))
    rows = rows_of_experts(engine)
    result = engine.train_step([random_batch(args, seed=rank)], RATE)
    engine.close()
    choices = world_size * 2 * args.seq_length * args.moe_top_k * args.num_layers
    return sum(rows), float(result.metrics["moe_dropped"]), choices


@pytest.mark.parametrize("capacity", [None, 0.5, 4.0])
def test_every_choice_is_computed_or_counted_as_dropped(capacity: float | None) -> None:
    for ranks in (1, 2):
        seen = run_ranks(routed, ranks, capacity)
        computed, dropped, choices = sum(rows for rows, _, _ in seen), seen[0][1], seen[0][2]
        assert computed == round(choices * (1.0 - dropped))
        # Half of the mean for each expert leaves half at most; four times the mean leaves all.
        assert dropped >= 0.5 - 1e-6 if capacity == 0.5 else dropped == 0.0


BALANCED: dict[str, dict[str, Any]] = {
    "loss": {"moe_aux_loss_coeff": 0.05},
    "bias": {"moe_aux_loss_coeff": 0.0, "moe_router_bias_update_rate": 0.01, "moe_router_score_function": "sigmoid"},
    "nothing": {"moe_aux_loss_coeff": 0.0},
}
"""Keys that balance, and none."""


def loads(rank: int, world_size: int, keys: dict[str, Any]) -> tuple[Tensor, float]:
    """For the pool: of 200 steps the mean load of each expert in the last 20 of them, `[blocks, experts]`,
    and the most that was dropped. The router begins with half of the experts far behind."""
    values = {**MOE, "moe_num_experts": 8, "moe_z_loss_coeff": 0.0, **keys}
    args = small(**values, train_micro_batch_size_per_gpu=16, gradient_accumulation_steps=1).for_world(1)
    engine = build_engine(args, groups_of(args, 1))
    weights = engine.weights(master=True)
    for layer in (2, 3):
        weights[layer]["mlp.router.layer.weight"] *= torch.tensor([20.0] * 4 + [0.02] * 4).unsqueeze(1)
    engine.set_weights(weights)
    seen, dropped = [], 0.0
    for step in range(200):
        result = engine.train_step([random_batch(args, rows=16, seed=step)], 5e-4)
        dropped = max(dropped, float(result.metrics["moe_dropped"]))
        assert engine.routing is not None
        seen.append(engine.routing.load)
    engine.close()
    return torch.stack(seen[-20:]).mean(0), dropped


@pytest.mark.parametrize("kind", with_more(BALANCED, "bias", "nothing"))
def test_balanced_experts_have_tokens(kind: str) -> None:
    load, dropped = run_ranks(loads, 1, BALANCED[kind])[0]
    assert dropped == 0.0
    # Over other batches 0.79 to 0.95 with balancing, 0.05 to 0.16 without.
    if kind == "nothing":
        assert load.min() < 0.3, f"the control is balanced by itself: {load}"
    else:
        assert load.min() > 0.5 and load.max() < 2.0, load


def preferences(rank: int, world_size: int, keys: dict[str, Any]) -> Run:
    """For the pool: two steps of DPO on four pairs, shared out over data ranks."""
    data = world_size // keys.get("model_parallel_size", 1)
    values: dict[str, Any] = {**MOE, "moe_aux_loss_scope": "sequence", **keys, "gradient_accumulation_steps": 4 // data}
    args = small(**values, seq_length=32, train_micro_batch_size_per_gpu=2).for_world(world_size)
    groups = groups_of(args, world_size)
    stage, engine = build_stage(args, groups), choose_engine(args, False).load()
    built = parallelize(stage, dpo({"sigmoid": 1.0}, PairSettings()), args, groups, engine)
    batches = pair_batches(packed=False)[groups.rank("data") :: data]
    results = [built.train_step(batches, RATE) for _ in range(2)]
    losses, norms = [float(r.loss) for r in results], [float(r.grad_norm) for r in results]  # type: ignore[arg-type]
    metrics = [{name: float(value) for name, value in r.metrics.items()} for r in results]
    built.close()
    return Run(losses, norms, metrics, groups.rank("tensor"), {})


def test_preferences_with_the_loss_on_and_off() -> None:
    layouts = [(1, {}), (2, {"expert_parallel_size": 2}), (2, {"model_parallel_size": 2}), (2, {"engine": "deepspeed"})]
    of_loss: dict[float, Run] = {}
    for coefficient in (0.0, 0.5):
        for ranks, layout in layouts:
            for run in run_ranks(preferences, ranks, {**layout, "moe_aux_loss_coeff": coefficient}):
                reference = of_loss.setdefault(coefficient, run)
                assert run.losses == pytest.approx(reference.losses, rel=1e-5), (layout, coefficient)
                assert run.norms == pytest.approx(reference.norms, rel=1e-5), (layout, coefficient)
    off, on = of_loss[0.0], of_loss[0.5]
    assert off.losses[0] == pytest.approx(on.losses[0]) and off.norms[0] != pytest.approx(on.norms[0], rel=1e-3)
    assert on.metrics[0]["moe_aux_loss"] == pytest.approx(off.metrics[0]["moe_aux_loss"])


def frozen(rank: int, world_size: int, keys: dict[str, Any]) -> set[str]:
    """For the pool: the parameters that a step has moved."""
    balanced = {"moe_router_bias_update_rate": 0.1, "moe_router_score_function": "sigmoid"}
    args = small(**MOE, **balanced, **keys, **EP2, train_micro_batch_size_per_gpu=2).for_world(2)
    engine = build_engine(args, groups_of(args, 2))
    before = engine.weights(master=True)
    engine.train_step([random_batch(args, seed=rank)], RATE)
    after = engine.weights(master=True)
    engine.close()
    return {
        f"{layer}.{name}" for layer, tensors in after.items() for name, value in tensors.items()
        if not value.equal(before[layer][name])
    }  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "moved"),
    [
        (
            {"trainable": {"names": [r"^3\.mlp\.router"]}},
            {"3.mlp.router.layer.weight", "3.mlp.router.expert_bias"},
        ),
        ({"trainable": {"names": [r"^3\.attention\.dense"]}}, {"3.attention.dense.weight"}),
        (
            {"lora": {"target": ["o_proj"], "r": 2}},
            {f"{layer}.attention.dense.lora.o_proj.lora_{matrix}" for layer in (2, 3) for matrix in "AB"},
        ),
    ],
    ids=["routers", "attention", "adapters"],
)
def test_what_is_frozen_stays(keys: dict[str, Any], moved: set[str]) -> None:
    """The biases of routers too, where these are not trained."""
    for seen in run_ranks(frozen, 2, keys):
        assert seen == moved


def norms(rank: int, world_size: int, keys: dict[str, Any]) -> list[tuple[float, float]]:
    """For the pool: loss and norm of two steps."""
    values = {**MOE, "moe_aux_loss_coeff": 20.0, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    args = small(**{**values, **keys}).for_world(1)
    engine = build_engine(args, groups_of(args, 1))
    results = [engine.train_step([random_batch(args, seed=seed) for seed in (1, 2)], 0.0) for _ in range(2)]
    engine.close()
    return [(float(result.loss), float(result.grad_norm or math.nan)) for result in results]


def test_the_loss_scale_of_fp16_is_that_of_the_balancing_loss() -> None:
    whole = run_ranks(norms, 1, {})[0]
    fp16 = {"enabled": True, "loss_scale": 0, "initial_scale_power": 8}
    half = run_ranks(norms, 1, {"precision": "fp16", "fp16": fp16, "engine": "deepspeed", **zero(1)})[0]
    for ours, expected in zip(half, whole, strict=True):
        assert ours == pytest.approx(expected, rel=2e-2)
    assert run_ranks(norms, 1, {"moe_aux_loss_coeff": 0.0})[0][0][1] < 0.7 * whole[0][1], "the loss does not show"


def references(rank: int, world_size: int) -> list[tuple[list[float], list[float]]]:
    """For the pool: scores of answers by the policy, and by its frozen copy, which has all experts."""
    args = small(**MOE, **EP2, seq_length=32, train_micro_batch_size_per_gpu=2, num_layers=2).for_world(world_size)
    groups = groups_of(args, world_size)
    engine = parallelize(
        build_stage(args, groups),
        dpo({"sigmoid": 1.0}, PairSettings()),
        args,
        groups,
        choose_engine(args, False).load(),
    )
    batches = pair_batches(packed=False)[rank::world_size]
    found = []
    filled = frozen_copy(engine)([replace(batch, reference_logprobs=None) for batch in batches])
    for own, batch in zip(engine.scores(batches), filled, strict=True):
        assert batch.reference_logprobs is not None
        found.append((own.tolist(), batch.reference_logprobs.tolist()))
    engine.close()
    return found


def test_a_frozen_copy_has_all_experts() -> None:
    for found in run_ranks(references, 2):
        for own, copied in found:
            assert copied == pytest.approx(own, rel=1e-5)


def test_selective_recomputation_of_experts_that_zero_cuts_is_refused() -> None:
    keys = {"expert_parallel_size": 2, "checkpoint_activations": True, "recompute_granularity": "selective"}
    args = small(**MOE, **keys, zero_optimization={"stage": 1}, train_micro_batch_size_per_gpu=2).for_world(2)
    with pytest.raises(ConfigError, match="goes with expert_parallel_size 2 .* at ZeRO 0 alone; write full"):
        NativeEngine.check(args)
