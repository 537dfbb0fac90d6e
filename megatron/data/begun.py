"""How far a run is in its data, from its checkpoint: what keeps the order of its samples when it is extended."""

from collections.abc import Mapping
from dataclasses import dataclass, field

LaidOut = Mapping[str, tuple[tuple[int, ...], ...]]


@dataclass(frozen=True)
class Begun:
    """laid_out: set name -> for each of its members where the stretches of its order end, in samples (see
    `build_packed`); sets whose order only continues with more samples are not there. The default is a new run."""

    iteration: int = 0
    consumed_samples: int = 0
    laid_out: LaidOut = field(default_factory=dict)

    def stretches(self, name: str, member: int) -> tuple[int, ...]:
        """Of a member of a set; () where it is not known, or was not there."""
        members = self.laid_out.get(name, ())
        return members[member] if member < len(members) else ()
