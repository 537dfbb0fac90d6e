"""The native engine's loss scale of fp16: it moves as DeepSpeed's, and both engines train alike."""

from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from megatron.training.native.loss_scaler import LossScaler
from tests.pool import run_ranks
from tests.training.batches import batches_of
from tests.training.runs import LLAMA, begin, cells, config
from tests.training.test_nonfinite import SCALES, args_of, scales


def native_scales(fp16: dict[str, Any], steps: str) -> list[float]:
    """The scale after each step. x: an overflow; u: a step without trained tokens."""
    scaler, step_scales = LossScaler(args_of(**fp16), torch.device("cpu")), []
    for step in steps:
        scaler.update(torch.tensor(step == "x"), torch.tensor(step == "u"))
        step_scales.append(float(scaler.scale))
    return step_scales


def test_the_scale_moves_as_deepspeeds() -> None:
    for fp16, steps, expected in SCALES:
        assert native_scales(fp16, steps) == expected
    random = np.random.default_rng(3)
    settings = product((1, 2, 3), (False, True), (1, 4, 7), (1.0, 64.0))
    runs = [
        ({"initial_scale_power": 12, "hysteresis": hysteresis, "consecutive_hysteresis": refills,
          "loss_scale_window": window, "min_loss_scale": minimum}, "".join(random.choice(list("xx...."), 120)))
        for hysteresis, refills, window, minimum in settings
    ]  # fmt: skip
    for (fp16, steps), expected in zip(runs, run_ranks(scales, 1, runs)[0], strict=True):
        assert native_scales(fp16, steps) == expected, fp16
        assert native_scales(fp16, "u".join(steps))[::2] == expected, "a step without trained tokens does not count"


def test_a_restored_scale_goes_on() -> None:
    settings = {"initial_scale_power": 6, "loss_scale_window": 3}
    steps = "..x..x.x....."
    scaler = LossScaler(args_of(**settings), torch.device("cpu"))
    for step in steps[:7]:
        scaler.update(torch.tensor(step == "x"), torch.tensor(False))
    restored = LossScaler(args_of(**settings), torch.device("cpu"))
    restored.restore(scaler.state())
    for step, expected in zip(steps[7:], native_scales(settings, steps)[7:], strict=True):
        restored.update(torch.tensor(step == "x"), torch.tensor(False))
        assert float(restored.scale) == expected


class Fp16Steps(NamedTuple):
    """The results of a run's steps."""

    losses: list[float]
    skipped: list[bool]
    scales: list[float]


def fp16_steps(rank: int, world_size: int, values: dict[str, Any], steps: int) -> Fp16Steps:
    """For the pool."""
    training, results = begin(values), Fp16Steps([], [], [])
    batches = batches_of(training)
    for _ in range(steps):
        result = training.engine.train_step(next(batches), 1e-3)
        results.losses.append(float(result.loss))
        results.skipped.append(bool(result.skipped))
        results.scales.append(float(result.loss_scale or 0.0))
    training.engine.close()
    return results


LAYOUTS: dict[str, dict[str, Any]] = {
    "zero1": {"zero_optimization": {"stage": 1}}, "zero3": {"zero_optimization": {"stage": 3}},
    "pp2": {"pipe_parallel_size": 2}, "tp2": {"model_parallel_size": 2},
}  # fmt: skip


@pytest.mark.parametrize("layout", cells(["pp2"], product=["zero3", "zero1", "tp2"]))
def test_engines_agree_in_fp16(layout: str) -> None:
    """The first steps overflow; later the scale grows again.

    Not so with data ranks, over which DeepSpeed averages: its gradients are twice as large, and overflow
    earlier."""
    power = 8 if "zero" in layout else 24
    fp16 = {"precision": "fp16", "fp16": {"initial_scale_power": power, "hysteresis": 1, "loss_scale_window": 4}}
    keys = {**LAYOUTS[layout], "train_micro_batch_size_per_gpu": 2}
    native, deepspeed = (
        run_ranks(fp16_steps, 2, config(LLAMA, fp16, keys, engine=engine), 16)[0] for engine in ("native", "deepspeed")
    )
    assert native.scales == deepspeed.scales and native.skipped == deepspeed.skipped
    assert native.skipped[0] is (power == 24) and not all(native.skipped[8:]) and len(set(native.scales)) > 3
    assert native.losses == pytest.approx(deepspeed.losses, rel=2e-3)
    assert native.losses[-1] < native.losses[0] - 0.05
