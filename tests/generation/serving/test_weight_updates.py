"""When a server takes other weights: between the texts before and those behind."""

import asyncio

import pytest

from megatron.generation.batching.block_allocator import BlockAllocator
from megatron.generation.batching.requests import Event, Request
from megatron.generation.serving.app import parse_update
from megatron.generation.serving.errors import APIError
from megatron.generation.serving.loop import Dispatcher, StepOutcomes
from megatron.generation.serving.request_queue import Load, RequestQueue, StepCommands, Updated
from megatron.generation.weight_updates import WeightUpdate

UPDATE = WeightUpdate("folder", 3)


def test_texts_before_end_and_texts_behind_wait() -> None:
    job_0, job_1, job_2 = ((number, Request([1])) for number in range(3))
    steps = iter([StepCommands((job_0,)), StepCommands((job_1,), (), ((7, UPDATE),)), StepCommands((job_2,)),
                  StepCommands(), StepCommands(), StepCommands(), StepCommands()])  # fmt: skip
    waits = []

    def take(seconds: float) -> StepCommands:
        waits.append(seconds)
        return next(steps)

    dispatcher = Dispatcher(2, take, 1.0, lambda line: None)

    def deliver_stops(*jobs: int) -> None:
        dispatcher.deliver([StepOutcomes([(job, Event(0, [1], finish_reason="stop")) for job in jobs], Load())])

    def next_jobs() -> tuple[set[int], bool]:
        commands = dispatcher.next_commands()
        assert commands is not None
        updates = [bool(replica_commands.updates) for replica_commands in commands]
        assert len(set(updates)) == 1, "all replicas have the same weights"
        return {job for replica_commands in commands for job, _ in replica_commands.new}, updates[0]

    assert next_jobs() == ({0}, False)
    assert next_jobs() == ({1}, False), "it came with the weights, and is not kept waiting"
    assert next_jobs() == (set(), False), "two texts are being written"
    deliver_stops(0)
    assert next_jobs() == (set(), False), "one is"
    deliver_stops(1)
    assert next_jobs() == (set(), True)
    assert next_jobs() == ({2}, False)
    assert waits == [5.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_a_text_that_waits_for_weights_may_be_given_up() -> None:
    steps = iter([StepCommands((), (), ((7, UPDATE),)), StepCommands(((0, Request([1])),), (0,)), StepCommands()])
    dispatcher = Dispatcher(1, lambda seconds: next(steps), 1.0, lambda line: None)
    for _ in range(2):
        dispatcher.next_commands()
    (last,) = dispatcher.next_commands() or []
    assert last.new == ()


def test_texts_are_known_by_the_weights_that_wrote_them() -> None:
    async def versions() -> list[int | None]:
        queue = RequestQueue(8)
        with (
            queue.submit([Request([1])]) as earlier_text,
            queue.submit([UPDATE]) as update,
            queue.submit([Request([1])]) as later_text,
        ):
            commands = queue.take(0.0)
            assert [len(part) for part in (commands.new, commands.updates, commands.cancelled)] == [2, 1, 0]
            queue.deliver([(0, Event(0, [1], finish_reason="stop"))], Load())
            queue.deliver([(1, Updated(3))], Load())
            queue.deliver([(2, Event(0, [1], finish_reason="stop"))], Load())
            assert [event async for _, event in update.events(1.0)] == []
            return [earlier_text.weight_version, later_text.weight_version, queue.weight_version]

    assert asyncio.run(versions()) == [None, 3, 3]


def test_other_weights_share_no_prefix_with_the_last_ones() -> None:
    blocks = BlockAllocator(4, 2)
    held = blocks.allocate(2)
    assert held is not None
    prefix = blocks.register(held[0], 0, [1, 2])
    blocks.register(held[1], prefix, [3, 4])
    blocks.release(held)
    blocks.forget_prefixes()
    assert blocks.share_prefix([1, 2, 3, 4, 5]) == ([], 0)
    assert blocks.free_blocks == 4 and sorted(blocks.allocate(4) or []) == [1, 2, 3, 4]


@pytest.mark.parametrize("body", [b"[]", b"{", b'{"path": "a"}', b'{"path": "a", "version": "1"}', b'{"pth": 1}'])
def test_requests_that_say_nothing_are_refused(body: bytes) -> None:
    with pytest.raises(APIError) as problem:
        parse_update(body)
    assert problem.value.status == 400
