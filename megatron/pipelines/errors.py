"""Errors of pipelines, and the exit codes of the command."""

from megatron.neox_arguments.errors import UserError

FAILED, GATE_FAILED, METRIC_MISSING, STOPPED = 1, 3, 4, 124
"""Exit codes: of a stage that failed, of a gate that did, of a gate that lacks a metric, of a stage that was
told to stop, has saved and is not finished (124 is what slurm/job.sh queues a job again for)."""


class PipelineError(UserError):
    """A pipeline that cannot go on; the message names the file or stage and what to do."""


def cannot_write(path: object, problem: OSError) -> PipelineError:
    """The error of a file that a full or read-only disk does not take."""
    why = problem.strerror or problem
    return PipelineError(f"{path}: cannot be written ({why}); make room there, then `resume` goes on from here")


class StageFailed(PipelineError):
    """A command of a stage ended badly, or was stopped; `code` is the exit code of the pipeline."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code
