"""No rank waits for ever, and no run is silent for long."""

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron.neox_arguments import NeoXArgs
from megatron.process import StopRequested

SAY_EVERY_S = 60.0
STDERR = 2


class Watchdog:
    """Ends this rank when it stops moving, and says on rank 0 what takes long. It is told of every step and
    phase.

    Until the first step is done, and within a `phase`, ranks may wait `first_step_timeout_mins` for each
    other; within later steps `collective_timeout_s`, or three times the longest step so far if that is more.
    Collectives of all process groups get this time-out. A rank that has not moved for half as long again
    (gloo's send and receive keep the time-out they were made with; a deadlock needs no collective) writes the
    stacks of its threads to stderr and ends with exit code 1: a thread of faulthandler's does it, which needs
    no interpreter. One rank alone waits for nobody and is not watched. doing: what it was last told of;
    listener: is called with each such thing as it begins, by this thread.
    """

    def __init__(self, args: NeoXArgs, world_size: int, logger: logging.Logger) -> None:
        self.restarts = int(os.environ.get("NEOX_RESTARTS", "0"))  # set by deepy.py --max-restarts
        self._watched = world_size > 1
        self._long, self._least = args.first_step_timeout_mins * 60.0, args.collective_timeout_s
        self._limit = self._long  # of a step
        self._longest = 0.0
        self.listener: Callable[[str], None] | None = None
        self._logger = logger
        self._said = time.monotonic()
        self._closed = threading.Event()
        logger.addFilter(self._note_line)
        self.now("starting")
        if logger.isEnabledFor(logging.INFO):
            threading.Thread(target=self._say_what_takes_long, name="watchdog", daemon=True).start()

    def now(self, doing: str) -> None:
        """Note that something else begins, in words as `loading the model`; it may take long."""
        self._enter(doing, self._long)

    def step_done(self, iteration: int) -> None:
        """Note that optimizer step `iteration` is done and the next one begins."""
        self._longest = max(self._longest, time.monotonic() - self._since)
        before, self._limit = self._limit, max(self._least, 3.0 * self._longest)
        self._enter(f"in step {iteration + 1}", self._limit, changed=before != self._limit)

    @contextmanager
    def phase(self, doing: str) -> Iterator[None]:
        """A block between steps that may take long, as saving or validation; `doing` is what is said of
        it. Where a stop signal ends it that is said."""
        before = self.doing
        self.now(doing)
        try:
            yield
        except StopRequested as stop:
            self._logger.info(f"{doing}: given up, {stop} ends the run")
            raise
        finally:
            self._enter(before, self._limit)

    def close(self) -> None:
        """Stop watching, for the run is over."""
        self._closed.set()
        self._logger.removeFilter(self._note_line)
        if self._watched:
            faulthandler.cancel_dump_traceback_later()

    def _enter(self, doing: str, seconds: float, changed: bool = True) -> None:
        self.doing, self._since = doing, time.monotonic()
        if self.listener is not None:
            self.listener(doing)
        if not self._watched:
            return
        faulthandler.dump_traceback_later(1.5 * seconds, exit=True, file=STDERR)
        if changed and dist.is_initialized():
            set_timeouts(seconds)

    def _note_line(self, record: logging.LogRecord) -> bool:
        self._said = time.monotonic()
        return True

    def _say_what_takes_long(self) -> None:
        while not self._closed.wait(max(0.1, self._said + SAY_EVERY_S - time.monotonic())):
            now = time.monotonic()
            if now - self._said >= SAY_EVERY_S:
                self._logger.info(f"still {self.doing}, for {now - self._since:.0f} s")


def set_timeouts(seconds: float) -> None:
    """Bound the collectives that begin from now on, in every process group of this process, DeepSpeed's
    included."""
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
