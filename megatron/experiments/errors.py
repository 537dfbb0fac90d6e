"""The error of commands on past runs and their variants."""

from megatron.neox_arguments import UserError


class ExperimentError(UserError):
    """A past run cannot be read as asked. The message names the run or file, and what to do."""
