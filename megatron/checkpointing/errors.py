"""The exceptions that reading and writing checkpoints raises."""

from megatron.neox_arguments.errors import UserError


class CheckpointError(UserError, ValueError):
    """A checkpoint that cannot be read or written; the message names the file and what to do."""


class DamagedError(CheckpointError):
    """A checkpoint is not what its manifest says; another one may be whole."""


class NonFiniteStateError(DamagedError):
    """Weights or optimizer state hold NaN or Inf; another checkpoint may not."""
