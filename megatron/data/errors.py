"""The exceptions of the data package."""

from megatron.neox_arguments.errors import UserError


class DataError(UserError, ValueError):
    """Unusable data: the message names the file and what to do."""


class MissingDataError(DataError):
    """No file exists for a data path. prefix: that path."""

    prefix = ""
