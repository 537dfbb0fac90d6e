"""The exceptions that reading and writing checkpoints raises."""

from collections.abc import Sequence

from megatron.neox_arguments.errors import UserError


def shortened(entries: Sequence[str], most: int, separator: str = ", ") -> str:
    """Joins `entries` for an error: `most` of them, and how many more there are."""
    remainder = f" and {len(entries) - most} more" if len(entries) > most else ""
    return separator.join(entries[:most]) + remainder


class CheckpointError(UserError, ValueError):
    """A checkpoint or model cannot be read or written; the message names the file and what to do."""


class DamagedError(CheckpointError):
    """A file of a checkpoint is damaged or missing; an older checkpoint may be intact."""


class NonFiniteStateError(DamagedError):
    """Weights or optimizer state hold NaN or Inf; an older checkpoint may be finite."""
