"""Weights whose rows the data ranks do not divide, and of which some ranks have none."""

from typing import Any

import pytest

from tests.pool import run_ranks
from tests.training.runs import ADAMW, RPE, config, curves, furthest, whole

STEPS = 4
FIVE: dict[str, Any] = {
    "train_batch_size": 10,
    "engine": "native",
}  # 8 rows of a table: two on four ranks, one has none


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.product), pytest.param(2, marks=pytest.mark.more), 3])
def test_five_ranks_are_as_one(stage: int) -> None:
    one = config(RPE, ADAMW, FIVE, train_micro_batch_size_per_gpu=10)
    five = config(RPE, ADAMW, FIVE, train_micro_batch_size_per_gpu=1, zero_optimization={"stage": stage})
    expected = whole([run_ranks(curves, 1, [one], STEPS)[0][0]], one)
    actual = whole([parts[0] for parts in run_ranks(curves, 5, [five], STEPS, timeout=120)], five)
    losses, norms, weights = furthest(actual, expected)
    assert losses <= 1e-5 and norms <= 1e-5 and weights <= 1e-4, (losses, norms, weights)
