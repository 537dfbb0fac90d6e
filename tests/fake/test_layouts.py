"""Every layout, forwards and backwards, on fake CUDA: where tensors are, which collectives run, how many
bytes."""

import random
from collections import Counter
from typing import Any

import pytest

from tests.fake.client import FakeCuda
from tests.fake.layouts import (
    BIG,
    GQA,
    HIDDEN,
    LAYERS,
    MICRO_BATCH,
    MODEL,
    PACKED,
    PP2,
    RECOMPUTE,
    SEQ,
    SP2,
    TP2,
    VOCAB,
    WINDOW,
    Case,
)  # fmt: skip
from tests.marks import with_more

TWO_DOCUMENTS = [[[0, 100], [0]], [[0, 7, 50], [0, 150]]]
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, TP2),
    "tp2 sp": (2, SP2),
    "pp2": (2, PP2),
    "dp2": (2, {}),
    "tp2 pp2 dp2 sp": (8, {**SP2, **PP2}),
    "tp2 recompute": (2, {**TP2, **RECOMPUTE}),
    "tp2 sp recompute": (2, {**SP2, **RECOMPUTE}),
    "tp2 gqa": (2, {**TP2, **GQA}),
    "tp2 window": (2, {**TP2, **WINDOW}),
}
BIG_WORLD = 1024  # tp8 pp4 dp32


def derived(case: Case) -> Counter[tuple[Any, ...]]:
    """Number of collectives of a step by (first rank, stride, ranks, kind, bytes), from the layout alone."""
    layers = case.values.get("num_layers", LAYERS)
    tensor, pipe = case.values.get("model_parallel_size", 1), case.values.get("pipe_parallel_size", 1)
    sequence = case.values.get("sequence_parallel", False)
    data = case.world // tensor // pipe
    blocks = layers // pipe
    stage = case.rank // (tensor * data)
    first, last = stage == 0, stage == pipe - 1
    counted: Counter[tuple[Any, ...]] = Counter()

    def add(axis: str, kind: str, number: int, size: int) -> None:
        # Ranks count up fastest along tensor, then data, then pipe.
        stride, ranks = {"tensor": (1, tensor), "data": (tensor, data), "world": (1, case.world)}[axis]
        if ranks > 1 and number:
            start = 0 if axis == "world" else case.rank - case.rank // stride % ranks * stride
            counted[start, stride, ranks, kind, size] += number

    hidden = 2 * SEQ * MICRO_BATCH * HIDDEN  # bytes of [seq, batch, hidden] in bf16
    # Attention and MLP of a block each begin with a column-parallel and end with a row-parallel linear: a sum
    # forwards after the latter, a sum backwards before the former (arXiv 1909.08053).
    ends = begins = 2 * blocks
    # Recomputation runs a block's forward again, as far as its last saved tensor: not its last sum.
    again = case.values.get("checkpoint_activations", False)
    ends_again, begins_again = (blocks, 2 * blocks) if again else (0, 0)
    if sequence:  # arXiv 2205.05198: a sum is a reduce-scatter, whose gradient is an all-gather, and the reverse
        gathers = begins + begins_again + ends + first + last  # gradient of the embedding's sum; the head's input
        scatters = ends + ends_again + begins + first + last
        add("tensor", "all_gather", gathers, hidden)
        add("tensor", "reduce_scatter", scatters, hidden)
        add("tensor", "all_reduce", 2 * blocks + last, 2 * HIDDEN)  # gradients of the norms' scales
    else:
        # Besides: the embedding's sum forwards, and the gradient of the head's input.
        add("tensor", "all_reduce", ends + ends_again + begins + first + last, hidden)
    if last:  # cross-entropy: the largest logit of each token; then its label's logit and its sum, fp32
        add("tensor", "all_reduce", 1, 4 * SEQ * MICRO_BATCH)
        add("tensor", "all_reduce", 1, 2 * 4 * SEQ * MICRO_BATCH)
    # The step: its weight over data ranks, whether all was finite, the norm of what is cut over tensor ranks.
    add("data", "all_reduce", 1, 4)
    add("world", "all_reduce", 1, 4)
    add("tensor", "all_reduce", 1, 4)
    steps = max(1, len(case.documents))
    return Counter({key: number * steps for key, number in counted.items()})


def assert_clean(seen: dict[str, Any]) -> None:
    assert seen["error"] is None and seen["findings"] == []


def assert_layout(fake_cuda: FakeCuda, cases: list[Case]) -> None:
    """The collectives of every rank are the derived ones, and all ranks of a group run its own in the same
    order."""
    by_group: dict[tuple[int, ...], list[tuple[Any, ...]]] = {}
    for case in cases:
        seen = fake_cuda.run(case)
        assert_clean(seen)
        collectives = [tuple(one) for one in seen["collectives"]]
        assert Counter(collectives) == derived(case), f"rank {case.rank}"
        for group in {one[:3] for one in collectives}:
            of_group = [one for one in collectives if one[:3] == group]
            assert by_group.setdefault(group, of_group) == of_group, f"rank {case.rank} in group {group}"


@pytest.mark.parametrize("name", with_more(LAYOUTS, "tp2 pp2 dp2 sp", "tp2 gqa", "tp2 recompute"))
def test_collectives(name: str, fake_cuda: FakeCuda) -> None:
    world, values = LAYOUTS[name]
    assert_layout(fake_cuda, [Case(world, rank, values) for rank in range(world)])


def big_ranks() -> list[int]:
    """The first, the last, one in the middle and two more of all ranks; each with its neighbour in the tensor
    group."""
    chosen = [0, BIG_WORLD - 1, BIG_WORLD // 2, *random.Random(18).sample(range(BIG_WORLD), 2)]
    return sorted({rank for one in chosen for rank in (one, one ^ 1)})


@pytest.mark.parametrize("ranks", [(0, 1023), pytest.param(big_ranks(), marks=pytest.mark.more)])
def test_ranks_of_a_thousand(ranks: list[int], fake_cuda: FakeCuda) -> None:
    assert_layout(fake_cuda, [Case(BIG_WORLD, rank, BIG) for rank in ranks])


def test_attention_kernels(fake_cuda: FakeCuda) -> None:
    """Whole rows run on one fused kernel a layer; documents and windows on the varlen one, without masks."""
    plain, packed = fake_cuda.run(Case()), fake_cuda.run(Case(values=PACKED, documents=TWO_DOCUMENTS))
    windows = fake_cuda.run(Case(values=WINDOW))
    for seen in (plain, packed, windows):
        assert_clean(seen)
    assert plain["kernels"]["aten._scaled_dot_product_cudnn_attention_backward"] == LAYERS
    assert packed["kernels"]["torch_attn._varlen_attn_backward"] == LAYERS * len(TWO_DOCUMENTS)
    assert windows["kernels"]["torch_attn._varlen_attn_backward"] == LAYERS
    for call in packed["varlen"] + windows["varlen"]:
        assert call["longest"] <= SEQ


def test_peak_bytes(fake_cuda: FakeCuda) -> None:
    """Recomputation keeps the inputs of the blocks and the insides of one."""
    plain, recomputed = fake_cuda.run(Case()), fake_cuda.run(Case(values=RECOMPUTE))
    hidden = 2 * SEQ * MICRO_BATCH * HIDDEN
    weights_and_gradients = 2 * plain["parameters"]
    inside = (plain["peak"] - weights_and_gradients) / LAYERS
    assert recomputed["peak"] <= weights_and_gradients + LAYERS * hidden + 2 * inside


@pytest.mark.parametrize("values", [{}, TP2], ids=["one", "tp2"])
def test_construction(values: dict[str, Any], fake_cuda: FakeCuda) -> None:
    """No more is held at any moment than this rank's part, in the dtype it trains in, and of two parameters
    the values that are being drawn, whole and in fp32."""
    seen = fake_cuda.run(Case(values.get("model_parallel_size", 1), values=values))
    assert_clean(seen)
    largest = 4 * HIDDEN * max(VOCAB, 3 * HIDDEN, 2 * MODEL["intermediate_size"])
    assert seen["parameters"] < seen["construction"] <= seen["parameters"] + 2 * largest
