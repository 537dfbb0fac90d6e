"""Checks of every case: clean steps, derived collectives, a small construction."""

from collections import Counter
from typing import Any

from tests.fake.client import FakeCuda
from tests.fake.layouts import HIDDEN, LAYERS, MICRO_BATCH, MODEL, SEQ, VOCAB, Case


def derived(case: Case) -> Counter[tuple[Any, ...]]:
    """Number of collectives of a step by (first rank, stride, ranks, kind, bytes), from the layout alone."""
    layers = case.values.get("num_layers", LAYERS)
    tensor, pipe = case.values.get("model_parallel_size", 1), case.values.get("pipe_parallel_size", 1)
    sequence = case.values.get("sequence_parallel", False)
    data = case.world // tensor // pipe
    blocks = layers // pipe
    stage = case.rank // (tensor * data)
    is_first, last = stage == 0, stage == pipe - 1
    counts: Counter[tuple[Any, ...]] = Counter()

    def add(axis: str, kind: str, number: int, size: int) -> None:
        # Ranks count up fastest along tensor, then data, then pipe.
        stride, ranks = {"tensor": (1, tensor), "data": (tensor, data), "world": (1, case.world)}[axis]
        if ranks > 1 and number:
            start = 0 if axis == "world" else case.rank - case.rank // stride % ranks * stride
            counts[start, stride, ranks, kind, size] += number

    hidden = 2 * SEQ * MICRO_BATCH * HIDDEN  # bytes of [seq, batch, hidden] in bf16
    # Attention and MLP of a block each begin with a column-parallel and end with a row-parallel linear: a sum
    # forwards after the latter, a sum backwards before the former (arXiv 1909.08053).
    ends = begins = 2 * blocks
    # Recomputation runs a block's forward again, as far as its last saved tensor: not its last sum.
    is_recomputed = case.values.get("checkpoint_activations", False)
    recomputed_ends, recomputed_begins = (blocks, 2 * blocks) if is_recomputed else (0, 0)
    if sequence:  # arXiv 2205.05198: a sum is a reduce-scatter, whose gradient is an all-gather, and the reverse
        # A column keeps its part of the input, and gathers it again for the gradient of the weight. Besides:
        # the gradient of the embedding's sum, and the head's input.
        gathers = 2 * begins + recomputed_begins + ends + is_first + last
        scatters = ends + recomputed_ends + begins + is_first + last
        add("tensor", "all_gather", gathers, hidden)
        add("tensor", "reduce_scatter", scatters, hidden)
        add("tensor", "all_reduce", 2 * blocks + last, 2 * HIDDEN)  # gradients of the norms' scales
    else:
        # Besides: the embedding's sum forwards, and the gradient of the head's input.
        add("tensor", "all_reduce", ends + recomputed_ends + begins + is_first + last, hidden)
    if last:  # cross-entropy: of each token on each rank the largest logit, a sum and the label's logit, fp32
        rows = 5 if case.pairs else 3  # for the entropy and the mean logit
        add("tensor", "all_gather", 1, tensor * rows * 4 * SEQ * MICRO_BATCH)
    # The step: its weight over data ranks, whether all was finite, the norm of what is cut over tensor ranks.
    add("data", "all_reduce", 1, 4)
    add("world", "all_reduce", 1, 4)
    add("tensor", "all_reduce", 1, 4)
    steps = max(1, len(case.documents))
    return Counter({key: number * steps for key, number in counts.items()})


def clean(fake_cuda: FakeCuda, case: Case) -> dict[str, Any]:
    """Returns the report of a case, which has no finding and no error."""
    report = fake_cuda.run(case)
    assert report["findings"] == [], report["findings"]
    assert report["error"] is None, report["error"]
    return report


def compiled(fake_cuda: FakeCuda, case: Case, graphs: int | None = None) -> dict[str, Any]:
    """The same; blocks were compiled without breaks, into so many graphs where told, and never again."""
    report = clean(fake_cuda, case)
    assert report["compiled"] == report["compiled again"] and report["compiled"]["breaks"] == 0
    assert report["compiled"]["graphs"] > 0 and graphs in (None, report["compiled"]["graphs"])
    return report


def assert_layout(fake_cuda: FakeCuda, cases: list[Case]) -> None:
    """Each rank's collectives are the derived ones, and all ranks of a group run its in one order."""
    collectives_by_group: dict[tuple[int, ...], list[tuple[Any, ...]]] = {}
    for case in cases:
        report = clean(fake_cuda, case)
        collectives = [tuple(collective) for collective in report["collectives"]]
        assert Counter(collectives) == derived(case), f"rank {case.rank}"
        for group in {collective[:3] for collective in collectives}:
            group_collectives = [collective for collective in collectives if collective[:3] == group]
            assert collectives_by_group.setdefault(group, group_collectives) == group_collectives, (
                f"rank {case.rank} in group {group}"
            )


def assert_construction(fake_cuda: FakeCuda, case: Case) -> None:
    """At most this rank's part is held, in its dtype, and two parameters as drawn, whole and in fp32."""
    report = fake_cuda.run(case)
    largest = 4 * HIDDEN * max(VOCAB, 3 * HIDDEN, 2 * MODEL["intermediate_size"])
    assert report["parameters"] < report["construction"] <= report["parameters"] + 2 * largest, "construction"


def assert_documents(fake_cuda: FakeCuda, case: Case) -> None:
    """The kernel is told of less than twice as many documents as there are, and no longer ones."""
    report = fake_cuda.run(case)
    calls = len(report["varlen"]) // len(case.documents)
    assert calls >= LAYERS
    for step, rows in enumerate(case.documents):
        ends = [[*starts[1:], SEQ] for starts in rows]
        lengths = [b - a for row, last in zip(rows, ends, strict=True) for a, b in zip(row, last, strict=True)]
        for call in report["varlen"][step * calls : (step + 1) * calls]:
            assert call["documents"] < 2 * len(lengths), f"{call['documents']} documents for {len(lengths)}"
            assert call["longest"] == max(lengths)
