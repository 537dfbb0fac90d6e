"""Ranks that do not move: collectives that run out of time, stacks, and what is said meanwhile."""

import faulthandler
import logging
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.distributed import Watchdog, watchdog
from megatron.neox_arguments import NeoXArgs
from tests.pool import run_ranks
from tests.training.runs import config


def _watchdog(**more: Any) -> Watchdog:
    return Watchdog(NeoXArgs.from_dict(config(**more)), dist.get_world_size(), logging.getLogger("test"))


def _late(rank: int, world_size: int, where: str, late: float) -> str:
    """Rank 1 comes late to an all-reduce in a group made before the first step; what rank 0 sees of it."""
    group = dist.new_group()
    watch = _watchdog(first_step_timeout_mins=1.0, collective_timeout_s=1.0)
    dist.all_reduce(torch.ones(1), group=group)
    if where != "first step":
        watch.step_done(1)
    if where == "slow run":
        watch._longest = late
        watch.step_done(2)
    if where == "saving":
        with watch.phase("saving"):
            return _meet(rank, group, late)
    if where == "after saving":
        with watch.phase("saving"):
            pass
    return _meet(rank, group, late)


def _meet(rank: int, group: Any, late: float) -> str:
    if rank == 1:
        faulthandler.cancel_dump_traceback_later()  # of its own watchdog, which would end it
        time.sleep(late)
        return "" if late > 2 else _all_reduce(group)
    return _all_reduce(group)


def _all_reduce(group: Any) -> str:
    began = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as problem:
        return f"{'in time' if time.monotonic() - began < 2.0 else 'late'}: {problem}"
    return "met"


@pytest.mark.parametrize("where", ["later step", "after saving"])
def test_a_collective_of_a_step_does_not_wait_long(where):
    seen = run_ranks(_late, 2, where, 2.5)[0]
    assert seen.startswith("in time") and "Timed out" in seen


@pytest.mark.parametrize("where", ["first step", "saving", "slow run"])
def test_phases_that_may_take_long_and_slow_runs_have_the_time(where):
    assert run_ranks(_late, 2, where, 1.4) == ["met", "met"]


def _deadlocked(rank: int, world_size: int) -> None:
    watch = _watchdog(collective_timeout_s=1.0)
    watch.step_done(1)
    if rank == 1:
        lock = threading.Lock()
        lock.acquire()
        _waits_for_ever(lock)
    dist.recv(torch.ones(1), src=1)  # gloo: bounded by the time-out at creation, 30 minutes


def _waits_for_ever(lock: Any) -> None:
    lock.acquire()


def test_a_rank_that_does_not_move_shows_its_stacks_and_ends(capfd):
    began = time.monotonic()
    with pytest.raises(AssertionError, match=r"rank \d of 2 failed\n.*exit code 1"):
        run_ranks(_deadlocked, 2)
    assert time.monotonic() - began < 20
    out = capfd.readouterr().out
    assert "Timeout (0:00:01.5" in out
    assert "in _waits_for_ever" in out or "in recv" in out


def test_long_silence_is_broken(monkeypatch):
    monkeypatch.setattr(watchdog, "SAY_EVERY_S", 1.0)
    logger, lines = logging.getLogger("test_watchdog"), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    watch = Watchdog(NeoXArgs.from_dict(config()), 1, logger)
    try:
        with watch.phase("saving"):
            for _ in range(12):
                time.sleep(0.1)
                logger.info("busy")
            assert set(lines) == {"busy"}
            time.sleep(1.5)
        assert any(line.startswith("still saving, for ") for line in lines)
    finally:
        watch.close()
        logger.removeHandler(handler)
