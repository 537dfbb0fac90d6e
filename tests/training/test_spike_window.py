"""The losses that spikes are judged by go on with a resumed run."""

from pathlib import Path
from typing import Any

import pytest

from megatron.training import train
from megatron.training.nonfinite_guard import SpikeGuard
from tests.pool import run_ranks
from tests.training.runs import LLAMA, begin, config


def windows(rank: int, world_size: int, values: dict[str, Any]) -> tuple[list[float], list[float]]:
    """For the pool: the losses known at the end of a run's first half, and where the second begins."""
    known = []
    for _ in range(2):
        training = begin(values)
        if not known:
            train(training)
        known.append(training.engine.spikes.state())  # type: ignore[attr-defined]
        training.engine.close()
    return known[0], known[1]


@pytest.mark.parametrize("engine", ["native", "deepspeed"])
def test_a_resumed_run_compares_with_the_losses_before(engine: str, tmp_path: Path) -> None:
    values = config(
        LLAMA, engine=engine, num_layers=2, train_iters=6, checkpoint_factor=3, exit_interval=3,
        skip_step_above_sigma=6.0, load=str(tmp_path), save=str(tmp_path),
    )  # fmt: skip
    [(before, after)] = run_ranks(windows, 1, values)
    assert len(before) == 3 and after == before


def test_what_is_restored_decides() -> None:
    before, after = SpikeGuard(6.0), SpikeGuard(6.0)
    for i in range(SpikeGuard.LEAST):
        before.decide(2.0 + 0.01 * (i % 2))
    after.restore(before.state())
    after.decide(2.5)
    assert after.skips and after.state() == before.state()
