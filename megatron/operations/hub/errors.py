"""The exception that uploads raise."""

from megatron.neox_arguments import UserError


class HubError(UserError):
    """A checkpoint cannot be published. The message names the file, key or flag, and what to do."""
