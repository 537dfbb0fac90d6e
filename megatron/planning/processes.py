"""Processes whose torch has fake CUDA, in which ranks of a planned run live."""

import multiprocessing
import os
import signal
import sys
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
            self._pool = _forks(self.number) if _has_fake_cuda() else _spawned(self.number)
        try:
            yield from self._pool.map(function, arguments)
        except BrokenProcessPool:
            message = f"a process that ran ranks has died; is memory short? use --processes {self.number // 2 or 1}"
            raise PlanError(message) from None


def prepare_forks() -> None:
    """Gives this process fake CUDA before it imports torch, so that `Processes` may be forks of it, which
    begin with all that it has imported."""
    if shim.lacking() is None and "torch" not in sys.modules:
        os.environ["DS_ACCELERATOR"] = "cpu"
        shim.preload(shim.build())


def _has_fake_cuda() -> bool:
    """Returns whether this process, whose torch is a CPU build, has a device all the same."""
    import torch

    return torch.accelerator.current_accelerator() is not None


def _forks(number: int) -> ProcessPoolExecutor:
    from megatron.planning.tracing import fake_cuda

    with fake_cuda():  # imports, once for all forks, what it patches
        return ProcessPoolExecutor(number, multiprocessing.get_context("fork"), _begin_process)


def _spawned(number: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(number, context, _begin_spawned, (shim.build(),))


def _begin_spawned(library: Path) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    shim.preload(library)
    _begin_process()


def _begin_process() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()


def _follow(parent: int) -> None:
    """Ends this process soon after its parent, which may end without a word to it."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
