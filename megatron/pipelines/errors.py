"""Defines the errors of pipelines, and the exit codes of `deepy.py pipeline`."""

from megatron.neox_arguments.errors import UserError

FAILED, GATE_FAILED, METRIC_MISSING, STOPPED = 1, 3, 4, 124
"""Exit codes for a failed stage, a failed gate, a metric that a gate misses, and a stopped stage.

A stopped stage has saved, but is not finished; slurm/job.sh queues a job again that ends with 124."""


class PipelineError(UserError):
    """Raised if a pipeline cannot continue. The message names the file or stage and what to do."""


def cannot_write(path: object, problem: OSError) -> PipelineError:
    """Returns the PipelineError for a file that cannot be written, as on a full or read-only disk."""
    reason = problem.strerror or problem
    return PipelineError(f"{path}: cannot be written ({reason}); free space or allow writing there, then run `resume`")


class StageFailed(PipelineError):
    """A stage of a pipeline failed, was stopped or was refused by its gate. code: exit code of the
    command."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code
