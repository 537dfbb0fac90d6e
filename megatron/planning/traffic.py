"""Sums what a rank sends, by the axis whose ranks it sends to."""

from collections.abc import Sequence
from typing import NamedTuple

from megatron.planning.report import Collective, RankReport

_AXES = (
    "tensor", "context", "context_heads", "context_keys", "expert", "data", "data_context", "expert_data", "pipe"
)  # fmt: skip


class Traffic(NamedTuple):
    """Collectives of one kind that a rank starts in a step.

    axis: of their ranks. size: bytes that the rank sends. is_local: all ranks are on one machine.
    """

    axis: str
    kind: str
    calls: int
    size: float
    is_local: bool


def traffic(report: RankReport, gpus_per_node: int) -> list[Traffic]:
    """Returns the collectives of a rank by axis and kind, largest first."""
    sums: dict[tuple[str, str, bool], tuple[int, float]] = {}
    for collective in report.collectives:
        if collective.kind == "receive":
            continue
        machines = {rank // gpus_per_node for rank in collective.ranks}
        key = _axis(report, collective.ranks), collective.kind, len(machines) == 1
        calls, size = sums.get(key, (0, 0.0))
        sums[key] = calls + 1, size + sent_bytes(collective)
    rows = [Traffic(axis, kind, *sums[axis, kind, local], local) for axis, kind, local in sums]
    return sorted(rows, key=lambda row: -row.size)


def extrapolated(rows: Sequence[Traffic], smaller: Sequence[Traffic], difference: int, missing: int) -> list[Traffic]:
    """Returns the traffic of a step with more micro-batches than were run.

    rows, smaller: of two steps; the second has `difference` micro-batches less. missing: micro-batches that
    the first one lacks.
    """
    results, factor = [], missing / difference
    smaller_rows = {(row.axis, row.kind, row.is_local): row for row in smaller}
    for row in rows:
        reference = smaller_rows.get((row.axis, row.kind, row.is_local), row._replace(calls=0, size=0.0))
        calls = row.calls + round((row.calls - reference.calls) * factor)
        results.append(row._replace(calls=calls, size=row.size + (row.size - reference.size) * factor))
    return sorted(results, key=lambda row: -row.size)


def sent_bytes(collective: Collective) -> float:
    """Returns the bytes that each rank sends, at least: with a ring, or in direct exchange."""
    share = (len(collective.ranks) - 1) / len(collective.ranks)
    factors = {"all_reduce": 2 * share, "broadcast": 1.0, "send": 1.0, "barrier": 0.0}
    return collective.size * factors.get(collective.kind, share)


def _axis(report: RankReport, ranks: Sequence[int]) -> str:
    names = [axis for axis in _AXES if report.groups.get(axis) == tuple(ranks)]
    if names:
        return names[0]
    return "pipe" if set(ranks) <= set(report.groups.get("pipe", ())) else "all ranks"  # neighbouring stages
