"""Blocks of the KV cache: none leaks, none is given out twice, equal prefixes are shared."""

import random

from megatron.generation.batching.block_allocator import BlockAllocator


def hold(blocks: BlockAllocator, tokens: list[int]) -> tuple[list[int], int]:
    """Blocks that hold all of `tokens`, the full ones registered; and how many of them were shared."""
    shared, prefix_id = blocks.share_prefix(tokens)
    allocated = blocks.allocate(-(-len(tokens) // blocks.size) - len(shared))
    assert allocated is not None
    held = shared + allocated
    for i in range(len(shared), len(tokens) // blocks.size):
        prefix_id = blocks.register(held[i], prefix_id, tokens[i * blocks.size : (i + 1) * blocks.size])
    return held, len(shared)


def test_a_prefix_is_shared_without_the_last_token() -> None:
    blocks = BlockAllocator(10, 2)
    first_held, shared = hold(blocks, [1, 2, 3, 4, 5])
    assert (len(first_held), shared, blocks.free_blocks) == (3, 0, 7)
    second_held, shared = hold(blocks, [1, 2, 3, 4])
    assert (second_held[0], shared, blocks.free_blocks) == (
        first_held[0],
        1,
        6,
    )  # [3, 4] is to be run for the token after it
    third_held, shared = hold(blocks, [1, 2, 3, 4, 6])
    assert (third_held[:2], shared) == (first_held[:2], 2)
    unrelated_held, shared = hold(blocks, [9, 9, 3, 4, 6])
    assert shared == 0, "equal tokens after others are something else"
    for held in (first_held, second_held, third_held, unrelated_held):
        blocks.release(held)
    assert blocks.free_blocks == 10


def test_released_blocks_stay_shareable_until_the_least_recently_used_is_reallocated() -> None:
    blocks = BlockAllocator(4, 2)
    old, _ = hold(blocks, [1, 2, 3])
    blocks.release(old)
    new, _ = hold(blocks, [5, 6, 7])
    blocks.release(new)
    reused, shared = hold(blocks, [1, 2, 9])
    assert (reused[0], shared) == (old[0], 1)
    blocks.release(reused)
    assert blocks.allocate(3) is not None  # [5, 6] was unused for longest
    assert blocks.share_prefix([5, 6, 7]) == ([], 0)
    assert blocks.share_prefix([1, 2, 9])[0] == old[:1]
    assert blocks.allocate(1) is None


def test_random_holders_leak_no_block() -> None:
    draws, blocks = random.Random(0), BlockAllocator(30, 2)
    held: list[list[int]] = []
    for _ in range(3000):
        if held and draws.random() < 0.5:
            blocks.release(held.pop(draws.randrange(len(held))))
        else:
            tokens = draws.choices(range(2), k=draws.randint(1, 9))
            if blocks.free_blocks >= 5:
                held.append(hold(blocks, tokens)[0])
        assert blocks.free_blocks == 30 - len({block for holder in held for block in holder})
        assert 0 not in {block for holder in held for block in holder}
    for holder in held:
        blocks.release(holder)
    assert blocks.free_blocks == 30
    assert sorted(blocks.allocate(30) or []) == list(range(1, 31))
