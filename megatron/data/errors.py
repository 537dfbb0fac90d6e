"""The one exception of the data package."""

from megatron.neox_arguments.errors import UserError


class DataError(UserError, ValueError):
    """Data that cannot be used: the message names the file and what to do."""


class MissingDataError(DataError):
    """A data path at which nothing lies. prefix: that path."""

    prefix = ""
