"""Where the thread that speaks HTTP and the main thread of rank 0 meet: requests go in, events come out."""

from __future__ import annotations

import asyncio
import itertools
import operator
import queue
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass

from megatron.generation.batching.requests import Event, Request
from megatron.generation.serving.errors import APIError

RETRY_AFTER_S = 2


@dataclass(frozen=True)
class Refusal:
    """Why a job comes to nothing. status: of HTTP."""

    reason: str
    status: int = 400


@dataclass(frozen=True)
class StepCommands:
    """What happens before a step. new: jobs by number; cancelled: numbers."""

    new: tuple[tuple[int, Request], ...] = ()
    cancelled: tuple[int, ...] = ()


@dataclass(frozen=True)
class Load:
    """What a replica, or all of them, is busy with. Blocks are those of the cache."""

    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    total_blocks: int = 0

    def __add__(self, other: Load) -> Load:
        return Load(*map(operator.add, astuple(self), astuple(other)))


Outcome = Event | Refusal


class EventStream:
    """The jobs of one HTTP request. numbers: of the jobs, in the order of the requests."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = list(numbers)
        self.outcomes: asyncio.Queue[tuple[int, Outcome]] = asyncio.Queue()

    async def events(self, seconds: float) -> AsyncIterator[tuple[int, Event]]:
        """(index of the request, event) as they come, until all have ended. Raises APIError for one that is refused,
        and when not all have ended after so many seconds."""
        index = {number: i for i, number in enumerate(self.numbers)}
        deadline = asyncio.get_running_loop().time() + seconds
        while index:
            try:
                async with asyncio.timeout_at(deadline):
                    number, outcome = await self.outcomes.get()
            except TimeoutError:
                raise APIError(
                    504, f"not done after {seconds:g} s (serve_request_timeout_s); ask for less", code="timeout"
                ) from None
            if isinstance(outcome, Refusal):
                retry = RETRY_AFTER_S if outcome.status == 503 else None
                raise APIError(outcome.status, outcome.reason, retry_after=retry)
            yield index[number], outcome
            if outcome.finish_reason is not None:
                del index[number]


class RequestQueue:
    """`open`, `deliver` and `end` belong to the thread of the event loop, `take` and `ring` to the main thread; the
    queue between them may be put into by signal handlers too. closing: no more requests are taken; anyone may set it.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.calls: dict[int, EventStream] = {}  # by number of the job
        self.load = Load()
        self.closing = False
        self._numbers = itertools.count()
        self._inbox: queue.SimpleQueue[tuple[int, Request | None] | None] = queue.SimpleQueue()

    @contextmanager
    def open(self, requests: Sequence[Request]) -> Iterator[EventStream]:
        """Jobs for these requests; those that have not ended when the block is left are cancelled. Raises APIError
        where there is no place for them."""
        if self.closing:
            raise APIError(503, "the server is shutting down", retry_after=RETRY_AFTER_S)
        if len(requests) > self.limit:
            raise APIError(
                400, f"{len(requests)} texts in one request; at most {self.limit} are taken (serve_max_requests)"
            )
        if len(self.calls) + len(requests) > self.limit:
            raise APIError(
                429,
                f"{len(self.calls)} texts are being written or wait, at most {self.limit} may (serve_max_requests)",
                code="queue_full",
                retry_after=RETRY_AFTER_S,
            )
        call = EventStream([next(self._numbers) for _ in requests])
        for number, request in zip(call.numbers, requests, strict=True):
            self.calls[number] = call
            self._inbox.put((number, request))
        try:
            yield call
        finally:
            for number in call.numbers:
                if self.calls.pop(number, None) is not None:
                    self._inbox.put((number, None))

    def deliver(self, outcomes: Sequence[tuple[int, Outcome]], load: Load) -> None:
        """What has become of jobs since the last time; of those that are cancelled nobody wants to know."""
        self.load = load
        for number, outcome in outcomes:
            call = self.calls.get(number)
            if call is None:
                continue
            call.outcomes.put_nowait((number, outcome))
            if isinstance(outcome, Refusal) or outcome.finish_reason is not None:
                del self.calls[number]

    def end(self, refusal: Refusal) -> None:
        """Nothing more will come, nor is anything taken."""
        self.closing = True
        self.deliver([(number, refusal) for number in list(self.calls)], Load())

    def ring(self) -> None:
        """Let `take` return."""
        self._inbox.put(None)

    def take(self, seconds: float) -> StepCommands:
        """What came in since the last time; waits so many seconds for something to come."""
        new: dict[int, Request] = {}
        cancelled: list[int] = []
        try:
            item = self._inbox.get(timeout=seconds) if seconds > 0 else self._inbox.get_nowait()
            while True:
                if item is not None:
                    number, request = item
                    if request is not None:
                        new[number] = request
                    elif new.pop(number, None) is None:
                        cancelled.append(number)
                item = self._inbox.get_nowait()
        except queue.Empty:
            return StepCommands(tuple(new.items()), tuple(cancelled))
