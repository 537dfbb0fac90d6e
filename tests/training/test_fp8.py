"""FP8 in runs: which linears have it, where, losses beside bf16 in layouts, scales that go on."""

import math
import re
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.model import build_stage
from megatron.model.moe.experts import Experts
from megatron.mpu import ParallelGroups
from megatron.mpu.fp8 import DelayedProduct, MXProduct, RowwiseProduct, TensorwiseProduct
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.training.fp8 import use_fp8, use_grouped_fp8
from megatron.training.precision_policy import choose_precision
from megatron.training.reference.cache import describe_precision
from tests.methods.preferences.test_pairs_train import pairs, pairwise
from tests.methods.preferences.test_reference import first_losses
from tests.pool import run_ranks
from tests.training.batches import batches_of
from tests.training.checkpoint.test_resume import assert_goes_on, stop_after
from tests.training.runs import ADAMW, LLAMA, TABLE, begin, begin_each, cells, config, curves

RECIPES = {"tensorwise": TensorwiseProduct, "rowwise": RowwiseProduct, "mxfp8": MXProduct, "te": DelayedProduct}
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
# LLAMA's 48 is no multiple of 32, a tensor rank's 24 none of 16.
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128}
ALL_BLOCKS: dict[str, Any] = {"first_last_layers_bf16": False, "output_layer_in_bf16": False}


def values(recipe: str, *parts: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    common = {"precision": "bfloat16", "train_micro_batch_size_per_gpu": 4, "precision_fp8": recipe}
    return config(LLAMA, ADAMW, WIDE, common, *parts, **overrides)


def products(**overrides: Any) -> tuple[dict[str, str], list[str]]:
    """The class of the product of every linear of a model, and what is said."""
    args = NeoXArgs.from_dict(
        config(LLAMA, {"precision": "bfloat16", "padded_vocab_size": 384}, **overrides)
    ).for_world(1)
    groups, lines = ParallelGroups.single(), list[str]()
    stage = build_stage(args, groups)
    use_fp8(stage, choose_precision(args, CPU), args, groups, lines.append)
    return {n: type(m.product).__name__ for n, m in stage.named_modules() if hasattr(m, "product")}, lines


@pytest.mark.parametrize(("recipe", "casts"), [("rowwise", True), ("tensorwise", False)])
def test_cached_scores_of_experts_in_bf16_are_not_those_in_fp8(recipe: str, casts: bool) -> None:
    experts = {"moe_num_experts": 4, "moe_top_k": 2, "moe_router_type": "topk"}
    args = NeoXArgs.from_dict(values(recipe, experts, padded_vocab_size=384)).for_world(1)
    assert ("experts" in describe_precision(args, ParallelGroups.single())) is casts


@pytest.mark.parametrize("recipe", RECIPES)
def test_linears_of_inner_blocks_have_the_recipe(recipe: str) -> None:
    classes, lines = products(precision_fp8=recipe, **WIDE)
    for name, product in classes.items():
        inner = name.split(".")[1] in ("3", "4")  # GPT-NeoX's numbers: blocks begin at 2
        assert product == (RECIPES[recipe].__name__ if inner else "PlainProduct"), name
    assert len(classes) == 4 * 4 + 1 and len(lines) == 1
    assert re.search(rf"precision_fp8: {recipe} .*CPU.*1 to 2 of 4", lines[0]) and "output layer" not in lines[0]


def test_keys_say_which_blocks_and_what_does_not_fit_is_named() -> None:
    for tied in (False, True):
        classes, lines = products(precision_fp8="te", output_layer_in_bf16=False, no_weight_tying=not tied, **WIDE)
        assert [name for name in classes if classes[name] == "DelayedProduct"][-1].startswith("layers.8")
        assert re.search("1 to 2 of 4.*output layer", lines[0])
    classes, lines = products(precision_fp8="te", num_layers_at_start_in_bf16=2, num_layers_at_end_in_bf16=0, **WIDE)
    assert {name.split(".")[1] for name, product in classes.items() if product == "DelayedProduct"} == {"4", "5"}
    classes, lines = products(precision_fp8="mxfp8", te_fp8_wgrad=False, **ALL_BLOCKS)  # the MLP is 48 wide
    linears = {name.rpartition(".")[2] for name, product in classes.items() if product == "MXProduct"}
    assert linears == {"query_key_value", "dense", "linear1", "8"}
    assert re.search("0 to 3 of 4.*output layer.*weight gradients in bf16", lines[0])
    assert re.search(r"bf16.*multiples of 32.*4 x mlp.linear2 \[32, 48\]", lines[0])
    assert set(products()[0].values()) == {"PlainProduct"} and products()[1] == []
    with pytest.raises(ConfigError, match="precision_fp8.*multiples of 16"):
        products(precision_fp8="te", hidden_size=40, num_attention_heads=4, intermediate_size=40)


@pytest.mark.parametrize(("capability", "requested", "chosen", "message"), [
    ((8, 0), "auto", None, "auto chose off.*Ampere"),
    ((7, 0), "auto", None, "auto chose off.*older"),
    ((8, 9), "auto", None, r"auto chose off.*Ada.*9\.0.*precision_fp8: tensorwise"),
    ((9, 0), "auto", "tensorwise", "auto chose tensorwise.*Hopper"),
    ((10, 3), "auto", None, r"auto chose off.*Blackwell.*9\.0.*precision_fp8: tensorwise"),
    ((10, 0), "tensorwise", "tensorwise", "precision_fp8: tensorwise"),
    ((12, 0), "mxfp8", "mxfp8", "precision_fp8: mxfp8"),
    ((9, 0), "rowwise", "rowwise", "precision_fp8: rowwise"),
    ((8, 6), "tensorwise", None, r"^program: precision_fp8: tensorwise.*8\.9.*A GPU.*8\.6"),
    ((9, 0), "mxfp8", None, r"^program: precision_fp8: mxfp8.*10\.0.*A GPU.*9\.0.*tensorwise"),
])  # fmt: skip
def test_a_gpu_gets_what_it_has(capability: Any, requested: str, chosen: Any, message: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    args = NeoXArgs.from_dict(values(requested))
    if message.startswith("^"):
        with pytest.raises(ConfigError, match=message):
            choose_precision(args, CUDA)
    else:
        choice = choose_precision(args, CUDA)
        assert choice.recipe == chosen and re.search(message, choice.reason or "")


@pytest.mark.parametrize(("overrides", "key", "facts", "off"), [
    ({"precision": "fp16"}, "precision_fp8", "bf16.*fp16", "bf16.*fp16"),
    ({"num_layers": 2}, "precision_fp8", "num_layers 2", "first_last_layers_bf16"),
    ({"precision_fp8": None, "te_fp8_mha": True, "precision": "fp32"}, "te_fp8_mha", "bf16", None),
])  # fmt: skip
def test_requirements_of_fp8_are_reported(
    overrides: Any, key: str, facts: str, off: str | None, monkeypatch: Any
) -> None:
    with pytest.raises(ConfigError, match=f"program: {key}: .*{facts}"):
        NeoXArgs.from_dict(values("te") | overrides).check_training()
    if off is not None:  # and auto leaves it out
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        args = NeoXArgs.from_dict(values("auto") | overrides)
        args.check_training()
        assert re.search(f"auto chose off.*{off}", choose_precision(args, CUDA).reason or "")


def test_auto_is_off_on_cpus() -> None:
    choice = choose_precision(NeoXArgs.from_dict(values("auto")), CPU)
    assert choice.recipe is None and re.search("auto chose off.*CPU", choice.reason or "")


STEPS = 4
# Of a step's loss, relative: E4M3 is off by up to 6 %, E5M2 by 13 %, which cancels in the mean over 256
# tokens. Measured: 1.5e-3 beside bf16, 2e-3 between layouts; bounded by about three times that.
BF16_TOLERANCE, LAYOUT_TOLERANCE = 5e-3, 6e-3


@pytest.fixture(scope="module")
def one_process() -> dict[str, list[float]]:
    """Losses by recipe."""
    names = ["off", *RECIPES]
    parts = run_ranks(curves, 1, [values(name, ALL_BLOCKS) for name in names], STEPS)[0]
    return {name: part.losses for name, part in zip(names, parts, strict=True)}


@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_with_bf16(recipe: str, one_process: dict[str, list[float]]) -> None:
    bf16 = one_process["off"]
    assert one_process[recipe] == pytest.approx(bf16, rel=BF16_TOLERANCE)
    assert one_process[recipe] != pytest.approx(bf16, rel=1e-5) and bf16[-1] < bf16[0] - 0.1


@pytest.mark.parametrize(("recipe", "layout"), cells(
    [("te", "tp2 sp"), ("tensorwise", "zero3")],
    [("mxfp8", "tp2"), ("te", "pp2")],
    [*((recipe, "tp2") for recipe in ("rowwise", "tensorwise")),
     *(("te", layout) for layout in ("zero3", "zero1, deepspeed", "zero3, deepspeed"))],
))  # fmt: skip
def test_layouts_train_alike(recipe: str, layout: str, one_process: dict[str, list[float]]) -> None:
    ranks, keys = TABLE[layout]
    keys = {**keys, "train_micro_batch_size_per_gpu": 2}
    losses = run_ranks(curves, ranks, [values(recipe, ALL_BLOCKS, keys)], STEPS)[0][0].losses
    assert losses == pytest.approx(one_process[recipe], rel=LAYOUT_TOLERANCE)


MOE: dict[str, Any] = {
    "moe_num_experts": 4, "moe_top_k": 2, "moe_router_type": "topk", "moe_intermediate_size": 64, "moe_latent_size": 32,
    "moe_shared_expert_intermediate_size": 64,
}  # fmt: skip
EXPERT_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, {"expert_parallel_size": 2, "train_micro_batch_size_per_gpu": 2}),
    "tp2 sp": (2, {"model_parallel_size": 2, "sequence_parallel": True}),
    "tp2 cut": (2, {"model_parallel_size": 2, "moe_expert_tensor_parallel": "cut"}),
    "zero bubble": (2, {"pipe_parallel_size": 2, "pipeline_schedule": "zero_bubble",
                        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}),
}  # fmt: skip


def expert_products(recipe: str, **overrides: Any) -> tuple[list[str], str]:
    """The products of all experts of a model in FP8, and the line at its start."""
    args = NeoXArgs.from_dict(values(recipe, MOE, padded_vocab_size=384, **overrides)).for_world(1)
    groups, lines = ParallelGroups.single(), list[str]()
    stage = build_stage(args, groups)
    use_fp8(stage, choose_precision(args, CPU), args, groups, lines.append)
    return [type(m.product).__name__ for m in stage.modules() if isinstance(m, Experts)], lines[0]


def test_experts_have_fp8_where_torch_multiplies_groups() -> None:
    in_bf16, in_fp8 = "PlainGroupedProduct", "GroupedScaledProduct"
    for recipe, inner in {"rowwise": in_fp8, "mxfp8": in_fp8, "tensorwise": in_bf16, "te": in_bf16}.items():
        products, line = expert_products(recipe)
        assert products == [in_bf16, inner, inner, in_bf16]
        assert ("experts and routers in bf16" in line) == (inner == in_bf16)
    products, line = expert_products("mxfp8", moe_latent_size=48)
    assert set(products) == {in_bf16} and re.search(r"multiples of 32.*2 x experts \[64, 48\]", line)


@pytest.mark.parametrize(("recipe", "capability", "has_kernel"), [
    ("rowwise", (9, 0), True), ("rowwise", (10, 0), True), ("rowwise", (8, 9), False), ("mxfp8", (10, 0), True),
    ("mxfp8", (12, 0), False), ("tensorwise", (8, 9), True),
])  # fmt: skip
def test_a_gpu_without_a_kernel_for_experts_is_refused(
    recipe: Any, capability: Any, has_kernel: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    args = NeoXArgs.from_dict(values(recipe, MOE, padded_vocab_size=384)).for_world(1)
    stage = build_stage(args, ParallelGroups.single())
    with (
        nullcontext()
        if has_kernel
        else pytest.raises(ConfigError, match=f"precision_fp8: {recipe}.*experts.*tensorwise")
    ):
        use_grouped_fp8(stage, args, recipe, CUDA)


@cache
def losses_of_experts(recipe: str, layout: str | None = None) -> list[float]:
    ranks, keys = EXPERT_LAYOUTS[layout] if layout else (1, {})
    return run_ranks(curves, ranks, [values(recipe, MOE, ALL_BLOCKS, keys)], STEPS)[0][0].losses


@pytest.mark.parametrize(("recipe", "layout"), cells(
    [("rowwise", "ep2"), ("mxfp8", "tp2 sp")], [("rowwise", "tp2 cut"), ("mxfp8", "zero bubble")],
    [("mxfp8", "ep2"), ("rowwise", "tp2 sp"), ("mxfp8", "tp2 cut"), ("rowwise", "zero bubble")],
))  # fmt: skip
def test_experts_train_alike_in_layouts(recipe: str, layout: str) -> None:
    losses, one_process, bf16 = (losses_of_experts(*key) for key in ((recipe, layout), (recipe,), ("off",)))
    assert losses == pytest.approx(one_process, rel=LAYOUT_TOLERANCE)
    assert one_process == pytest.approx(bf16, rel=BF16_TOLERANCE) and one_process != pytest.approx(bf16, rel=1e-5)
    assert one_process[-1] < one_process[0] - 0.1


def scales(rank: int, world_size: int, configs: list[dict[str, Any]]) -> list[tuple[float, dict[str, Any]]]:
    """For the pool: of each run loss and state of delayed scaling after three steps and a validation."""
    results = []
    for training in begin_each(configs):
        batches = batches_of(training)
        for _ in range(3):
            loss = training.engine.train_step(next(batches), 1e-3).loss
        scaling: Any = training.engine.stage.delayed_scaling
        old_state = scaling.state()
        training.engine.token_logprobs(next(batches))
        assert not any(amax.any() for product in scaling.products.values() for amax in product.amax.values())
        results.append((float(loss), old_state))
    return results


def test_recomputation_micro_batches_and_ranks_have_the_same_scales() -> None:
    """A recomputed product is noted twice: the same bits. Micro-batches and ranks have one maximum."""
    te_values = values("te", te_fp8_amax_history_len=2, te_fp8_amax_compute_algo="max")
    (loss, state), (recomputed_loss, recomputed_state) = run_ranks(
        scales, 1, [te_values, {**te_values, "checkpoint_activations": True}]
    )[0]
    assert loss == recomputed_loss
    linears = ("attention.query_key_value", "attention.dense", "mlp.linear1", "mlp.linear2")
    assert state.keys() == {f"{i}.{name}" for i in (3, 4) for name in linears}
    for name in state:
        assert all(state[name][key].equal(recomputed_state[name][key]) for key in state[name])
    for keys in ({"train_micro_batch_size_per_gpu": 2}, {"model_parallel_size": 2, "sequence_parallel": True}):
        states_by_rank = [rank_results[0][1] for rank_results in run_ranks(scales, 2, [{**te_values, **keys}])]
        for name, product_state in states_by_rank[0].items():
            assert all(product_state[key].equal(states_by_rank[1][name][key]) for key in product_state)
            assert product_state["history"][1:2].allclose(state[name]["history"][1:2], rtol=2e-2), "weights' magnitudes"
            assert product_state["history"].allclose(state[name]["history"], rtol=0.3), (
                name
            )  # gradients' are the noisiest


TE = {"te_fp8_amax_history_len": 4, "te_fp8_amax_compute_algo": "max", "checkpoint_factor": 3, "train_iters": 6}


@pytest.mark.parametrize("layout", cells(["zero3"], ["pp2"], ["tp2"]))
def test_delayed_scaling_goes_on_bit_for_bit(layout: str, tmp_path: Path) -> None:
    ranks, keys = TABLE[layout]
    assert_goes_on(ranks, values("te", TE, keys), tmp_path)


def loaded(rank: int, world_size: int, values: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    """For the pool: the scales that a run goes on with."""
    return begin(values).engine.stage.delayed_scaling.state()  # type: ignore[union-attr]


def test_scales_go_on_in_another_layout(tmp_path: Path) -> None:
    run_values = values("te", TE, ALL_BLOCKS, save=str(tmp_path / "there"))
    run_ranks(stop_after, 2, {**run_values, **TABLE["pp2"][1]}, 3)
    resumed = {**run_values, "load": run_values["save"], "save": str(tmp_path / "here")}
    one_process = run_ranks(loaded, 1, resumed)[0]
    assert len(one_process) == 17 and all(state["scale"].all() for state in one_process.values())
    assert all(state["history"][:, :3].all() and not state["history"][:, 3].any() for state in one_process.values())
    sharded = run_ranks(loaded, 2, {**resumed, **TABLE["tp2"][1]})
    for name, state in one_process.items():
        assert all(part[name][key].equal(state[key]) for part in sharded for key in state)


def test_a_reference_model_is_rounded_as_the_policy(tmp_path: Path) -> None:
    """DPO begins at ln 2 by a copy; nearly so by scores of other batches, which bf16's are not taken for."""
    cache = {"dpo_reference": "cache", "reference_cache_dir": str(tmp_path / "scores")}
    fly, common = {"dpo_reference": "on_the_fly"}, {"pack_impl": "best_fit", "num_layers": 3, "precision": "bfloat16"}
    kinds = (("tensorwise", fly, 2), ("off", cache, 2), ("tensorwise", cache, 2), ("tensorwise", cache, 4))
    runs = [
        pairwise(pairs(tmp_path), common, WIDE, ref, precision_fp8=recipe, train_micro_batch_size_per_gpu=micro)
        for recipe, ref, micro in kinds
    ]
    copied, _, *cached = run_ranks(first_losses, 1, runs)[0]
    assert copied == pytest.approx(math.log(2), abs=1e-6) and cached == pytest.approx([math.log(2)] * 2, abs=1e-2)
    assert len(list((tmp_path / "scores").iterdir())) == 2
