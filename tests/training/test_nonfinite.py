"""NaN on one rank ends the step on all ranks before weights change, in every layout and ZeRO stage."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpointing import CheckpointError
from megatron.objectives import LANGUAGE_MODELLING, Objective
from megatron.training import Training, setup, train
from megatron.training.loop import batches_of
from megatron.training.nonfinite_guard import NonFiniteError, SpikeGuard
from tests.marks import with_more
from tests.pool import run_ranks
from tests.training.runs import LAYOUTS, LLAMA, NEOX, begin, bit_equal, config, metric_rows, run_to_end


def poison(training: Any, steps: set[int], bad: float) -> None:
    """Let this rank's last MLP hand a bad gradient down, in the micro-batches of these steps."""
    linear = [module for name, module in training.engine.stage.named_modules() if name.endswith("mlp.linear1")][-1]

    def on_forward(module: Any, inputs: Any, output: torch.Tensor) -> None:
        if training.progress.iteration + 1 in steps and output.requires_grad:
            output.register_hook(lambda grad: grad * bad)

    linear.register_forward_hook(on_forward)


def ended(training: Training) -> str | None:
    """Train; the message that ended the run."""
    try:
        train(training)
    except (NonFiniteError, CheckpointError) as problem:
        return str(problem)
    return None


def run_poisoned(
    rank: int, world_size: int, values: dict[str, Any], steps: set[int], bad: float, name: str | None = None
) -> tuple[Any, Any]:
    """For the pool: the message of a run whose last rank is poisoned, with `name` in the gradient of that
    parameter alone, and this rank's weights afterwards."""
    training = begin(values)
    if rank == world_size - 1 and name is not None:
        param = dict(training.engine.stage.named_parameters())[name]
        param.register_hook(lambda grad: grad * (bad if training.progress.iteration + 1 in steps else 1.0))
    elif rank == world_size - 1:
        poison(training, steps, bad)
    return ended(training), training.engine.weights(master=True)


def _values(tmp_path: Path, layout: dict[str, Any], **more: Any) -> dict[str, Any]:
    values = config(NEOX, layout, num_layers=2, train_micro_batch_size_per_gpu=4, train_iters=6, checkpoint_factor=4)
    return {**values, "save": str(tmp_path / "run"), **more}


def assert_weights_before(outcomes: list[tuple[Any, Any]], values: dict[str, Any], step: int, pattern: str) -> None:
    """Every rank ended in that step with a message as `pattern`, and has the weights before it, as the last
    checkpoint has."""
    good = {**values, "save": None, "train_iters": step - 1, "lr_decay_iters": 6}
    for (message, weights), (_, expected) in zip(outcomes, run_ranks(run_to_end, len(outcomes), good), strict=True):
        assert message == outcomes[0][0] and re.search(rf"^step {step}: rank {pattern}", message), message
        assert f"step {step - 1}" in message and bit_equal(weights, expected)
    save = Path(values["save"])
    assert (save / "latest").read_text() == f"global_step{step - 1}", "the last good state is saved"
    assert json.loads((save / "status.json").read_text())["status"] == "failed"
    assert [row["iteration"] for row in metric_rows(save)] == [*range(1, step)], "the steps before have their rows"


AT_ONCE, MORE = [("tp2", "bfloat16"), ("pp2", "fp32"), ("zero3", "bfloat16")], [("plain", "fp32"), ("zero2", "fp32")]
PRODUCT = [(name, precision) for name in LAYOUTS for precision in ("fp32", "bfloat16")]


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *AT_ONCE,
        *(pytest.param(*cell, marks=pytest.mark.more) for cell in MORE),
        *(pytest.param(*cell, marks=pytest.mark.product) for cell in PRODUCT if cell not in AT_ONCE + MORE),
    ],
)
def test_all_ranks_end_with_the_weights_before(name: str, precision: str, tmp_path: Path) -> None:
    ranks, layout = LAYOUTS[name]
    values = _values(tmp_path, layout, precision=precision, checkpoint_factor=100)
    outcomes = run_ranks(run_poisoned, ranks, values, {5}, math.inf if name == "dp2" else math.nan)
    # Native: found in what data ranks sum up.
    summed = layout.get("zero_optimization") or name == "dp2"
    pattern = r"\d( and 1 more)?: gradient of \S+ .*sum over data ranks" if summed else rf"{ranks - 1}: gradient of "
    assert_weights_before(outcomes, values, 5, pattern)


STAGES = [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (0, "bfloat16"), (2, "bfloat16")]
KEPT, CUT = "input_layernorm.weight", "mlp.linear1.weight"


@pytest.mark.parametrize(
    ("name", "stage", "precision"),  # each stage and precision with one of the two, the other by `make test-all`
    [
        (KEPT, 0, "fp32"),
        (CUT, 3, "fp32"),
        pytest.param(KEPT, 2, "bfloat16", marks=pytest.mark.more),
        *(pytest.param(KEPT, *stage, marks=pytest.mark.product) for stage in STAGES[1:5]),
        *(pytest.param(CUT, *stage, marks=pytest.mark.product) for stage in (*STAGES[:3], *STAGES[4:])),
    ],
)
def test_one_tensor_rank_alone(name: str, stage: int, precision: str, tmp_path: Path) -> None:
    """A copy that all tensor ranks hold is counted once in the norm, which must not hide what another rank
    has."""
    layout = {"model_parallel_size": 2, "zero_optimization": {"stage": stage}}
    values = _values(tmp_path, layout, precision=precision, checkpoint_factor=100)
    outcomes = run_ranks(run_poisoned, 2, values, {3}, math.nan, f"layers.2.{name}")
    assert_weights_before(outcomes, values, 3, f"1: gradient of 2.{name} ")


def bad_loss(rank: int, world_size: int, values: dict[str, Any]) -> str | None:
    """For the pool: a loss that is infinite while its gradient is finite."""

    def loss_sum(head: Any, batch: Any, group: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, metrics = LANGUAGE_MODELLING.loss_sum(head, batch, group)
        return loss + (math.inf if training.progress.iteration == 2 else 0.0), metrics

    setup.build_objective = lambda args: Objective(LANGUAGE_MODELLING.weight, loss_sum)
    training = begin(values)
    return ended(training)


@pytest.mark.parametrize("layout", [{}, {"pipe_parallel_size": 2}, {"zero_optimization": {"stage": 1}}])
def test_infinite_loss_with_finite_gradient(layout: dict[str, Any], tmp_path: Path) -> None:
    errors = run_ranks(bad_loss, 2, _values(tmp_path, layout))
    assert errors[0] == errors[1] and re.search("step 3.*rank 1: loss ", str(errors[0]))


@pytest.mark.parametrize("stage", [0, 1])
def test_a_bad_step_leaves_no_trace(stage: int, tmp_path: Path) -> None:
    """Nor does the step that had begun before it was known: in the losses that spikes are judged by, in
    counters."""
    values = _values(tmp_path, {"zero_optimization": {"stage": stage}}, skip_step_above_sigma=6.0)
    assert run_ranks(run_poisoned, 1, values, {4}, math.nan)[0][0] is not None
    state = torch.load(tmp_path / "run/global_step3/mp_rank_00_model_states.pt", weights_only=False)
    assert len(state["spike_window"]) == state["global_steps"] == 3 and state["global_samples"] == 24


def test_skip_leaves_the_step_out_and_is_bounded(tmp_path: Path) -> None:
    values = _values(tmp_path, {}, on_nonfinite="skip", nonfinite_limit=2)
    message, _ = run_ranks(run_poisoned, 1, values, {3, 5}, math.nan)[0]
    assert message is None
    rows = metric_rows(tmp_path / "run")
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [math.isnan(row["train/lm_loss"]) for row in rows] == [False, False, True, False, True, False]
    message, _ = run_ranks(run_poisoned, 1, {**values, "save": str(tmp_path / "b")}, {3, 4, 5}, math.nan)[0]
    assert re.search("on_nonfinite: skip.*3 steps.*step 4", message)


def test_spike_guard_window() -> None:
    guard = SpikeGuard(6.0)
    for i in range(SpikeGuard.LEAST):
        guard.decide(1.0 + 0.01 * (i % 2))
        assert not guard.skips
    guard.decide(1.02)
    assert not guard.skips
    guard.decide(1.2)
    assert guard.skips
    guard.decide(1.005)
    assert not guard.skips, "the spike did not enter the window"


def spiky(rank: int, world_size: int, values: dict[str, Any]) -> tuple[list[bool], bool]:
    """For the pool: steps with labels of chance after a trained model; which of them were left out."""
    training = begin(values)
    batches, skips, unchanged = batches_of(training), [], True
    for step in range(40):
        micro_batches = next(batches)
        if step == 38:
            micro_batches = [replace(b, labels=(b.labels * 7 + 13) % 380) for b in micro_batches]
        before = training.engine.weights()
        skips.append(bool(training.engine.train_step(micro_batches, 1e-3).spike))
        if skips[-1]:
            unchanged = unchanged and bit_equal(before, training.engine.weights())
    return skips, unchanged


@pytest.mark.parametrize("name", with_more(["plain", "pp2", "zero2"], "zero2", product=["plain"]))
def test_spike_is_left_out(name: str) -> None:
    ranks, layout = LAYOUTS[name]
    values = config(LLAMA, layout, train_micro_batch_size_per_gpu=4, train_iters=40, skip_step_above_sigma=1.0)
    outcomes = run_ranks(spiky, ranks, values, timeout=120)
    for skips, unchanged in outcomes:
        assert skips[38] and sum(skips) <= 2 and unchanged
        assert skips == outcomes[0][0], "all ranks leave out the same steps"


def poison_moment(rank: int, world_size: int, values: dict[str, Any], step: int) -> str | None:
    """For the pool: a moment of Adam turns NaN on the last rank before `step`, whose gradients are finite."""
    training = begin(values)
    take_step = training.engine.train_step

    def poisoned_step(*given: Any) -> Any:
        if training.progress.iteration + 1 == step and rank == world_size - 1:
            training.engine.sharded_states()["exp_avg"][0][1].view(-1)[5] = math.nan
        return take_step(*given)

    training.engine.train_step = poisoned_step  # type: ignore[method-assign]
    return ended(training)


@pytest.mark.parametrize(
    ("name", "step", "more"),
    [
        ("plain", 3, {}),  # seen by step 4, whose stop would save step 3
        pytest.param(
            "plain", 4, {}, marks=pytest.mark.more
        ),  # the save of step 4 itself comes before any loss tells of it
        ("plain", 3, {"on_nonfinite": "skip", "nonfinite_limit": 9}),
        pytest.param("tp2", 3, {}, marks=pytest.mark.product),
        ("pp2", 4, {"async_save": True}),
        pytest.param("zero1", 3, {"precision": "bfloat16"}, marks=pytest.mark.product),
        ("zero3", 4, {}),
    ],
)
def test_a_nan_moment_is_never_stored(name: str, step: int, more: dict[str, Any], tmp_path: Path) -> None:
    ranks, layout = LAYOUTS[name]
    values = _values(tmp_path, layout, checkpoint_factor=2, **more)
    errors = run_ranks(poison_moment, ranks, values, step)
    for message in errors:
        assert re.search(r"layer_0\d-model_0\d\S*\.pt.*not finite.*global_step2", str(message)), message
    save = tmp_path / "run"
    assert (save / "latest").read_text() == "global_step2"
    assert sorted(p.name for p in save.glob("*global_step*")) == ["global_step2"]
    assert json.loads((save / "status.json").read_text())["status"] == "failed"
    again = run_ranks(run_to_end, ranks, values)
    through = run_ranks(run_to_end, ranks, {**values, "save": None, "async_save": False})
    for (_, weights), (_, expected) in zip(again, through, strict=True):
        assert bit_equal(weights, expected), "a restart loses nothing"
