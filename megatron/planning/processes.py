"""Processes whose torch has fake CUDA, in which ranks of a planned run live."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Self, TypeVar

from megatron.neox_arguments import UserError
from megatron.planning.fake_cuda import shim

Argument = TypeVar("Argument")
Result = TypeVar("Result")


class PlanError(UserError):
    """Raised if this machine cannot plan a run."""


class StepError(PlanError):
    """Raised if the step of a planned run fails."""


class Processes:
    """Up to `number` processes with fake CUDA. They start as there is work for them, and serve all calls."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def map(self, function: Callable[[Argument], Result], arguments: Sequence[Argument]) -> Iterator[Result]:
        """Yields the results, in their order, as soon as they are there.

        Raises PlanError if there can be no fake CUDA here, or a process dies.
        """
        if self._pool is None:
            if (reason := shim.lacking()) is not None:
                raise PlanError(reason)
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.number, context, _begin_process, (shim.build(),))
        try:
            yield from self._pool.map(function, arguments)
        except BrokenProcessPool:
            message = f"a process that ran ranks has died; is memory short? use --processes {self.number // 2 or 1}"
            raise PlanError(message) from None


def _begin_process(library: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()
    os.environ["DS_ACCELERATOR"] = "cpu"
    shim.preload(library)


def _follow(parent: int) -> None:
    """Ends this process soon after its parent, which may end without a word to it."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
