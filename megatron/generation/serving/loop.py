"""The loop of all ranks: rank 0 says what is new, every replica takes a step, events come back to rank 0."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch.distributed as dist

from megatron.distributed import on_rank_zero
from megatron.generation.batching.batcher import Batcher
from megatron.generation.batching.requests import RequestError
from megatron.generation.serving.request_queue import Load, Outcome, Refusal, StepCommands
from megatron.mpu import ParallelGroups

SAY_EVERY_S = 60.0
HEARTBEAT_S = 5.0  # ranks that wait in a collective hear from rank 0 this often
T = TypeVar("T")


class StepReport(NamedTuple):
    """What a step of a replica brought, by number of the job."""

    outcomes: list[tuple[int, Outcome]]
    load: Load


class CommandSource(Protocol):
    """Rank 0's side of the loop."""

    def commands(self) -> list[StepCommands] | None:
        """What each replica does next; None ends the loop."""

    def deliver(self, done: Sequence[StepReport]) -> None:
        """What each replica did."""


class RankChannel:
    """How rank 0 and the others speak: over gloo, whatever the model uses, since what they say lies in host memory."""

    def __init__(self, groups: ParallelGroups) -> None:
        self.groups = groups
        self._all: dist.ProcessGroup | None = None
        self._replicas: dist.ProcessGroup | None = None  # the first rank of each
        if groups.world_size == 1:
            return
        first = on_rank_zero(groups, lambda: groups.members["data"])
        self._all = dist.new_group(backend="gloo")
        if len(first) > 1:
            group = dist.new_group(list(first), backend="gloo")
            self._replicas = group if groups.world_rank in first else None

    def tell(self, commands: list[StepCommands] | None) -> list[StepCommands] | None:
        """Rank 0's commands, on every rank."""
        if self._all is None:
            return commands
        box = [commands]
        dist.broadcast_object_list(box, src=0, group=self._all)
        return box[0]

    def collect(self, done: StepReport) -> list[StepReport]:
        """On rank 0 what every replica did; all ranks call it."""
        if self._replicas is None:
            return [done]
        everyone: list[StepReport] | None = [done] * self.groups.size("data") if self.groups.world_rank == 0 else None
        dist.gather_object(done, everyone, dst=0, group=self._replicas)
        return everyone or []


class Replica:
    """A batcher whose requests go by the numbers of jobs."""

    def __init__(self, batcher: Batcher) -> None:
        self.batcher = batcher
        self.numbers: dict[int, int] = {}  # of the job, by the batcher's id
        self.ids: dict[int, int] = {}

    def step(self, commands: StepCommands) -> StepReport:
        """Do as told, then a token for all. Raises CheckpointError when logits are not numbers."""
        outcomes: list[tuple[int, Outcome]] = []
        for number, request in commands.new:
            try:
                id = self.batcher.add(request)
            except RequestError as problem:
                outcomes.append((number, Refusal(str(problem))))
                continue
            self.numbers[id], self.ids[number] = number, id
        for number in commands.cancelled:
            if number in self.ids:
                self.batcher.cancel(self.ids[number])
        for event in self.batcher.step() if self.batcher.busy else ():
            number = self.numbers[event.id]
            outcomes.append((number, event))
            if event.finish_reason is not None:
                del self.numbers[event.id], self.ids[number]
        batcher, blocks = self.batcher, self.batcher.blocks
        return StepReport(outcomes, Load(batcher.running, batcher.waiting, blocks.free, blocks.total))


def run(replica: Replica, channel: RankChannel, source: CommandSource | None) -> None:
    """Until the source (of rank 0) ends it; all ranks call it together."""
    while True:
        commands = channel.tell(source.commands() if source is not None else None)
        if commands is None:
            return
        done = channel.collect(replica.step(commands[channel.groups.rank("data")]))
        if source is not None:
            source.deliver(done)


class Dispatcher:
    """Rank 0's side: jobs go to the replica with the fewest, and after `stop` those there are may end in time."""

    def __init__(
        self,
        replicas: int,
        take: Callable[[float], StepCommands],
        shutdown_seconds: float,
        log: Callable[[str], None],
    ) -> None:
        """take: gives what is new, after so many seconds at most."""
        self.take, self.shutdown_seconds, self.log = take, shutdown_seconds, log
        self.on_done: Callable[[list[tuple[int, Outcome]], Load], None] = lambda outcomes, load: None
        self.places: list[set[int]] = [set() for _ in range(replicas)]
        self.deadline: float | None = None
        self.texts = self.tokens = 0  # since the last line
        self.said = time.monotonic()

    def stop(self) -> None:
        """End when no job is left, and after so many seconds at the latest; at once when told again."""
        now = time.monotonic()
        self.deadline = now + self.shutdown_seconds if self.deadline is None else now

    def commands(self) -> list[StepCommands] | None:
        busy = any(self.places)
        found = self.take(0.0 if busy else HEARTBEAT_S)
        new: list[list] = [[] for _ in self.places]
        for number, request in found.new:
            place = min(range(len(self.places)), key=lambda i: len(self.places[i]))
            self.places[place].add(number)
            new[place].append((number, request))
        if self.deadline is not None and (not any(self.places) or time.monotonic() >= self.deadline):
            return None
        return [StepCommands(tuple(mine), found.cancelled) for mine in new]

    def deliver(self, done: Sequence[StepReport]) -> None:
        outcomes = [outcome for one in done for outcome in one.outcomes]
        for number, outcome in outcomes:
            if isinstance(outcome, Refusal) or outcome.finish_reason is not None:
                for place in self.places:
                    place.discard(number)
        load = sum((one.load for one in done), Load())
        self.on_done(outcomes, load)
        self._say(outcomes, load)

    def _say(self, outcomes: Sequence[tuple[int, Outcome]], load: Load) -> None:
        """A line now and then, while there is something to say."""
        events = [outcome for _, outcome in outcomes if not isinstance(outcome, Refusal)]
        self.texts += sum(event.finish_reason in ("stop", "length") for event in events)
        self.tokens += sum(len(event.tokens) for event in events)
        seconds = time.monotonic() - self.said
        if seconds < SAY_EVERY_S:
            return
        if self.tokens:
            self.log(
                f"{self.texts} texts ended, {self.tokens / seconds:.1f} tokens/s; {load.running} are being written, "
                f"{load.waiting} wait; {load.free_blocks} of {load.total_blocks} blocks of the cache are free"
            )
        self.texts, self.tokens, self.said = 0, 0, time.monotonic()
