"""The queue between the HTTP thread and the main thread of rank 0: requests go in, events of their generation
come out."""

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
from megatron.generation.weight_updates import WeightUpdate

RETRY_AFTER_S = 2


@dataclass(frozen=True)
class Rejection:
    """Why a job is not run, or not to its end. status: the HTTP status that the client gets."""

    reason: str
    status: int = 400


@dataclass(frozen=True)
class Updated:
    """The end of a job that gave the model other weights, which have the number `version` from now on."""

    version: int
    tokens: tuple[int, ...] = ()
    finish_reason: str = "stop"


@dataclass(frozen=True)
class StepCommands:
    """What a replica does before its next step. new: (job id, request) to add; cancelled: job ids to cancel;
    updates: (job id, weights) to load."""

    new: tuple[tuple[int, Request], ...] = ()
    cancelled: tuple[int, ...] = ()
    updates: tuple[tuple[int, WeightUpdate], ...] = ()


@dataclass(frozen=True)
class Load:
    """How busy a replica is, or all of them together: requests that run or wait, and blocks of the KV cache.
    The field names are those of `/health`."""

    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    total_blocks: int = 0

    def __add__(self, other: Load) -> Load:
        return Load(*map(operator.add, astuple(self), astuple(other)))


Outcome = Event | Updated | Rejection


class EventStream:
    """The events of one HTTP request, which is one job for each text it asks for. job_ids: in the order of
    the requests that `RequestQueue.submit` was given; weight_version: of the weights that the last event came
    from, None for those that the server began with."""

    def __init__(self, job_ids: Sequence[int]) -> None:
        self.job_ids = list(job_ids)
        self.weight_version: int | None = None
        self.outcomes: asyncio.Queue[tuple[int, Outcome]] = asyncio.Queue()

    async def events(self, seconds: float) -> AsyncIterator[tuple[int, Event]]:
        """Yield (index of the request, event) as they come, until all jobs have ended.

        Raises APIError for a job that is rejected, and when not all jobs have ended after `seconds`.
        """
        index_of = {job_id: i for i, job_id in enumerate(self.job_ids)}
        deadline = asyncio.get_running_loop().time() + seconds
        while index_of:
            try:
                async with asyncio.timeout_at(deadline):
                    job_id, outcome = await self.outcomes.get()
            except TimeoutError:
                raise APIError(
                    504, f"not done after {seconds:g} s (serve_request_timeout_s); ask for less", code="timeout"
                ) from None
            if isinstance(outcome, Rejection):
                retry = RETRY_AFTER_S if outcome.status == 503 else None
                raise APIError(outcome.status, outcome.reason, retry_after=retry)
            if isinstance(outcome, Event):
                yield index_of[job_id], outcome
            if outcome.finish_reason is not None:
                del index_of[job_id]


class RequestQueue:
    """Jobs that wait or run, at most `limit`, and where their events go.

    `submit`, `deliver` and `close` are called in the HTTP thread's event loop, `take` and `wake` in the main
    thread; signal handlers may call `wake` too. closing: no more requests are accepted; any thread may set
    it. weight_version: of the last `WeightUpdate`, None before the first.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.streams: dict[int, EventStream] = {}  # by job id
        self.load = Load()
        self.closing = False
        self.weight_version: int | None = None
        self._job_ids = itertools.count()
        # A job with its request, or with None to cancel it; a bare None only wakes `take`.
        self._inbox: queue.SimpleQueue[tuple[int, Request | WeightUpdate | None] | None] = queue.SimpleQueue()

    @contextmanager
    def submit(self, requests: Sequence[Request | WeightUpdate]) -> Iterator[EventStream]:
        """Queue a job for each request; those that come after a `WeightUpdate` wait for it, and it for those
        before. Jobs that have not ended when the `with` block is left are cancelled.

        Raises APIError when the server shuts down (503), for more requests than `limit` (400), and when too
        many jobs wait already (429).
        """
        if self.closing:
            raise APIError(503, "the server is shutting down", retry_after=RETRY_AFTER_S)
        if len(requests) > self.limit:
            raise APIError(
                400, f"{len(requests)} texts in one request; at most {self.limit} are taken (serve_max_requests)"
            )
        if len(self.streams) + len(requests) > self.limit:
            raise APIError(
                429,
                f"{len(self.streams)} texts are being written or wait, at most {self.limit} may (serve_max_requests)",
                code="queue_full",
                retry_after=RETRY_AFTER_S,
            )
        stream = EventStream([next(self._job_ids) for _ in requests])
        for job_id, request in zip(stream.job_ids, requests, strict=True):
            self.streams[job_id] = stream
            self._inbox.put((job_id, request))
        try:
            yield stream
        finally:
            for job_id in stream.job_ids:
                if self.streams.pop(job_id, None) is not None:
                    self._inbox.put((job_id, None))

    def deliver(self, outcomes: Sequence[tuple[int, Outcome]], load: Load) -> None:
        """Hand each (job id, outcome) of a step to the job's stream; those of cancelled jobs are dropped."""
        self.load = load
        for job_id, outcome in outcomes:
            if isinstance(outcome, Updated):
                self.weight_version = outcome.version
            stream = self.streams.get(job_id)
            if stream is None:
                continue
            stream.weight_version = self.weight_version
            stream.outcomes.put_nowait((job_id, outcome))
            if isinstance(outcome, Rejection) or outcome.finish_reason is not None:
                del self.streams[job_id]

    def close(self, rejection: Rejection) -> None:
        """Accept nothing more, and end every job with this rejection."""
        self.closing = True
        self.deliver([(job_id, rejection) for job_id in list(self.streams)], Load())

    def wake(self) -> None:
        """Let `take` return at once, though nothing has come in."""
        self._inbox.put(None)

    def take(self, seconds: float) -> StepCommands:
        """All jobs and cancellations since the last call; waits up to `seconds` for the first of them."""
        new: dict[int, Request] = {}
        updates: list[tuple[int, WeightUpdate]] = []
        cancelled: list[int] = []
        try:
            item = self._inbox.get(timeout=seconds) if seconds > 0 else self._inbox.get_nowait()
            while True:
                if item is not None:
                    job_id, request = item
                    if isinstance(request, WeightUpdate):
                        updates.append((job_id, request))
                    elif request is not None:
                        new[job_id] = request
                    elif new.pop(job_id, None) is None:
                        cancelled.append(job_id)
                item = self._inbox.get_nowait()
        except queue.Empty:
            return StepCommands(tuple(new.items()), tuple(cancelled), tuple(updates))
