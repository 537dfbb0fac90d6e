"""The exceptions that reading and writing checkpoints raises."""

from megatron.neox_arguments.errors import UserError


class CheckpointError(UserError, ValueError):
    """A checkpoint or model cannot be read or written; the message names the file and what to do."""


class DamagedError(CheckpointError):
    """A file of a checkpoint is damaged or missing; an older checkpoint may be intact."""


class NonFiniteStateError(DamagedError):
    """Weights or optimizer state hold NaN or Inf; an older checkpoint may be finite."""
