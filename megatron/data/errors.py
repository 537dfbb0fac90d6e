"""The one exception of the data room."""


class DataError(ValueError):
    """Data that cannot be used: the message names the file and what to do."""
