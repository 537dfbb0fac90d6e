"""Connects the HTTP thread and the main thread of rank 0: requests go in, events of their generation come
out."""

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
    """The outcome of a job that is not run or is ended early. reason: the message, status: the HTTP status
    for the client."""

    reason: str
    status: int = 400


@dataclass(frozen=True)
class Updated:
    """The outcome of a job that replaced the model's weights. version: the number of the new weights."""

    version: int
    finish_reason: str = "stop"


@dataclass(frozen=True)
class StepCommands:
    """Commands that a replica executes before its next step.

    new: (job id, request) pairs to add. cancelled: job ids to cancel. updates: (job id, new weights) pairs to
        load.
    """

    new: tuple[tuple[int, Request], ...] = ()
    cancelled: tuple[int, ...] = ()
    updates: tuple[tuple[int, WeightUpdate], ...] = ()


@dataclass(frozen=True)
class Load:
    """How busy one replica or the whole server is: running and waiting requests, free and total KV-cache
    blocks.

    The fields have the names that `/health` reports.
    """

    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    total_blocks: int = 0

    def __add__(self, load: Load) -> Load:
        return Load(*map(operator.add, astuple(self), astuple(load)))


Outcome = Event | Updated | Rejection


class EventStream:
    """The events of one HTTP request, which has one job for each text to generate.

    job_ids: the ids of these jobs, in the order of the requests passed to `RequestQueue.submit`.
    weight_version: version of the weights that generated the last event; None: the weights that the server
        started with.
    """

    def __init__(self, job_ids: Sequence[int]) -> None:
        self.job_ids = list(job_ids)
        self.weight_version: int | None = None
        self.outcomes: asyncio.Queue[tuple[int, Outcome]] = asyncio.Queue()

    async def events(self, seconds: float) -> AsyncIterator[tuple[int, Event]]:
        """Yields (index, event) pairs as events arrive, until all jobs have ended.

        The index is that of the request in `RequestQueue.submit`. Raises APIError if a job is rejected, or if
        not all jobs have ended after `seconds`.
        """
        index_of = {job_id: i for i, job_id in enumerate(self.job_ids)}
        deadline = asyncio.get_running_loop().time() + seconds
        while index_of:
            try:
                async with asyncio.timeout_at(deadline):
                    job_id, outcome = await self.outcomes.get()
            except TimeoutError:
                raise APIError(
                    504, f"not done after {seconds:g} s (serve_request_timeout_s); request fewer tokens", code="timeout"
                ) from None
            if isinstance(outcome, Rejection):
                retry = RETRY_AFTER_S if outcome.status == 503 else None
                raise APIError(outcome.status, outcome.reason, retry_after=retry)
            if isinstance(outcome, Event):
                yield index_of[job_id], outcome
            if outcome.finish_reason is not None:
                del index_of[job_id]


class RequestQueue:
    """Queues jobs, at most `limit` waiting or running at a time, and passes their events to the HTTP thread.

    The HTTP thread's event loop calls `submit`, `deliver` and `close`. The main thread calls `take` and
    `wake`. Signal handlers may call `wake` too.

    closing: whether new requests are refused; any thread may set it.
    weight_version: version of the last `WeightUpdate`; None before the first update.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.streams: dict[int, EventStream] = {}  # by job id
        self.load = Load()
        self.closing = False
        self.weight_version: int | None = None
        self._job_ids = itertools.count()
        # (job id, request), or (job id, None) to cancel a job; None only wakes `take`.
        self._inbox: queue.SimpleQueue[tuple[int, Request | WeightUpdate | None] | None] = queue.SimpleQueue()

    @contextmanager
    def submit(self, requests: Sequence[Request | WeightUpdate]) -> Iterator[EventStream]:
        """Queues a job for each request and yields the stream of their events. At the end of the `with`
        block, unfinished jobs are cancelled.

        A `WeightUpdate` waits for earlier jobs, and later jobs wait for the update. Raises APIError while the
        server shuts down (503), for more requests than `limit` (400), and if too many jobs are queued (429).
        """
        if self.closing:
            raise APIError(503, "the server is shutting down", retry_after=RETRY_AFTER_S)
        if len(requests) > self.limit:
            raise APIError(
                400,
                f"one request asks for {len(requests)} texts (prompts times n), above serve_max_requests {self.limit}; "
                "send fewer prompts, or lower n",
            )
        if len(self.streams) + len(requests) > self.limit:
            raise APIError(
                429,
                f"the server is busy with {len(self.streams)} texts, and at most {self.limit} are allowed at a time "
                "(serve_max_requests); try again later",
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
        """Passes each (job id, outcome) of a step to the event stream of the job. Outcomes of cancelled jobs
        are dropped.

        load: how busy the server is after the step.
        """
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
        """Refuses new requests from now on, and ends every job with the outcome `rejection`."""
        self.closing = True
        self.deliver([(job_id, rejection) for job_id in list(self.streams)], Load())

    def wake(self) -> None:
        """Makes a call of `take` that is waiting in another thread return at once."""
        self._inbox.put(None)

    def take(self, seconds: float) -> StepCommands:
        """Returns the jobs, weight updates and cancellations that were queued since the last call. If there
        are none, it first waits up to `seconds` for one."""
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
