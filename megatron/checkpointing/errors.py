"""The one exception of this room."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; the message names the file and what to do."""
