"""NaN on one rank ends the step on all ranks before weights change, in every layout and ZeRO stage."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpointing import CheckpointError
from megatron.training.nonfinite_guard import NonFiniteError, SpikeGuard
from tests.marks import with_more
from tests.pool import run_ranks
from tests.training.runs import LAYOUTS, LLAMA, NEOX, begin, bit_equal, config, run_to_end


def poison(training: Any, steps: set[int], bad: float) -> None:
    """Let this rank's last MLP hand a bad gradient down, in the micro-batches of these steps."""
    linear = [module for name, module in training.engine.stage.named_modules() if name.endswith("mlp.linear1")][-1]

    def on_forward(module: Any, inputs: Any, output: torch.Tensor) -> None:
        if training.progress.iteration + 1 in steps and output.requires_grad:
            output.register_hook(lambda grad: grad * bad)

    linear.register_forward_hook(on_forward)


def run_poisoned(rank: int, world_size: int, values: dict[str, Any], steps: set[int], bad: float) -> tuple[Any, Any]:
    """For the pool: the message of a run whose last rank is poisoned, and this rank's weights afterwards."""
    from megatron.training import train

    training = begin(values)
    if rank == world_size - 1:
        poison(training, steps, bad)
    message = None
    try:
        train(training)
    except NonFiniteError as problem:
        message = str(problem)
    return message, training.engine.weights(master=True)


def _values(tmp_path: Path, layout: dict[str, Any], **more: Any) -> dict[str, Any]:
    values = config(NEOX, layout, num_layers=2, train_micro_batch_size_per_gpu=4, train_iters=6, checkpoint_factor=4)
    return {**values, "save": str(tmp_path / "run"), **more}


AT_ONCE = {("tp2", "bfloat16"), ("pp2", "fp32"), ("zero3", "bfloat16")}
MORE = {("plain", "fp32"), ("zero1", "bfloat16"), ("zero2", "fp32"), ("pp2", "bfloat16")}


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(
            name, precision,
            marks=() if (name, precision) in AT_ONCE else pytest.mark.more if (name, precision) in MORE else
            pytest.mark.product,
        )
        for name in LAYOUTS for precision in ("fp32", "bfloat16")
    ],
)  # fmt: skip
def test_all_ranks_end_with_the_weights_before(name: str, precision: str, tmp_path: Path) -> None:
    ranks, layout = LAYOUTS[name]
    bad = math.inf if name == "dp2" else math.nan
    values = _values(tmp_path, layout, precision=precision, checkpoint_factor=100)
    outcomes = run_ranks(run_poisoned, ranks, values, {5}, bad, timeout=20)
    good = run_ranks(run_to_end, ranks, {**values, "save": None, "train_iters": 4, "lr_decay_iters": 6})
    for (message, weights), (_, expected) in zip(outcomes, good, strict=True):
        assert message == outcomes[0][0] and message.startswith("step 5: rank ")
        if layout.get("zero_optimization") or name == "dp2":  # native: found in what data ranks sum up
            assert re.search(
                r"rank \d( and 1 more)?: gradient of \S+ is not finite in the sum over data ranks", message
            )
        else:
            assert f"rank {ranks - 1}: gradient of " in message
        assert "weights are those of step 4" in message
        assert bit_equal(weights, expected)
    assert (tmp_path / "run" / "latest").read_text() == "global_step4", "the last good state is saved"
    assert json.loads((tmp_path / "run" / "status.json").read_text())["status"] == "failed"


def poison_parameter(rank: int, world_size: int, values: dict[str, Any], name: str) -> tuple[Any, Any]:
    """For the pool: the gradient of one parameter is bad at step 3, on the last rank alone."""
    from megatron.training import train

    training = begin(values)
    if rank == world_size - 1:
        param = dict(training.engine.stage.named_parameters())[name]
        param.register_hook(lambda grad: grad * (math.nan if training.progress.iteration == 2 else 1.0))
    message = None
    try:
        train(training)
    except NonFiniteError as problem:
        message = str(problem)
    return message, training.engine.weights(master=True)


STAGES = [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (0, "bfloat16"), (2, "bfloat16")]
KEPT_AND_CUT = ("input_layernorm.weight", "mlp.linear1.weight")


@pytest.mark.parametrize(
    ("name", "stage", "precision"),  # each stage and precision with one of the two, the other by `make test-all`
    [
        pytest.param(name, *stage, marks=pytest.mark.product if (i + j) % 2 else pytest.mark.more if j % 3 else ())
        for i, name in enumerate(KEPT_AND_CUT) for j, stage in enumerate(STAGES)
    ],
)  # fmt: skip
def test_one_tensor_rank_alone(name: str, stage: int, precision: str, tmp_path: Path) -> None:
    """A copy that all tensor ranks hold is counted once in the norm, which must not hide what another rank
    has."""
    layout = {"model_parallel_size": 2, "zero_optimization": {"stage": stage}}
    values = _values(tmp_path, layout, precision=precision, checkpoint_factor=100)
    outcomes = run_ranks(poison_parameter, 2, values, f"layers.2.{name}")
    good = run_ranks(run_to_end, 2, {**values, "save": None, "train_iters": 2, "lr_decay_iters": 6})
    for (message, weights), (_, expected) in zip(outcomes, good, strict=True):
        assert message is not None and message.startswith(f"step 3: rank 1: gradient of 2.{name} is not finite")
        assert bit_equal(weights, expected)
    assert (tmp_path / "run" / "latest").read_text() == "global_step2"
    rows = [json.loads(line) for line in (tmp_path / "run/logs/metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2], "the steps before have their rows"


def bad_loss(rank: int, world_size: int, values: dict[str, Any]) -> str | None:
    """For the pool: a loss that is infinite while its gradient is finite."""
    from megatron.objectives import LANGUAGE_MODELLING, Objective
    from megatron.training import setup, train

    def loss_sum(head: Any, batch: Any, group: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, metrics = LANGUAGE_MODELLING.loss_sum(head, batch, group)
        return loss + (math.inf if training.progress.iteration == 2 else 0.0), metrics

    setup.build_objective = lambda args: Objective(LANGUAGE_MODELLING.weight, loss_sum)
    training = begin(values)
    try:
        train(training)
    except NonFiniteError as problem:
        return str(problem)
    return None


@pytest.mark.parametrize("layout", [{}, {"pipe_parallel_size": 2}, {"zero_optimization": {"stage": 1}}])
def test_infinite_loss_with_finite_gradient(layout: dict[str, Any], tmp_path: Path) -> None:
    errors = run_ranks(bad_loss, 2, _values(tmp_path, layout), timeout=20)
    assert errors[0] == errors[1] and "rank 1: loss is not finite" in str(errors[0]) and "step 3" in str(errors[0])


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
    rows = [json.loads(line) for line in (tmp_path / "run/logs/metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [math.isnan(row["train/lm_loss"]) for row in rows] == [False, False, True, False, True, False]
    message, _ = run_ranks(run_poisoned, 1, {**values, "save": str(tmp_path / "b")}, {3, 4, 5}, math.nan)[0]
    assert "on_nonfinite: skip, 3 steps in a row" in message and "weights are those of step 4" in message


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
    from dataclasses import replace

    from megatron.training.loop import batches_of

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
    from megatron.training import train

    training = begin(values)
    take_step = training.engine.train_step

    def poisoned_step(*given: Any) -> Any:
        if training.progress.iteration + 1 == step and rank == world_size - 1:
            training.engine.sharded_states()["exp_avg"][0][1].view(-1)[5] = math.nan
        return take_step(*given)

    training.engine.train_step = poisoned_step  # type: ignore[method-assign]
    try:
        train(training)
    except (NonFiniteError, CheckpointError) as problem:
        return str(problem)
    return None


@pytest.mark.parametrize(
    ("name", "step", "more"),
    [
        ("plain", 3, {}),  # seen by step 4, whose stop would save step 3
        ("plain", 4, {}),  # the save of step 4 itself comes before any loss tells of it
        ("plain", 3, {"on_nonfinite": "skip", "nonfinite_limit": 9}),
        pytest.param("tp2", 3, {}, marks=pytest.mark.more),
        ("pp2", 4, {"async_save": True}),
        pytest.param("zero1", 3, {"precision": "bfloat16"}, marks=pytest.mark.more),
        ("zero3", 4, {}),
    ],
)
def test_a_nan_moment_is_never_stored(name: str, step: int, more: dict[str, Any], tmp_path: Path) -> None:
    ranks, layout = LAYOUTS[name]
    values = _values(tmp_path, layout, checkpoint_factor=2, **more)
    errors = run_ranks(poison_moment, ranks, values, step)
    pattern = r"nothing is saved: (optim_)?layer_0\d-model_0\d\S*\.pt \(\S+ is not finite\); the last checkpoint is "
    for message in errors:
        assert message is not None and re.search(pattern + "global_step2, start again from there", message), message
    save = tmp_path / "run"
    assert (save / "latest").read_text() == "global_step2"
    assert sorted(p.name for p in save.glob("*global_step*")) == ["global_step2"]
    assert json.loads((save / "status.json").read_text())["status"] == "failed"
    again = run_ranks(run_to_end, ranks, values)
    through = run_ranks(run_to_end, ranks, {**values, "save": None, "async_save": False})
    for (_, weights), (_, expected) in zip(again, through, strict=True):
        assert bit_equal(weights, expected), "a restart loses nothing"
