"""NaN on one rank ends the step on all ranks before weights change; the loss scale of fp16 without a GPU."""

import json
import math
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from deepspeed.runtime.precision_config import get_float16_config

from megatron.callbacks import StepResult
from megatron.checkpointing import CheckpointError
from megatron.neox_arguments import NeoXArgs
from megatron.objectives import LANGUAGE_MODELLING, Objective
from megatron.training import Training, setup, train
from megatron.training.deepspeed.attach import attach_deepspeed
from megatron.training.deepspeed.config import deepspeed_config
from megatron.training.nonfinite_guard import FP16_OVERFLOWS_IN_A_ROW, NonFiniteError, SpikeGuard, most_skips
from tests.pool import run_ranks
from tests.training import runs
from tests.training.batches import batches_of
from tests.training.runs import LAYOUTS, LLAMA, NEOX, begin, bit_equal, cells, config, metric_rows, run_to_end


def poison(training: Any, steps: set[int], bad: float) -> None:
    """Let this rank's last MLP hand a bad gradient down, in the micro-batches of these steps."""
    linear = [module for name, module in training.engine.stage.named_modules() if name.endswith("mlp.linear1")][-1]

    def on_forward(module: Any, inputs: Any, output: torch.Tensor) -> None:
        if training.progress.iteration + 1 in steps and output.requires_grad:
            output.register_hook(lambda grad: grad * bad)

    linear.register_forward_hook(on_forward)


def train_until_error(training: Training) -> str | None:
    """Train; the message that ended the run."""
    try:
        train(training)
    except (NonFiniteError, CheckpointError) as problem:
        return str(problem)
    return None


def run_poisoned(
    rank: int, world_size: int, values: dict[str, Any], steps: set[int], bad: float, name: str | None = None
) -> tuple[Any, Any]:
    """For the pool: message and weights of a run whose last rank is poisoned, in parameter `name` alone."""
    training = begin(values)
    if rank == world_size - 1 and name is not None:
        param = dict(training.engine.stage.named_parameters())[name]
        param.register_hook(lambda grad: grad * (bad if training.progress.iteration + 1 in steps else 1.0))
    elif rank == world_size - 1:
        poison(training, steps, bad)
    return train_until_error(training), training.engine.weights(master=True)


def _values(tmp_path: Path, layout: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    values = config(NEOX, layout, num_layers=2, train_micro_batch_size_per_gpu=4, train_iters=6, checkpoint_factor=4)
    return {**values, "save": str(tmp_path / "run"), **overrides}


def assert_weights_before(outcomes: list[tuple[Any, Any]], values: dict[str, Any], step: int, pattern: str) -> None:
    """Every rank ended in that step, with a message as `pattern` and the weights before it, as saved."""
    good = {**values, "save": None, "train_iters": step - 1, "lr_decay_iters": 6}
    for (message, weights), (_, expected) in zip(outcomes, run_ranks(run_to_end, len(outcomes), good), strict=True):
        assert message == outcomes[0][0] and re.search(rf"^step {step}: .*rank {pattern}", message), message
        assert f"step {step - 1}" in message and bit_equal(weights, expected)
    save = Path(values["save"])
    assert (save / "latest").read_text() == f"global_step{step - 1}", "the last good state is saved"
    assert json.loads((save / "status.json").read_text())["status"] == "failed"
    assert [row["iteration"] for row in metric_rows(save)] == [*range(1, step)], "the steps before have their rows"


AT_ONCE, MORE_CELLS = (
    [("tp2", "bfloat16"), ("pp2", "fp32"), ("zero3", "bfloat16")],
    [("plain", "fp32"), ("zero2", "fp32")],
)
PRODUCT = [cell for cell in product(LAYOUTS, ("fp32", "bfloat16")) if cell not in AT_ONCE + MORE_CELLS]


@pytest.mark.parametrize(("name", "precision"), cells(AT_ONCE, MORE_CELLS, PRODUCT))
def test_all_ranks_end_with_the_weights_before(name: str, precision: str, tmp_path: Path) -> None:
    ranks, layout = LAYOUTS[name]
    values = _values(tmp_path, layout, precision=precision, checkpoint_factor=100)
    outcomes = run_ranks(run_poisoned, ranks, values, {5}, math.inf if name == "dp2" else math.nan)
    # Native: found in what data ranks sum up.
    summed = layout.get("zero_optimization") or name == "dp2"
    pattern = r"\d( and 1 more)?: gradient of \S+ .*sum over data ranks" if summed else rf"{ranks - 1}: gradient of "
    assert_weights_before(outcomes, values, 5, pattern)


REPLICATED_WEIGHT, SHARDED_WEIGHT = "input_layernorm.weight", "mlp.linear1.weight"
FEW_CELLS = [(REPLICATED_WEIGHT, 0, "fp32"), (SHARDED_WEIGHT, 3, "fp32"), (REPLICATED_WEIGHT, 2, "bfloat16")]
PRODUCT_CELLS = [
    *product((REPLICATED_WEIGHT, SHARDED_WEIGHT), range(4), ["fp32"]),
    *product((REPLICATED_WEIGHT, SHARDED_WEIGHT), (0, 2), ["bfloat16"]),
]
PRODUCT_CELLS = [cell for cell in PRODUCT_CELLS if cell not in FEW_CELLS]


@pytest.mark.parametrize(("name", "stage", "precision"), cells(FEW_CELLS[:2], FEW_CELLS[2:], PRODUCT_CELLS))
def test_one_tensor_rank_alone(name: str, stage: int, precision: str, tmp_path: Path) -> None:
    """A copy on all tensor ranks is counted once in the norm, which must not hide what another rank has."""
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
    return train_until_error(training)


@pytest.mark.parametrize("layout", [{}, {"pipe_parallel_size": 2}, {"zero_optimization": {"stage": 1}}])
def test_infinite_loss_with_finite_gradient(layout: dict[str, Any], tmp_path: Path) -> None:
    errors = run_ranks(bad_loss, 2, _values(tmp_path, layout))
    assert errors[0] == errors[1] and re.search("step 3.*rank 1: loss ", str(errors[0]))


@pytest.mark.parametrize("stage", [0, 1])
def test_a_bad_step_leaves_no_trace(stage: int, tmp_path: Path) -> None:
    """A bad step and the step begun after it change neither the losses that judge spikes nor counters."""
    values = _values(tmp_path, {"zero_optimization": {"stage": stage}}, skip_step_above_sigma=6.0)
    assert run_ranks(run_poisoned, 1, values, {4}, math.nan)[0][0] is not None
    state = torch.load(tmp_path / "run/global_step3/mp_rank_00_model_states.pt", weights_only=False)
    assert len(state["spike_window"]) == state["global_steps"] == 3 and state["global_samples"] == 24


def test_skip_leaves_the_step_out_and_is_bounded(tmp_path: Path) -> None:
    values = _values(tmp_path, {}, on_nonfinite="skip", nonfinite_limit=2)
    message, _ = run_ranks(run_poisoned, 1, values, {3, 5}, math.nan)[0]
    assert message is None
    rows = metric_rows(tmp_path / "run", "iteration")
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["train/lm_loss"] is None for row in rows] == [False, False, True, False, True, False]
    message, _ = run_ranks(run_poisoned, 1, {**values, "save": str(tmp_path / "b")}, {3, 4, 5}, math.nan)[0]
    assert re.search("step 4.*on_nonfinite: skip.*3 steps", message)


def test_spike_guard_window() -> None:
    guard, restored, skipped = SpikeGuard(6.0), SpikeGuard(6.0), []
    for loss in (*(1.0 + 0.01 * (i % 2) for i in range(SpikeGuard.MIN_LOSSES)), 1.02, 1.2, 1.005):
        guard.decide(loss)
        skipped += [loss] if guard.skips else []
    assert skipped == [1.2], "and it did not enter the window"
    restored.restore(guard.state())
    restored.decide(1.2)
    assert restored.skips and restored.state() == guard.state()


def spiky(rank: int, world_size: int, values: dict[str, Any]) -> tuple[list[bool], bool]:
    """For the pool: steps with labels of chance after a trained model; which of them were left out."""
    training = begin(values)
    batches, skips, unchanged = batches_of(training), [], True
    for step in range(40):
        micro_batches = next(batches)
        if step == 38:
            micro_batches = [replace(b, labels=(b.labels * 7 + 13) % 380) for b in micro_batches]
        old_weights = training.engine.weights()
        skips.append(bool(training.engine.train_step(micro_batches, 1e-3).spike))
        if skips[-1]:
            unchanged = unchanged and bit_equal(old_weights, training.engine.weights())
    return skips, unchanged


@pytest.mark.parametrize("name", cells(["pp2"], product=["zero2", "plain"]))
def test_spike_is_left_out(name: str) -> None:
    ranks, layout = LAYOUTS[name]
    values = config(LLAMA, layout, train_micro_batch_size_per_gpu=4, train_iters=40, skip_step_above_sigma=1.0)
    outcomes = run_ranks(spiky, ranks, values, timeout=120)
    for skips, unchanged in outcomes:
        assert skips[38] and sum(skips) <= 2 and unchanged
        assert skips == outcomes[0][0], "all ranks leave out the same steps"


def windows(rank: int, world_size: int, values: dict[str, Any]) -> tuple[list[float], list[float]]:
    """For the pool: the losses known at the end of a run's first half, and where the second begins."""
    training = begin(values)
    train(training)
    known_losses = training.engine.spikes.state()  # type: ignore[attr-defined]
    training.engine.close()
    return known_losses, begin(values).engine.spikes.state()  # type: ignore[attr-defined]


@pytest.mark.parametrize("engine", ["native", "deepspeed"])
def test_a_resumed_run_compares_with_the_losses_before(engine: str, tmp_path: Path) -> None:
    values = _values(tmp_path, {"engine": engine}, checkpoint_factor=3, exit_interval=3, skip_step_above_sigma=6.0)
    [(saved_losses, resumed_losses)] = run_ranks(windows, 1, values)
    assert len(saved_losses) == 3 and resumed_losses == saved_losses


def poison_moment(rank: int, world_size: int, values: dict[str, Any], step: int) -> str | None:
    """For the pool: a moment of Adam turns NaN on the last rank before `step`, whose gradients are finite."""
    training = begin(values)

    def spoil(number: int) -> None:
        if number == step and rank == world_size - 1:
            training.engine.sharded_states()["exp_avg"][0][1].view(-1)[5] = math.nan

    runs.before_steps(training, spoil)
    return train_until_error(training)


@pytest.mark.parametrize(("name", "step", "overrides"), cells(
    # Seen by step 4, whose stop would save step 3; the save of step 4 comes before any loss tells of it.
    [("plain", 3, {}), ("zero3", 4, {}), ("pp2", 4, {"async_save": True})],
    [("plain", 3, {"on_nonfinite": "skip", "nonfinite_limit": 9})],
    [("plain", 4, {}), ("tp2", 3, {}), ("zero1", 3, {"precision": "bfloat16"})],
))  # fmt: skip
def test_a_nan_moment_is_never_stored(name: str, step: int, overrides: dict[str, Any], tmp_path: Path) -> None:
    ranks, layout = LAYOUTS[name]
    values = _values(tmp_path, layout, checkpoint_factor=2, **overrides)
    errors = run_ranks(poison_moment, ranks, values, step)
    for message in errors:
        assert re.search(r"layer_0\d-model_0\d\S*\.pt.*not finite.*global_step2", str(message)), message
    save = tmp_path / "run"
    assert (save / "latest").read_text() == "global_step2"
    assert sorted(p.name for p in save.glob("*global_step*")) == ["global_step2"]
    assert json.loads((save / "status.json").read_text())["status"] == "failed"
    restarted = run_ranks(run_to_end, ranks, values)
    uninterrupted = run_ranks(run_to_end, ranks, {**values, "save": None, "async_save": False})
    for (_, weights), (_, expected) in zip(restarted, uninterrupted, strict=True):
        assert bit_equal(weights, expected), "a restart loses nothing"


# -- fp16's loss scale
def args_of(**fp16: Any) -> NeoXArgs:
    values = config(precision="fp16", train_micro_batch_size_per_gpu=2, fp16={"enabled": True, **fp16})
    return NeoXArgs.from_dict({**values, "padded_vocab_size": 384}).for_world(1)


def test_deepspeed_is_told_everything() -> None:
    """All that its scaler reads, so that none of it is left to its defaults; NeoX's values."""
    expected = {
        "enabled": True, "loss_scale": 0.0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2,
        "consecutive_hysteresis": False, "min_loss_scale": 1.0,
    }  # fmt: skip
    assert deepspeed_config(args_of())["fp16"] == expected
    for changes in ({"initial_scale_power": 12, "hysteresis": 1}, {"loss_scale": 32.0}, {"min_loss_scale": 4.0}):
        assert deepspeed_config(args_of(**changes))["fp16"] == {**expected, **changes}
    assert "fp16" not in deepspeed_config(args_of().replace(precision="bfloat16", fp16=None))


def scales(rank: int, world_size: int, runs: list[tuple[dict[str, Any], str]]) -> list[list[float]]:
    """For the pool: the scale after each step of each run, by DeepSpeed's own reading of our settings."""
    attach_deepspeed()
    scales_by_run = []
    for fp16, steps in runs:
        read = get_float16_config(deepspeed_config(args_of(**fp16)))
        scaler = CreateLossScaler(torch.half, read.loss_scale, read.loss_scale == 0, read.dynamic_loss_scale_args())
        vars(scaler)["raise_error_at_min_scale"] = False  # as the engine sets it
        scales_by_run.append([(scaler.update_scale(step == "x"), scaler.loss_scale)[1] for step in steps])
    return scales_by_run


# Settings, steps (x: an overflow), and the scale after each.
SCALES: list[tuple[dict[str, Any], str, list[float]]] = [
    ({"initial_scale_power": 8}, "xxx", [256, 128, 64]),  # hysteresis: the second overflow halves
    ({"initial_scale_power": 8, "hysteresis": 1}, "xx.", [128, 64, 64]),
    ({"initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 2}, ".x.....", [16, 8, 8, 8, 16, 16, 32]),
    ({"initial_scale_power": 3, "hysteresis": 1, "min_loss_scale": 4.0}, "x", [4]),
    ({"loss_scale": 32.0}, "xx.", [32, 32, 32]),  # a fixed one stays
]


def test_deepspeeds_scaler_moves_as_it_is_told() -> None:
    actual = run_ranks(scales, 1, [(fp16, steps) for fp16, steps, _ in SCALES])[0]
    assert actual == [expected for _, _, expected in SCALES]


def run_fake(rank: int, world_size: int, overflow: set[int], steps: int) -> tuple[str | None, int, int]:
    """For the pool: an engine that overflows in these steps; what was raised, steps taken and left out."""
    fp16 = {"precision": "fp16", "fp16": {"enabled": True}}
    training, overflows = (
        begin(config(fp16, train_iters=steps, train_micro_batch_size_per_gpu=8, log_interval=1000)),
        [],
    )

    def train_step(*args: Any) -> StepResult:
        overflows.append(len(overflows) + 1 in overflow)
        return StepResult(torch.tensor(math.nan if overflows[-1] else 1.0), torch.tensor(1.0), overflows[-1])

    engine: Any = SimpleNamespace(train_step=train_step, stage=training.engine.stage, tensors=dict)
    training = replace(training, engine=engine)
    return train_until_error(training), len(overflows), training.progress.skipped


def test_the_run_stops_after_fifty_overflows_in_a_row() -> None:
    limit = FP16_OVERFLOWS_IN_A_ROW
    assert limit == 50, "as GPT-NeoX"
    bearable = {3, *range(10, 10 + limit)}
    assert run_ranks(run_fake, 1, bearable, 70)[0] == (None, 70, limit + 1)
    message, steps, _ = run_ranks(run_fake, 1, set(range(10, 70)), 70)[0]
    assert steps == 11 + limit, "known when the next has begun"
    assert re.search(f"^step {steps - 1}: 51 fp16 overflows", str(message))
    # `on_nonfinite: stop` is for losses and gradients that no smaller scale would mend.
    assert most_skips(args_of()) == limit
    assert most_skips(args_of().replace(precision="bfloat16", fp16=None)) == 0
