"""Exceptions that are raised when a checkpoint is read or written."""

from collections.abc import Sequence

from megatron.neox_arguments.errors import UserError


def shortened(entries: Sequence[str], max_entries: int, separator: str = ", ") -> str:
    """Joins `entries` for an error message: at most `max_entries`, then " and N more" for the rest."""
    remainder = f" and {len(entries) - max_entries} more" if len(entries) > max_entries else ""
    return separator.join(entries[:max_entries]) + remainder


class CheckpointError(UserError, ValueError):
    """A checkpoint or model cannot be read or written; the message names the file and what to do."""


class DamagedError(CheckpointError):
    """A file of a checkpoint is damaged or missing; an older checkpoint may be intact."""


class NonFiniteStateError(DamagedError):
    """Weights or optimizer state hold NaN or Inf; an older checkpoint may be finite."""
