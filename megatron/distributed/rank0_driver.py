"""Work that a thread of rank 0 directs: it says what is done next, and the main threads of all ranks do
it."""

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
    """Run an operation on every rank; rank 0's result, or what the first rank to fail raised."""

    def __call__(self, operation: str, /, *arguments: Any) -> Any: ...


class Rank0Error(RuntimeError):
    """What rank 0 ran into, as told to ranks that do not know its kind of exception."""


def run_rank0_driver(
    world: World,
    work: Callable[[RunOperation], T],
    operations: Mapping[str, Callable[..., Any]],
    *,
    on_beat: Callable[[], None] = lambda: None,
) -> T | None:
    """Run `work(call)` on rank 0 and return its result there, None on the other ranks; all ranks call it
    together.

    operations: what `call("name", ...)` runs in the main thread of every rank, with rank 0's arguments
    (picklable); once a stop signal has come to a rank, StopRequested is raised where the work calls one. No
    collective waits for the work itself: rank 0 says every few seconds that nothing is to be done yet.
    on_beat: called on every rank at each message from rank 0. What the work raises is raised on
    every rank.
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
            driver.answer(None, Rank0Error("this rank has stopped leading"))  # lets a thread that waits end


class _DriverThread:
    """The thread of rank 0 that does the work, and the two queues between it and the main thread."""

    def __init__(self, work: Callable[[RunOperation], Any]) -> None:
        self._messages: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
        self.result: Any = None
        self.problem: Exception | None = None
        # A daemon: what it reads may take for ever, and the process ends without it.
        threading.Thread(target=self._work, args=(work,), name="rank0-driver", daemon=True).start()

    def next_message(self) -> tuple[Any, ...]:
        """The next message of rank 0 to all ranks, which says what they do now; `wait` if none comes."""
        try:
            return self._messages.get(timeout=IDLE_S)
        except queue.Empty:
            return ("wait",)

    def answer(self, result: Any, problem: Exception | None) -> None:
        """Give the thread what the operation that it asked for returned or raised."""
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
    except Exception as problem:  # rank 0's thread decides what it means
        return None, problem


def _unless_stopped(work: Callable[[], T]) -> T:
    result = work()
    look_for_stop()  # of this rank, which rank 0's thread may not have heard of
    return result


def _portable(problem: Exception) -> Exception:
    """The problem, or its words where another process could not read it (or would import a library to)."""
    if type(problem).__module__.partition(".")[0] in ("builtins", "megatron"):
        try:
            if isinstance(pickle.loads(pickle.dumps(problem)), type(problem)):
                return problem
        except Exception:
            pass
    return Rank0Error(f"{type(problem).__name__}: {problem}")
