"""The operations of a planned step, as they were recorded. Imports no torch."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

DATA_AXES = ("data", "data_context", "expert_data")  # along which weights are gathered and gradients summed


class Operation(NamedTuple):
    """An operation on the device.

    kind: "product", "grouped" (products of experts), "attention", "attention_backward", "memory" (all that
        moves more than it computes), "fused" (memory operations between two others, as one kernel would run
        them; a compiled run has these in place of "memory"), or the name of a collective.
    flops: of products and attention, of which causality may leave half. size: bytes read and written; of a
        collective, of its full tensor.
    shape: of a product, (rows, columns, summed length); of "grouped" also the number of groups, whose rows
        are added up. dtype: of the operands.
    ranks, axis: of a collective, the global ranks of its group, and what they share. times: how often it
        runs. launches: how many kernels the host starts for it.
    """

    kind: str
    name: str
    flops: float
    size: float
    shape: tuple[int, ...] = ()
    dtype: str = ""
    ranks: tuple[int, ...] = ()
    axis: str = ""
    times: int = 1
    launches: int = 1


def merged(operations: Iterable[Operation]) -> tuple[Operation, ...]:
    """Returns each operation once, with its number. Those that only move bytes become one of mean size."""
    counts: Counter[Operation] = Counter()
    moved: dict[str, tuple[int, float]] = {}
    for operation in operations:
        if operation.kind in ("memory", "fused"):
            count, size = moved.get(operation.kind, (0, 0.0))
            moved[operation.kind] = count + operation.times, size + operation.times * operation.size
        else:
            counts[operation._replace(times=1)] += operation.times
    computing = [operation._replace(times=count) for operation, count in counts.items()]
    return (*computing, *(Operation(kind, "", 0.0, size / count, times=count) for kind, (count, size) in moved.items()))


class Segment(NamedTuple):
    """The work of a rank for one layer in one pass.

    layer: NeoX index; of the last norm, the head and the loss together, that of the norm.
    phase: kind of the pass (`PassKind`), "update", which is of all layers of the rank, or "sum", of all
        layers of the stage: the end of a "backward_weight", which adds up gradients.
    begin_bytes, end_bytes, peak_bytes: of memory on the device, at both ends and at most between them.
    """

    layer: int
    phase: str
    micro_batch: int
    operations: tuple[Operation, ...]
    begin_bytes: int
    end_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Trace:
    """A step of one rank of a run whose stages have few blocks of each kind.

    chunks: layers of the rank's pipeline stages in the trace. kinds: of every block of the run, the number of
        its kind.
    segments: in their order. layer_bytes: for each layer, bytes between steps by part: weights, gradients,
        optimizer states. kept_bytes: all memory between steps.
    """

    chunks: tuple[tuple[int, ...], ...]
    kinds: Mapping[int, int]
    segments: tuple[Segment, ...]
    layer_bytes: Mapping[int, Mapping[str, int]]
    kept_bytes: int
    notes: tuple[str, ...] = ()
