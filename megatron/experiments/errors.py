"""The error of commands on past runs and their variants."""

from megatron.neox_arguments import UserError


class ExperimentError(UserError):
    """A run, or a variant of one, cannot be read or started. The message names the run or file, and what to do."""


SweepError = ExperimentError
