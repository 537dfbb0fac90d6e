"""Jobs of the worker pool that go through several runs in the same processes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.training import train
from tests.model.stages import Weights
from tests.pool import run_ranks
from tests.training.checkpoint.test_resume import losses
from tests.training.runs import begin_each, bit_equal

TIMEOUT = 280.0  # of a job, ten times what the longest takes; a test has 300 s


def to_their_ends(rank: int, world_size: int, configs: list[dict[str, Any]]) -> list[Weights]:
    """For the pool: the weights after each run with its loop."""
    weights = []
    for training in begin_each(configs):
        train(training)
        held = training.engine.weights(master=True)
        weights.append(
            {layer: {name: tensor.clone() for name, tensor in tensors.items()} for layer, tensors in held.items()}
        )
    return weights


def interrupted_runs(
    values: dict[str, Any], folder: Path, stop_step: int = 2, resume_keys: Mapping[str, Any] = {}
) -> list[dict[str, Any]]:
    """A run in `through`; the same in `cut`, which stops early; one that resumes it, with `resume_keys`."""
    runs = [
        {**values, "checkpoint_factor": stop_step, "save": str(folder / name)} for name in ("through", "cut", "cut")
    ]
    return [runs[0], {**runs[1], "exit_interval": stop_step}, {**runs[2], "load": runs[2]["save"], **resume_keys}]


def assert_resumes(
    values: dict[str, Any], folder: Path, ranks: int = 1, tolerance: float = 0.0, **pool_options: Any
) -> list[Weights]:
    """Compares a run that stops after two steps and resumes with one that does not stop.

    Both agree bit for bit, or within `tolerance` of a weight and a loss. Returns the latter's weights."""
    weights_by_rank = run_ranks(to_their_ends, ranks, interrupted_runs(values, folder), timeout=TIMEOUT, **pool_options)
    if tolerance:
        torch.testing.assert_close(
            [rank_weights[2] for rank_weights in weights_by_rank],
            [rank_weights[0] for rank_weights in weights_by_rank],
            rtol=0,
            atol=tolerance,
        )
    else:
        assert all(bit_equal(resumed, uninterrupted) for uninterrupted, _, resumed in weights_by_rank)
    assert losses(folder / "cut") == pytest.approx(losses(folder / "through"), rel=tolerance, abs=0)
    assert len(losses(folder / "cut")) == values["train_iters"] > 2
    return [uninterrupted for uninterrupted, _, _ in weights_by_rank]
