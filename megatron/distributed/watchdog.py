"""Ends a rank that makes no progress, and logs which activities take long."""

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
    """Ends this rank when it stops making progress, and logs on rank 0 which activity takes long.

    The time limit is `first_step_timeout_mins` until the end of the first step and in a `phase`. In later
    steps it is `collective_timeout_s`, or three times the longest step so far if that is more. Collectives of
    all process groups get this limit as their timeout.

    A rank without progress for 1.5 times the limit writes the stacks of its threads to stderr and exits with
    code 1. A thread of faulthandler does that, so it works while the interpreter is blocked. This catches
    waits that have no collective timeout (gloo's send and receive, deadlocks). A run of a single rank is not
    watched.

    activity: text that names the current activity.
    listener: called with each activity as it begins, in the calling thread.
    """

    def __init__(self, args: NeoXArgs, world_size: int, logger: logging.Logger) -> None:
        self.restarts = int(os.environ.get("NEOX_RESTARTS", "0"))  # set by deepy.py --max-restarts
        self._watched = world_size > 1
        self._long, self._min_limit = args.first_step_limit_mins * 60.0, args.collective_timeout_s
        self._limit = self._long  # of a step
        self._longest = 0.0
        self.listener: Callable[[str], None] | None = None
        self._logger = logger
        self._last_line_time = time.monotonic()
        self._closed = threading.Event()
        logger.addFilter(self._note_line)
        self.now("starting")
        if logger.isEnabledFor(logging.INFO):
            threading.Thread(target=self._say_what_takes_long, name="watchdog", daemon=True).start()

    def now(self, activity: str) -> None:
        """Records that this rank begins `activity`, such as "loading the model". Its time limit is
        `first_step_timeout_mins`."""
        self._enter(activity, self._long)

    def step_done(self, iteration: int) -> None:
        """Records that optimizer step `iteration` is done and the next one begins."""
        self._longest = max(self._longest, time.monotonic() - self._start_time)
        previous, self._limit = self._limit, max(self._min_limit, 3.0 * self._longest)
        self._enter(f"in step {iteration + 1}", self._limit, changed=previous != self._limit)

    @contextmanager
    def phase(self, activity: str) -> Iterator[None]:
        """Records `activity`, such as saving, as the current activity during the `with` block.

        Its time limit is `first_step_timeout_mins`. If a stop signal ends the block, a line is logged.
        """
        previous = self.activity
        self.now(activity)
        try:
            yield
        except StopRequested as stop:
            self._logger.info(f"{activity}: given up, because {stop} ends the run")
            raise
        finally:
            self._enter(previous, self._limit)

    def close(self) -> None:
        """Stops watching, at the end of the run."""
        self._closed.set()
        self._logger.removeFilter(self._note_line)
        if self._watched:
            faulthandler.cancel_dump_traceback_later()

    def _enter(self, activity: str, seconds: float, changed: bool = True) -> None:
        self.activity, self._start_time = activity, time.monotonic()
        if self.listener is not None:
            self.listener(activity)
        if not self._watched:
            return
        faulthandler.dump_traceback_later(1.5 * seconds, exit=True, file=STDERR)
        if changed and dist.is_initialized():
            # The limit of later collectives in every process group of this process, including DeepSpeed's
            for group in list(distributed_c10d._world.pg_map):
                distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)

    def _note_line(self, record: logging.LogRecord) -> bool:
        self._last_line_time = time.monotonic()
        return True

    def _say_what_takes_long(self) -> None:
        while not self._closed.wait(max(0.1, self._last_line_time + SAY_EVERY_S - time.monotonic())):
            now = time.monotonic()
            if now - self._last_line_time >= SAY_EVERY_S:
                self._logger.info(f"still {self.activity}, for {now - self._start_time:.0f} s")
