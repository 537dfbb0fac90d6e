"""The exception of uploads."""

from megatron.neox_arguments import UserError


class HubError(UserError):
    """A checkpoint that cannot be published; the message names the file, key or flag, and what to do."""
