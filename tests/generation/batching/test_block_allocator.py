"""Blocks of the cache: none is lost, none is held twice, texts that begin alike share."""

import random

from megatron.generation.batching.block_allocator import BlockAllocator


def text_of(blocks: BlockAllocator, tokens: list[int]) -> tuple[list[int], int]:
    """Blocks for a text, all of whose full blocks are made known; how many of them were."""
    shared, number = blocks.share(tokens)
    taken = blocks.take(-(-len(tokens) // blocks.size) - len(shared))
    assert taken is not None
    held = shared + taken
    for i in range(len(shared), len(tokens) // blocks.size):
        number = blocks.know(held[i], number, tokens[i * blocks.size : (i + 1) * blocks.size])
    return held, len(shared)


def test_a_beginning_is_shared_but_never_the_last_token() -> None:
    blocks = BlockAllocator(10, 2)
    first, shared = text_of(blocks, [1, 2, 3, 4, 5])
    assert (len(first), shared, blocks.free) == (3, 0, 7)
    second, shared = text_of(blocks, [1, 2, 3, 4])
    assert (second[0], shared, blocks.free) == (first[0], 1, 6)  # [3, 4] is to be run for the token after it
    third, shared = text_of(blocks, [1, 2, 3, 4, 6])
    assert (third[:2], shared) == (first[:2], 2)
    other, shared = text_of(blocks, [9, 9, 3, 4, 6])
    assert shared == 0, "equal tokens after others are something else"
    for held in (first, second, third, other):
        blocks.release(held)
    assert blocks.free == 10


def test_what_is_known_outlives_its_text_until_it_is_needed() -> None:
    blocks = BlockAllocator(4, 2)
    old, _ = text_of(blocks, [1, 2, 3])
    blocks.release(old)
    new, _ = text_of(blocks, [5, 6, 7])
    blocks.release(new)
    again, shared = text_of(blocks, [1, 2, 9])
    assert (again[0], shared) == (old[0], 1)
    blocks.release(again)
    assert blocks.take(3) is not None  # [5, 6] was unused for longest
    assert blocks.share([5, 6, 7]) == ([], 0)
    assert blocks.share([1, 2, 9])[0] == old[:1]
    assert blocks.take(1) is None


def test_any_mixture_leaves_all_free() -> None:
    draws, blocks = random.Random(0), BlockAllocator(30, 2)
    held: list[list[int]] = []
    for _ in range(3000):
        if held and draws.random() < 0.5:
            blocks.release(held.pop(draws.randrange(len(held))))
        else:
            tokens = draws.choices(range(2), k=draws.randint(1, 9))
            if blocks.free >= 5:
                held.append(text_of(blocks, tokens)[0])
        assert blocks.free == 30 - len({block for one in held for block in one})
        assert 0 not in {block for one in held for block in one}
    for one in held:
        blocks.release(one)
    assert blocks.free == 30
    assert sorted(blocks.take(30) or []) == list(range(1, 31))
