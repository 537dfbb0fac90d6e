"""Jobs of the worker pool that go through several runs in the same processes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.generation.on_policy import answers_of
from megatron.training import train
from tests.model.stages import Weights
from tests.pool import run_ranks
from tests.training.checkpoint.test_resume import losses
from tests.training.runs import begun, bit_equal

TIMEOUT = 280.0  # of a job, ten times what the longest takes; a test has 300 s


def to_their_ends(rank: int, world_size: int, configs: list[dict[str, Any]]) -> list[Weights]:
    """For the pool: the weights after each run with its loop."""
    weights = []
    for training in begun(configs):
        train(training, (), answers_of(training) if training.args.distillation is not None else None)
        held = training.engine.weights(master=True)
        weights.append({layer: {name: one.clone() for name, one in tensors.items()} for layer, tensors in held.items()})
    return weights


def cut_off(values: dict[str, Any], folder: Path, after: int = 2, then: Mapping[str, Any] = {}) -> list[dict[str, Any]]:
    """A run in `through`; the same in `cut`, which ends early; one that goes on there, with `then`."""
    runs = [{**values, "checkpoint_factor": after, "save": str(folder / name)} for name in ("through", "cut", "cut")]
    return [runs[0], {**runs[1], "exit_interval": after}, {**runs[2], "load": runs[2]["save"], **then}]


def assert_resumes(
    values: dict[str, Any], folder: Path, ranks: int = 1, within: float = 0.0, **of_pool: Any
) -> list[Weights]:
    """A run that ends after two steps goes on as one that does not, whose weights these are: bit for bit, or
    `within` so much of a weight and a loss."""
    found = run_ranks(to_their_ends, ranks, cut_off(values, folder), timeout=TIMEOUT, **of_pool)
    if within:
        torch.testing.assert_close([one[2] for one in found], [one[0] for one in found], rtol=0, atol=within)
    else:
        assert all(bit_equal(resumed, through) for through, _, resumed in found)
    assert losses(folder / "cut") == pytest.approx(losses(folder / "through"), rel=within, abs=0)
    assert len(losses(folder / "cut")) == values["train_iters"] > 2
    return [through for through, _, _ in found]
