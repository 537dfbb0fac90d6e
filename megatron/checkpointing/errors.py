"""The one exception of this room."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; the message names the file and what to do."""


class DamagedError(CheckpointError):
    """A checkpoint is not what its manifest says; another one may be whole."""
