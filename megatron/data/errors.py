"""Defines the exceptions of the data package."""

from megatron.neox_arguments.errors import UserError


class DataError(UserError, ValueError):
    """Raised for unusable data. The message names the file and says what to do."""


class MissingDataError(DataError):
    """Raised if no file exists for a data path. prefix: the data path."""

    prefix = ""
