"""Errors of pipelines, and the exit codes of the command."""

from megatron.neox_arguments.errors import UserError

FAILED, GATE_FAILED, METRIC_MISSING, STOPPED = 1, 3, 4, 124
"""Exit codes of a failed stage, a failed gate, a gate that lacks a metric, and a stopped stage.

A stopped stage has saved and is not finished; slurm/job.sh queues a job again for 124."""


class PipelineError(UserError):
    """Raised if a pipeline cannot continue. The message names the file or stage and what to do."""


def cannot_write(path: object, problem: OSError) -> PipelineError:
    """Returns the PipelineError for a file that cannot be written, as on a full or read-only disk."""
    reason = problem.strerror or problem
    return PipelineError(f"{path}: cannot be written ({reason}); make room there, then `resume` goes on from here")


class StageFailed(PipelineError):
    """A command of a stage failed or was stopped. code: the exit code of the pipeline."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code
