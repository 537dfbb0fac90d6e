"""A run told to stop finishes its step, saves and says so; the next start goes on bit for bit."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pool import run_ranks
from tests.training.checkpoint.test_resume import losses
from tests.training.runs import LAYOUTS, NEOX, begin, bit_equal, config, run_to_end


def run_with_signal(rank: int, world_size: int, values: dict[str, Any], number: int, at: int, to: int) -> str:
    """For the pool: rank `to` gets a signal during step `at`; the last line of the log."""
    import logging

    from megatron.training import train

    training = begin(values)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron").addHandler(handler)
    train_step = training.engine.train_step

    def step(*given: Any) -> Any:
        if training.progress.iteration + 1 == at and rank == to:
            os.kill(os.getpid(), number)
        return train_step(*given)

    training.engine.train_step = step  # type: ignore[method-assign]
    train(training)
    return lines[-1] if lines else ""


def _values(tmp_path: Path, layout: dict[str, Any], name: str = "run", **more: Any) -> dict[str, Any]:
    values = config(NEOX, layout, num_layers=2, train_micro_batch_size_per_gpu=4, train_iters=6, checkpoint_factor=100)
    return {**values, "save": str(tmp_path / name), "load": str(tmp_path / name), **more}


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("plain", signal.SIGINT),
        ("plain", signal.SIGUSR1),
        *((name, signal.SIGTERM) for name in ("plain", "tp2", "pp2", "zero1")),
    ],
)
def test_signal_to_one_rank_stops_all(name: str, number: signal.Signals, tmp_path: Path) -> None:
    ranks, layout = LAYOUTS[name]
    lines = run_ranks(run_with_signal, ranks, _values(tmp_path, layout), number, 3, ranks - 1)
    stopped = 3 if ranks == 1 else 4  # other ranks hear of it one step later
    assert lines[0] == f"run stopped at iteration {stopped}: signal {number.name}"
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["status"], status["iteration"], status["reason"]) == ("stopped", stopped, f"signal {number.name}")
    went_on = run_ranks(run_to_end, ranks, _values(tmp_path, layout))
    through = run_ranks(run_to_end, ranks, _values(tmp_path, layout, "through"))
    assert losses(tmp_path / "run") == losses(tmp_path / "through")
    assert all(bit_equal(a[1], b[1]) for a, b in zip(went_on, through, strict=True))
    assert json.loads((tmp_path / "run" / "status.json").read_text())["status"] == "finished"


def test_second_signal_ends_at_once(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?i)sigterm|signal 15|-15"):
        run_ranks(two_signals, 1, _values(tmp_path, {}), 2.2)
    assert not (tmp_path / "run" / "latest").exists()


def test_a_signal_and_its_echo_are_one(tmp_path: Path) -> None:
    """A scheduler signals every process; the launcher passes on what it got."""
    run_ranks(two_signals, 1, _values(tmp_path, {}), 0.1)
    assert (tmp_path / "run" / "latest").read_text() == "global_step1"


def test_timed_saves_are_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With several ranks the answer comes a step after the question."""
    from types import SimpleNamespace

    from megatron.callbacks import Step, StepResult
    from megatron.mpu import ParallelGroups
    from megatron.training.callbacks import stopping
    from megatron.training.loop_state import LoopState

    clock = [0.0]
    monkeypatch.setattr(stopping, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    args = SimpleNamespace(exit_duration_in_mins=None, save_interval_in_mins=1.0, exit_interval=None)
    checkpointer, state = SimpleNamespace(failed=False), LoopState()
    training = SimpleNamespace(args=args, groups=ParallelGroups.single(), checkpointer=checkpointer, loop=state)
    stop = stopping.StopCallback(training)  # type: ignore[arg-type]
    before: list[list[int] | None] = [None]

    def late(values: list[int]) -> list[int] | None:
        answer, before[0] = before[0], values
        return answer

    stop._agreement.exchange = late  # type: ignore[method-assign]
    saves, result = [], StepResult(torch.zeros(()), None, False)
    for step in range(1, 31):
        clock[0] += 10.0
        if stop.decide(step)[1]:
            saves.append(step)
            stop.on_save(training, Step(step, step, 1, result), False)  # type: ignore[arg-type]
    stop.close()
    assert saves == [7, 14, 21, 28]


def test_status_of_a_run_that_breaks(tmp_path: Path) -> None:
    """What an earlier, finished start wrote does not stay."""
    run_ranks(run_to_end, 1, _values(tmp_path, {}))
    with pytest.raises(AssertionError, match="broken on purpose"):
        run_ranks(breaks, 2, _values(tmp_path, {}, train_iters=8, lr_decay_iters=6, no_load_optim=True))
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["status"], status["iteration"]) == ("failed", 6) and status["train_iters"] == 8


def breaks(rank: int, world_size: int, values: dict[str, Any]) -> None:
    """For the pool: rank 0's next step raises."""
    from megatron.training import train

    training = begin(values)

    def step(*given: Any) -> Any:
        raise RuntimeError("broken on purpose")

    training.engine.train_step = step  # type: ignore[method-assign]
    train(training)


def two_signals(rank: int, world_size: int, values: dict[str, Any], later: float) -> None:
    """For the pool: both in one step."""
    from megatron.training import train

    training = begin(values)
    train_step = training.engine.train_step

    def step(*given: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(later)
        os.kill(os.getpid(), signal.SIGTERM)
        return train_step(*given)

    training.engine.train_step = step  # type: ignore[method-assign]
    train(training)


def test_exit_interval(tmp_path: Path) -> None:
    run_ranks(run_to_end, 2, _values(tmp_path, {}, exit_interval=4))
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["status"], status["iteration"], status["reason"]) == ("stopped", 4, "exit_interval 4")
    assert (tmp_path / "run" / "latest").read_text() == "global_step4"


def test_time_limits(tmp_path: Path) -> None:
    run_ranks(run_to_end, 1, _values(tmp_path, {}, exit_duration_in_mins=1e-6))
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["iteration"], status["reason"]) == (1, "exit_duration_in_mins 1e-06")
    run_ranks(run_to_end, 2, _values(tmp_path, {}, "timed", save_interval_in_mins=1e-6))
    saved = sorted(p.name for p in (tmp_path / "timed").glob("global_step*"))
    assert len(saved) >= 4 and saved[-1] == "global_step6"
