"""Ranks that do not move: collectives that run out of time, stacks, and what is said meanwhile."""

import faulthandler
import logging
import re
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.distributed import Watchdog, watchdog
from megatron.neox_arguments import NeoXArgs
from tests.pool import run_ranks
from tests.training.runs import config


def _watchdog(**overrides: Any) -> Watchdog:
    return Watchdog(NeoXArgs.from_dict(config(**overrides)), dist.get_world_size(), logging.getLogger("test"))


def _delayed_all_reduce(rank: int, world_size: int, moment: str, delay_s: float) -> str:
    """Rank 1 comes late to an all-reduce in a group made before the first step; what rank 0 sees of it."""
    group = dist.new_group()
    watch = _watchdog(first_step_timeout_mins=1.0, collective_timeout_s=1.0)
    dist.all_reduce(torch.ones(1), group=group)
    if moment != "first step":
        watch.step_done(1)
    if moment == "slow run":
        watch._longest = 20.0
        watch.step_done(2)
    with watch.phase("saving") if moment.endswith("saving") else nullcontext():
        if moment != "after saving":
            return _meet(rank, group, delay_s)
    return _meet(rank, group, delay_s)


def _meet(rank: int, group: Any, delay_s: float) -> str:
    if rank == 1:
        faulthandler.cancel_dump_traceback_later()  # of its own watchdog, which would end it
        time.sleep(delay_s)
        if delay_s > 2:
            return ""
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as problem:
        return str(problem)
    return "met"


@pytest.mark.parametrize("moment", ["later step", "after saving"])
def test_a_collective_of_a_step_does_not_wait_long(moment):
    assert re.search(r"Timed out waiting 1000 ?ms", run_ranks(_delayed_all_reduce, 2, moment, 2.5)[0])


@pytest.mark.parametrize("moment", ["first step", "saving", "slow run"])
def test_phases_that_may_take_long_and_slow_runs_have_the_time(moment):
    assert run_ranks(_delayed_all_reduce, 2, moment, 1.4) == ["met", "met"]


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
    with pytest.raises(AssertionError, match=r"rank \d of 2 failed\n.*exit code 1"):
        run_ranks(_deadlocked, 2)
    out = capfd.readouterr().out
    assert "Timeout (0:00:01.5" in out
    assert "in _waits_for_ever" in out or "in recv" in out


def test_long_silence_is_broken(monkeypatch):
    """Only where nothing was logged for so long; by a clock that only the waiting moves."""
    clock, lines, logger = [0.0], list[str](), logging.getLogger("test_watchdog")
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    watch = Watchdog(NeoXArgs.from_dict(config()), 1, logger)  # without its thread
    logger.setLevel(logging.INFO)

    def wait(seconds: float) -> bool:
        clock[0] += seconds
        if clock[0] < 200:
            logger.info("busy")
        return clock[0] > 250

    watch._closed = SimpleNamespace(wait=wait)
    with watch.phase("saving"):
        watch._say_what_takes_long()
    logger.removeHandler(handler)
    assert lines[:-1] == ["busy"] * 3 and "saving" in lines[-1] and "240 s" in lines[-1]
