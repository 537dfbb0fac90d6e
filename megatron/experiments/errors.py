"""The error of commands on past runs and their variants."""

from megatron.neox_arguments import UserError


class RunError(UserError):
    """A run, or a variant of it, cannot be read or started. The message names it, and what to do."""
