"""A run told to stop finishes its step, saves and says so. tests/soak/test_faults.py starts it again."""

import json
import logging
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from megatron.callbacks import Step, StepResult
from megatron.mpu import ParallelGroups
from megatron.process import stop_signals
from megatron.training import train
from megatron.training.builtin_callbacks import stopping
from megatron.training.run import LoopState
from tests.pool import run_ranks
from tests.training.runs import NEOX, before_steps, begin, config, run_to_end


def _values(save: Path, **overrides: Any) -> dict[str, Any]:
    small = {"num_layers": 2, "train_micro_batch_size_per_gpu": 4, "train_iters": 6, "checkpoint_factor": 100}
    return config(NEOX, small, save=str(save), load=str(save), **overrides)


def _status(save: Path) -> tuple[str, int, str]:
    status = json.loads((save / "status.json").read_text())
    return status["status"], status["iteration"], status["reason"]


def run_with_signal(
    rank: int, world_size: int, values: dict[str, Any], number: int, signal_step: int, signal_rank: int
) -> str:
    """For the pool: rank `signal_rank` gets a signal during step `signal_step`; the last line of the log."""
    training, lines, handler = begin(values), [""], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron").addHandler(handler)
    before_steps(
        training, lambda step: os.kill(os.getpid(), number) if (step, rank) == (signal_step, signal_rank) else None
    )
    train(training)
    return lines[-1]


@pytest.mark.parametrize(("number", "ranks"), [(signal.SIGINT, 1), (signal.SIGUSR1, 1), (signal.SIGTERM, 2)])
def test_signal_to_one_rank_stops_all(number: signal.Signals, ranks: int, tmp_path: Path) -> None:
    lines = run_ranks(run_with_signal, ranks, _values(tmp_path), number, 3, ranks - 1)
    stopped = 3 if ranks == 1 else 4  # other ranks hear of it one step later
    assert _status(tmp_path) == ("stopped", stopped, f"signal {number.name}")
    assert f"iteration {stopped}" in lines[0] and number.name in lines[0]
    assert (tmp_path / "latest").read_text() == f"global_step{stopped}"


def two_signals(rank: int, world_size: int, values: dict[str, Any], delay: float) -> None:
    """For the pool: both in the first step, some seconds apart by its clock."""
    clock, training = [0.0], begin(values)
    stop_signals.time = SimpleNamespace(monotonic=lambda: clock[0])  # type: ignore[assignment]

    def signal_twice(step: int) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        while not training.stopping():
            pass
        clock[0] += delay
        os.kill(os.getpid(), signal.SIGTERM)

    before_steps(training, signal_twice)
    train(training)


def test_second_signal_ends_at_once_but_an_echo_is_one(tmp_path: Path) -> None:
    """A scheduler signals every process; the launcher passes on what it got."""
    with pytest.raises(AssertionError, match=r"(?i)sigterm|signal 15|-15"):
        run_ranks(two_signals, 1, _values(tmp_path), 2.2)
    assert not (tmp_path / "latest").exists()
    run_ranks(two_signals, 1, _values(tmp_path), 1.8)
    assert (tmp_path / "latest").read_text() == "global_step1"


def test_timed_saves_are_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With several ranks the answer comes a step after the question."""
    clock = [0.0]
    monkeypatch.setattr(stopping, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    args = SimpleNamespace(exit_duration_in_mins=None, save_interval_in_mins=1.0, exit_interval=None)
    checkpointer, state = SimpleNamespace(failed=False), LoopState()
    training: Any = SimpleNamespace(args=args, groups=ParallelGroups.single(), checkpointer=checkpointer, loop=state)
    stop = stopping.StopCallback(training)
    previous: list[list[int] | None] = [None]

    def exchange_late(values: list[int]) -> list[int] | None:
        answer, previous[0] = previous[0], values
        return answer

    stop._agreement.exchange = exchange_late  # type: ignore[method-assign]
    saves, result = [], StepResult(torch.zeros(()), None, False)
    for step in range(1, 31):
        clock[0] += 10.0
        if stop.decide(step)[1]:
            saves.append(step)
            stop.on_save(training, Step(step, step, 1, result), False)
    stop.close()
    assert saves == [7, 14, 21, 28]


def breaks(rank: int, world_size: int, values: dict[str, Any]) -> None:
    """For the pool: the next step raises."""
    training = begin(values)
    training.engine.train_step = Mock(side_effect=RuntimeError("broken on purpose"))  # type: ignore[method-assign]
    train(training)


def test_status_of_a_run_that_breaks(tmp_path: Path) -> None:
    """A failed run overwrites the status of an earlier, finished start."""
    run_ranks(run_to_end, 1, _values(tmp_path))
    with pytest.raises(AssertionError, match="broken on purpose"):
        run_ranks(breaks, 2, _values(tmp_path, train_iters=8, no_load_optim=True))
    assert _status(tmp_path)[:2] == ("failed", 6)
    assert json.loads((tmp_path / "status.json").read_text())["train_iters"] == 8


def test_limits_of_steps_and_time(tmp_path: Path) -> None:
    run_ranks(run_to_end, 1, _values(tmp_path, exit_duration_in_mins=1e-6))
    assert _status(tmp_path) == ("stopped", 1, "exit_duration_in_mins 1e-06")
    run_ranks(run_to_end, 2, _values(tmp_path / "timed", save_interval_in_mins=1e-6, exit_interval=4))
    assert _status(tmp_path / "timed") == ("stopped", 4, "exit_interval 4")
    assert (tmp_path / "timed" / "latest").read_text() == "global_step4"
    assert len(list((tmp_path / "timed").glob("global_step*"))) >= 2, "by the clock before the last one"
