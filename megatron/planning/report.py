"""The report of one rank of a dry run. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Collective(NamedTuple):
    """A collective, or a message, that this rank starts.

    ranks: global ranks of its group. size: bytes of the full tensor. dtype: of the tensor.
    peer: of a send or a receive, the global rank at the other end. source: of a broadcast, a scatter or a
        gather, the number of the rank in the group.
    """

    ranks: tuple[int, ...]
    kind: str
    size: int
    dtype: str
    peer: int | None = None
    source: int | None = None


@dataclass(frozen=True)
class RankReport:
    """A step of one rank. Sizes are bytes.

    coordinates: its place along each axis. groups: global ranks of its process group along each axis with
    more than one. layers: numbers of the layers that it holds.
    parts: weights, gradients, and other memory that the engine keeps. kept_bytes: all memory between steps.
    construction_bytes, step_bytes: the most memory while the engine is built, and in a step.
    collectives: in their order, of the step; setup: those before it. num_groups: number of process groups
        that the rank has created.
    notes: what slows a GPU down, such as values that the host waits for.
    error: what stopped it; None: nothing.
    """

    rank: int
    coordinates: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    layers: tuple[int, ...] = ()
    parts: Mapping[str, int] = field(default_factory=dict)
    kept_bytes: int = 0
    construction_bytes: int = 0
    step_bytes: int = 0
    collectives: tuple[Collective, ...] = ()
    setup: tuple[Collective, ...] = ()
    num_groups: int = 0
    notes: tuple[str, ...] = ()
    error: str | None = None
