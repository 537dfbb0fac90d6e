"""Writes a checkpoint while training continues: one at a time, by a thread on each rank."""

import atexit
import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from megatron.distributed import run_on_all_ranks_of
from megatron.mpu import ParallelGroups

T = TypeVar("T")
_LONGEST_WRITE = timedelta(hours=12)  # the time that the slowest rank may take, for which the others wait


class BackgroundWriter:
    """Writes checkpoints by a background thread on each rank.

    The threads communicate in a process group of their own. problem: the exception of the last write, the
    same on every rank; None without one. A failed write is not retried.
    """

    def __init__(self, groups: ParallelGroups) -> None:
        self._group = dist.new_group(backend="gloo", timeout=_LONGEST_WRITE) if groups.world_size > 1 else None
        self._is_first_rank, self._size = groups.world_rank == 0, groups.world_size
        self._thread: threading.Thread | None = None
        self.problem: Exception | None = None
        atexit.register(self._leave)

    def start(self, write: Callable[[], T], finish: Callable[[list[T]], None]) -> None:
        """Begin to run `write` on every rank, and then `finish` on rank 0 with the results of all ranks.

        All ranks call it together, and only after `wait`.
        """
        assert self._thread is None
        # A daemon thread, so that a run that fails does not wait for a checkpoint that would stay invisible.
        self._thread = threading.Thread(target=self._work, args=(write, finish), name="checkpoint writer", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait until no write is in progress. If the last write failed, raise its exception, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        problem, self.problem = self.problem, None
        if problem is not None:
            raise problem

    def _leave(self) -> None:
        """At the end of a failed process whose thread still writes, exit with code 1.

        Otherwise, if the thread is in a collective, the interpreter's clean-up would abort with exit code
        134.
        """
        if self._thread is not None and self._thread.is_alive():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _work(self, write: Callable[[], T], finish: Callable[[list[T]], None]) -> None:
        try:
            results = run_on_all_ranks_of(self._group, self._size, write)
            run_on_all_ranks_of(self._group, self._size, lambda: finish(results) if self._is_first_rank else None)
        except Exception as problem:  # the training loop checks `problem` after every step
            self.problem = problem
