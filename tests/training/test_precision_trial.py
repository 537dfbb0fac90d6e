"""`precision_fp8: auto`: a recipe that is slower than bf16 is not taken; a run that goes on keeps its own."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpointing import read_manifest
from megatron.model import Stage, build_stage, freeze
from megatron.model.init import stage_parameters
from megatron.mpu import ParallelGroups
from megatron.mpu.fp8 import TensorwiseProduct
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.training.precision_policy import PrecisionChoice, choose_precision, recorded_precision
from megatron.training.precision_trial import Clock, settle_precision, try_linears
from tests.model.stages import groups_of
from tests.pool import run_ranks
from tests.training.native.in_turn import to_their_ends
from tests.training.runs import LLAMA, begin, config
from tests.training.test_fp8 import CUDA, WIDE, values

HOPPER = PrecisionChoice("tensorwise", "precision_fp8: auto chose tensorwise for Hopper")
LORA = {"lora": {"r": 2, "target": "all-linear"}}


def model(**overrides: Any) -> tuple[Stage, NeoXArgs, ParallelGroups]:
    values = config(
        LLAMA, WIDE, {"precision": "bfloat16", "padded_vocab_size": 384, "precision_fp8": "auto"}, **overrides
    )
    args, groups = (
        NeoXArgs.from_dict({"train_micro_batch_size_per_gpu": 2, **values}).for_world(1),
        ParallelGroups.single(),
    )
    stage = build_stage(args, groups)
    freeze(stage_parameters(stage), args)
    return stage, args, groups


class FakeClock:
    """A clock that runs the timed work once, and returns seconds of bf16 or of FP8.

    It returns those of FP8 where the work multiplied in FP8. products: the methods that multiplied in FP8."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bf16: float, fp8: float) -> None:
        self.bf16, self.fp8, self.calls, self.products = bf16, fp8, 0, list[str]()
        for name in ("output", "input_gradient", "weight_gradient"):
            monkeypatch.setattr(TensorwiseProduct, name, self.noted(name, getattr(TensorwiseProduct, name)))

    def noted(self, name: str, method: Any) -> Any:
        def run(*operands: Tensor) -> Tensor:
            self.products.append(name)
            result: Tensor = method(*operands)
            return result

        return run

    def __call__(self, work: Any, budget: float) -> float:
        num_products = len(self.products)
        self.calls += 1
        work()
        return self.fp8 if len(self.products) > num_products else self.bf16


@pytest.mark.parametrize(("bf16", "fp8", "chosen"), [(2.0, 1.0, "tensorwise"), (1.0, 2.0, "off"), (1.0, 1.0, "off")])
def test_the_faster_is_chosen_and_both_times_are_reported(
    bf16: float, fp8: float, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (stage, args, groups), lines = model(), list[str]()
    settled = settle_precision(stage, args, groups, HOPPER, lines.append, FakeClock(monkeypatch, bf16, fp8))
    assert settled.precision_fp8 == chosen and settled.origin("precision_fp8") == args.origin("precision_fp8")
    # Two inner blocks of four linears; a second is 1000 ms.
    times = rf"{8000 * fp8:.2f} ms in tensorwise, {8000 * bf16:.2f} ms in bf16"
    assert len(lines) == 1 and re.search(f"auto chose {chosen}.*{times}", lines[0])
    assert ("set precision_fp8: tensorwise" in lines[0]) == (chosen == "off")
    assert choose_precision(settled, groups.device).recipe == (None if chosen == "off" else chosen)


def test_each_shape_is_timed_as_often_as_the_others_and_counted_as_it_occurs(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, args, groups = model(num_layers=6)
    clock = FakeClock(monkeypatch, 1.0, 0.25)
    times = try_linears(stage, args, groups, "tensorwise", clock)
    assert times == [16.0, 4.0], "four inner blocks of four linears"
    assert clock.calls % 4 == 0 and clock.calls // 4 == 4, "four shapes, two precisions, two turns"
    assert set(clock.products) == {"output", "input_gradient", "weight_gradient"}


def test_frozen_weights_have_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, args, groups = model(**LORA)
    clock = FakeClock(monkeypatch, 1.0, 0.5)
    try_linears(stage, args, groups, "tensorwise", clock)
    assert set(clock.products) == {"output", "input_gradient"}


@pytest.mark.product
def test_no_random_numbers_are_drawn_and_products_may_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    (stage, args, groups), rng_state = model(compile="block"), torch.get_rng_state()
    graphs = torch._dynamo.utils.counters["stats"]
    torch._dynamo.reset()
    graphs_before = graphs["unique_graphs"]
    times = try_linears(stage, args, groups, "tensorwise", lambda work, budget: float(work() is not None))
    assert times == [8.0, 8.0] and graphs["unique_graphs"] - graphs_before == 8, "two for each of four shapes"
    assert torch.equal(torch.get_rng_state(), rng_state)


def refuse_timing(work: Any, budget: float) -> float:
    raise AssertionError("nothing is to be timed")


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "off", None])
def test_what_is_named_is_never_tried(recipe: str | None) -> None:
    (stage, args, groups), lines = model(), list[str]()
    named_args = args.replace(precision_fp8=recipe)
    choice = choose_precision(named_args, groups.device)
    assert settle_precision(stage, named_args, groups, choice, lines.append, refuse_timing) is named_args and not lines


def test_nothing_is_tried_where_there_is_nothing_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where a clock may not choose, and where no linear fits."""
    (stage, args, groups), lines = model(), list[str]()
    assert (
        settle_precision(stage, args, groups, choose_precision(args, groups.device), lines.append).precision_fp8
        == "off"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    choice = choose_precision(args.replace(deterministic_mode=True), CUDA)
    assert choice.recipe is None and re.search("deterministic_mode.*precision_fp8: tensorwise", choice.reason or "")
    stage, args, groups = model(hidden_size=40, num_attention_heads=4, intermediate_size=40)
    assert settle_precision(stage, args, groups, HOPPER, lines.append, refuse_timing).precision_fp8 == "off"
    assert re.search("off.*CPU", lines[0]) and re.search("off.*multiples of 16", lines[1])


def settled_on(
    rank: int, world_size: int, values: dict[str, Any], seconds: list[tuple[float, float] | None]
) -> tuple[str, str]:
    """For the pool: what this rank chose and said. seconds: of each rank, bf16 and FP8; None: its GPU has no
    FP8."""
    args, lines = NeoXArgs.from_dict(values).for_world(world_size), list[str]()
    groups, turns = groups_of(args, world_size), list(seconds[rank] or ()) * 1000
    clock: Clock = lambda work, budget: turns.pop(0)  # noqa: E731
    choice = HOPPER if seconds[rank] else PrecisionChoice(None, "precision_fp8: auto chose off: Ampere")
    settled = settle_precision(build_stage(args, groups), args, groups, choice, lines.append, clock)
    return str(settled.precision_fp8), lines[0]


@pytest.mark.parametrize(("slow", "chosen"), [((1.0, 0.9), "tensorwise"), ((1.0, 3.0), "off"), (None, "off")])
def test_all_ranks_choose_alike_by_the_slowest(slow: tuple[float, float] | None, chosen: str) -> None:
    run_values = values("auto", padded_vocab_size=384, train_micro_batch_size_per_gpu=2)
    rank0_choice, rank1_choice = run_ranks(settled_on, 2, run_values, [(1.0, 0.5), slow])
    assert rank0_choice == rank1_choice and rank0_choice[0] == chosen


def test_a_run_that_goes_on_keeps_its_recipe(tmp_path: Path) -> None:
    run_values = values("tensorwise", save=str(tmp_path), load=str(tmp_path), checkpoint_factor=1, train_iters=1)
    run_ranks(to_their_ends, 1, [run_values])
    assert run_ranks(gone_on, 1, {**run_values, "precision_fp8": "auto", "train_iters": 2}) == [("tensorwise", 8)]
    run_ranks(to_their_ends, 1, [{**run_values, "save": str(tmp_path / "auto"), "load": None, "precision_fp8": "auto"}])
    manifest = read_manifest(tmp_path / "auto" / "global_step1")
    assert manifest is not None and manifest.config["precision_fp8"] == "off", "what auto chose is in the checkpoint"


def gone_on(rank: int, world_size: int, values: dict[str, Any]) -> tuple[str, int]:
    """For the pool: the recipe of a resumed run, and how many linears have it."""
    training = begin(values)
    fp8_linears = [
        m for m in training.engine.stage.modules() if isinstance(getattr(m, "product", None), TensorwiseProduct)
    ]
    return str(training.args.precision_fp8), len(fp8_linears)


def test_what_a_checkpoint_says_counts_for_auto_alone() -> None:
    lines: list[str] = []
    for requested, recorded, expected in (
        ("auto", "te", "te"), ("auto", "off", "off"), ("auto", None, "auto"), ("auto", "auto", "auto"),
        ("rowwise", "tensorwise", "rowwise"), ("off", "tensorwise", "off"),
    ):  # fmt: skip
        args = NeoXArgs.from_dict(values(requested))
        assert recorded_precision(args, recorded, lines.append).precision_fp8 == expected
    assert [re.search("keeps (te|off)", line) is not None for line in lines] == [True, True]
    with pytest.raises(ConfigError, match="precision_fp8.*bf16"):  # weights of another dtype cannot go on in it
        recorded_precision(NeoXArgs.from_dict(values("auto", precision="fp16")), "te", lines.append).check_training()
