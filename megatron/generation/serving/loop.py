"""Runs the serving loop on all ranks.

In each round, rank 0 broadcasts new commands, every data-parallel replica runs a step of its batcher, and
rank 0 gathers the events.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch.distributed as dist

from megatron.checkpointing import CheckpointError
from megatron.distributed import on_rank_zero
from megatron.generation.batching.batcher import Batcher
from megatron.generation.batching.requests import Event, Request, RequestError
from megatron.generation.serving.request_queue import Load, Outcome, Rejection, StepCommands, Updated
from megatron.generation.weight_updates import WeightUpdate, update_weights
from megatron.mpu import ParallelGroups

LOG_INTERVAL_S = 60.0
HEARTBEAT_S = 5.0  # ranks that wait in a collective hear from rank 0 this often


class StepOutcomes(NamedTuple):
    """The result of a replica's step: (job id, outcome) pairs, and the replica's load after the step."""

    outcomes: list[tuple[int, Outcome]]
    load: Load


class RankChannel:
    """Sends commands from rank 0 to all ranks, and results from all replicas to rank 0. It uses gloo, because
    both are in host memory."""

    def __init__(self, groups: ParallelGroups) -> None:
        self.groups = groups
        self._all_ranks: dist.ProcessGroup | None = None
        self._first_ranks: dist.ProcessGroup | None = None  # the first rank of each replica
        if groups.world_size == 1:
            return
        first_ranks = on_rank_zero(groups, lambda: groups.members["data"])
        self._all_ranks = dist.new_group(backend="gloo")
        if len(first_ranks) > 1:
            group = dist.new_group(list(first_ranks), backend="gloo")
            self._first_ranks = group if groups.world_rank in first_ranks else None

    def broadcast(self, commands: list[StepCommands] | None) -> list[StepCommands] | None:
        """Sends rank 0's `commands` to all ranks and returns them on every rank. Arguments of other ranks are
        ignored."""
        if self._all_ranks is None:
            return commands
        box = [commands]
        dist.broadcast_object_list(box, src=0, group=self._all_ranks)
        return box[0]

    def gather(self, result: StepOutcomes) -> list[StepOutcomes]:
        """Returns the results of all replicas, in order, on rank 0. All ranks call this function together.
        Other ranks must ignore the returned value."""
        if self._first_ranks is None:
            return [result]
        gathered: list[StepOutcomes] | None = None
        if self.groups.world_rank == 0:
            gathered = [result] * self.groups.size("data")
        dist.gather_object(result, gathered, dst=0, group=self._first_ranks)
        return gathered or []


class Replica:
    """Runs the batcher of one data-parallel replica. Its requests are identified by job ids, which are unique
    over all replicas."""

    def __init__(self, batcher: Batcher) -> None:
        self.batcher = batcher
        self.job_ids: dict[int, int] = {}  # by the batcher's request id
        self.request_ids: dict[int, int] = {}  # by job id

    def step(self, commands: StepCommands) -> StepOutcomes:
        """Executes the commands, then runs a step of the batcher if the batcher has requests.

        For a request that cannot be served, or weights that cannot be loaded, the outcome is a `Rejection`.
        Raises CheckpointError for NaN logits.
        """
        outcomes: list[tuple[int, Outcome]] = [(job_id, self._load(update)) for job_id, update in commands.updates]
        for job_id, request in commands.new:
            try:
                request_id = self.batcher.add(request)
            except RequestError as problem:
                outcomes.append((job_id, Rejection(str(problem))))
                continue
            self.job_ids[request_id], self.request_ids[job_id] = job_id, request_id
        for job_id in commands.cancelled:
            if job_id in self.request_ids:
                self.batcher.cancel(self.request_ids[job_id])
        for event in self.batcher.step() if self.batcher.busy else ():
            job_id = self.job_ids[event.id]
            outcomes.append((job_id, event))
            if event.finish_reason is not None:
                del self.job_ids[event.id], self.request_ids[job_id]
        batcher, blocks = self.batcher, self.batcher.blocks
        return StepOutcomes(outcomes, Load(batcher.running, batcher.waiting, blocks.free_blocks, blocks.total))

    def _load(self, update: WeightUpdate) -> Outcome:
        try:
            update_weights(self.batcher.model, update)
        except CheckpointError as problem:
            return Rejection(str(problem))
        self.batcher.blocks.forget_prefixes()
        return Updated(update.version)


class Dispatcher:
    """Turns queued jobs into commands for the replicas, on rank 0. Each job goes to the replica with the
    fewest jobs.

    A weight update waits until no job runs, and later jobs wait for the weight update.
    """

    def __init__(
        self, replicas: int, take: Callable[[float], StepCommands], shutdown_seconds: float, log: Callable[[str], None]
    ) -> None:
        """Starts without jobs.

        replicas: number of replicas. take: returns the queued commands (`RequestQueue.take`).
            shutdown_seconds: how long jobs may continue after `stop`. log: called with a line about
            throughput once a minute.
        """
        self.take, self.shutdown_seconds, self.log = take, shutdown_seconds, log
        self.on_outcomes: Callable[[list[tuple[int, Outcome]], Load], None] = lambda outcomes, load: None
        self.jobs_of_replica: list[set[int]] = [set() for _ in range(replicas)]
        self.held: list[tuple[int, Request]] = []  # jobs that wait for new weights
        self.updates: list[tuple[int, WeightUpdate]] = []
        self.deadline: float | None = None
        self.ended_texts = self.tokens = 0  # since the last line in the log
        self.last_log_time = time.monotonic()

    def stop(self) -> None:
        """Makes the serving loop end as soon as no job runs, at the latest after `shutdown_seconds`. A second
        call ends the loop at once."""
        now = time.monotonic()
        self.deadline = now + self.shutdown_seconds if self.deadline is None else now

    def next_commands(self) -> list[StepCommands] | None:
        """Returns the commands for the next step, one `StepCommands` for each replica; None if the loop shall
        end."""
        busy = any(self.jobs_of_replica)
        incoming = self.take(0.0 if busy or self.updates or self.held else HEARTBEAT_S)
        waiting = bool(self.updates)
        self.updates += incoming.updates
        jobs = [job for job in (*self.held, *incoming.new) if job[0] not in incoming.cancelled]
        self.held = jobs if waiting else []
        update = (self.updates.pop(0),) if waiting and not busy else ()
        new: list[list] = [[] for _ in self.jobs_of_replica]
        for job_id, request in () if waiting else jobs:
            replica = min(range(len(self.jobs_of_replica)), key=lambda i: len(self.jobs_of_replica[i]))
            self.jobs_of_replica[replica].add(job_id)
            new[replica].append((job_id, request))
        if self.deadline is not None and (not any(self.jobs_of_replica) or time.monotonic() >= self.deadline):
            return None
        return [StepCommands(tuple(jobs), incoming.cancelled, update) for jobs in new]

    def deliver(self, results: Sequence[StepOutcomes]) -> None:
        """Passes the outcomes of a step to `on_outcomes`, and forgets ended jobs. results: one for each
        replica."""
        outcomes = [outcome for result in results for outcome in result.outcomes]
        for job_id, outcome in outcomes:
            if isinstance(outcome, Rejection) or outcome.finish_reason is not None:
                for jobs in self.jobs_of_replica:
                    jobs.discard(job_id)
        load = sum((result.load for result in results), Load())
        self.on_outcomes(outcomes, load)
        self._log_throughput(outcomes, load)

    def _log_throughput(self, outcomes: Sequence[tuple[int, Outcome]], load: Load) -> None:
        """Logs a line about throughput every `LOG_INTERVAL_S` seconds, if tokens were generated since the
        last line."""
        events = [outcome for _, outcome in outcomes if isinstance(outcome, Event)]
        self.ended_texts += sum(event.finish_reason in ("stop", "length") for event in events)
        self.tokens += sum(len(event.tokens) for event in events)
        seconds = time.monotonic() - self.last_log_time
        if seconds < LOG_INTERVAL_S:
            return
        if self.tokens:
            self.log(
                f"{self.ended_texts} texts ended, {self.tokens / seconds:.1f} tokens/s; {load.running} requests run, "
                f"{load.waiting} wait; {load.free_blocks} of {load.total_blocks} blocks of the KV cache are free"
            )
        self.ended_texts, self.tokens, self.last_log_time = 0, 0, time.monotonic()


def run_serving_loop(replica: Replica, channel: RankChannel, dispatcher: Dispatcher | None) -> None:
    """Runs steps on all ranks until `dispatcher.next_commands` returns None on rank 0. All ranks call it
    together.

    dispatcher: the dispatcher on rank 0; None on other ranks.
    """
    while True:
        commands = channel.broadcast(dispatcher.next_commands() if dispatcher is not None else None)
        if commands is None:
            return
        results = channel.gather(replica.step(commands[channel.groups.rank("data")]))
        if dispatcher is not None:
            dispatcher.deliver(results)
