"""The one exception of this room."""

from megatron.neox_arguments.errors import UserError


class CheckpointError(UserError, ValueError):
    """A checkpoint that cannot be read or written; the message names the file and what to do."""


class DamagedError(CheckpointError):
    """A checkpoint is not what its manifest says; another one may be whole."""
