"""Lets a thread of rank 0 decide which operation all ranks run next in their main threads."""

import pickle
import queue
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from megatron.distributed.process_group import World, run_on_each_rank
from megatron.process import look_for_stop

T = TypeVar("T")
IDLE_S = 5.0  # ranks that wait in a collective hear from rank 0 this often


class RunOperation(Protocol):
    """Runs the operation named `operation` with these arguments on every rank. Returns rank 0's result, or
    raises the exception of the lowest failing rank."""

    def __call__(self, operation: str, /, *arguments: Any) -> Any: ...


class Rank0Error(RuntimeError):
    """Raised on other ranks in place of an exception of rank 0 whose class they may be unable to import."""


def run_rank0_driver(
    world: World,
    work: Callable[[RunOperation], T],
    operations: Mapping[str, Callable[..., Any]],
    *,
    on_beat: Callable[[], None] = lambda: None,
) -> T | None:
    """Runs `work(call)` in a thread of rank 0, which can run operations on every rank through `call`.

    Returns the result of `work` on rank 0, None on other ranks. An exception of `work` is raised on every
    rank. All ranks call this function together.

    operations: {name: function}. `call("name", ...)` runs the function in the main thread of every rank, with
        rank 0's arguments (picklable), and returns rank 0's result. After a stop signal to any rank, `call`
        raises StopRequested.
    on_beat: called on every rank for each message that rank 0 broadcasts. While `work` calls no operation,
        rank 0 broadcasts a message every few seconds, so that no collective times out.
    """
    if world.world_size == 1:
        return work(lambda name, *arguments: operations[name](*arguments))
    driver = _DriverThread(work) if world.world_rank == 0 else None
    try:
        while True:
            message: list[Any] = [driver.next_message() if driver is not None else None]
            dist.broadcast_object_list(message, src=0)
            on_beat()
            kind, *details = message[0]
            if kind == "done":
                return driver.result if driver is not None else None
            if kind == "failed":
                raise driver.problem if driver is not None and driver.problem is not None else details[0]
            if kind == "call":
                name, arguments = details
                outcome = _run(world, partial(operations[name], *arguments))
                if driver is not None:
                    driver.answer(*outcome)
    finally:
        if driver is not None:
            # Ends the thread if it waits for an answer
            driver.answer(None, Rank0Error("rank 0's main thread has stopped running operations for this thread"))


class _DriverThread:
    """The thread of rank 0 that runs `work`, and the two queues between it and the main thread."""

    def __init__(self, work: Callable[[RunOperation], Any]) -> None:
        self._messages: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
        self.result: Any = None
        self.problem: Exception | None = None
        # A daemon thread: the process can end even if a read in this thread blocks for ever.
        threading.Thread(target=self._work, args=(work,), name="rank0-driver", daemon=True).start()

    def next_message(self) -> tuple[Any, ...]:
        """Returns the thread's next message to all ranks; ("wait",) if none comes within IDLE_S seconds."""
        try:
            return self._messages.get(timeout=IDLE_S)
        except queue.Empty:
            return ("wait",)

    def answer(self, result: Any, problem: Exception | None) -> None:
        """Passes the result or exception of an operation to the thread that called the operation."""
        self._answers.put((result, problem))

    def _work(self, work: Callable[[RunOperation], Any]) -> None:
        try:
            self.result = work(self._call)
            self._messages.put(("done",))
        except Exception as problem:  # raised by the main threads
            self.problem = problem
            self._messages.put(("failed", _portable(problem)))

    def _call(self, operation: str, /, *arguments: Any) -> Any:
        self._messages.put(("call", operation, arguments))
        result, problem = self._answers.get()
        if problem is not None:
            raise problem
        return result


def _run(world: World, work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return run_on_each_rank(world, partial(_unless_stopped, work)), None
    except Exception as problem:  # raised again in rank 0's thread
        return None, problem


def _unless_stopped(work: Callable[[], T]) -> T:
    result = work()
    look_for_stop()  # a stop signal to this rank may not have reached rank 0
    return result


def _portable(problem: Exception) -> Exception:
    """Returns the exception if other ranks can unpickle it without importing a third-party library, else a
    Rank0Error with its text."""
    if type(problem).__module__.partition(".")[0] in ("builtins", "megatron"):
        try:
            if isinstance(pickle.loads(pickle.dumps(problem)), type(problem)):
                return problem
        except Exception:
            pass
    return Rank0Error(f"{type(problem).__name__}: {problem}")
