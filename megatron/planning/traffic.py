"""The bytes that collectives send."""

from typing import NamedTuple

from megatron.planning.operations import Operation
from megatron.planning.report import Collective


class Traffic(NamedTuple):
    """Collectives of one kind that a rank starts in a step.

    axis: of their ranks. size: bytes that the rank sends. is_local: all ranks are on one machine.
    """

    axis: str
    kind: str
    calls: int
    size: float
    is_local: bool


def sent_bytes(collective: Collective | Operation) -> float:
    """Returns the bytes that each rank sends, at least: with a ring, or in direct exchange."""
    share = (len(collective.ranks) - 1) / len(collective.ranks)
    factors = {"all_reduce": 2 * share, "broadcast": 1.0, "send": 1.0, "barrier": 0.0}
    return collective.size * factors.get(collective.kind, share)
