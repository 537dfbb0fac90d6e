"""Runs a pipeline as Slurm jobs, one per stage; a job starts after the previous stage has passed its gate."""

import os
import shlex
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron.launch import install_root
from megatron.launch.site import site_variables
from megatron.operations.jobs.scheduler import Job, Slurm
from megatron.pipelines.definition import Pipeline, Stage
from megatron.pipelines.errors import PipelineError
from megatron.pipelines.options import Options
from megatron.pipelines.state import State, locked

BATCH = Path("slurm/pipeline_stage.sbatch")


def submit(
    pipeline: Pipeline,
    stages: Sequence[Stage],
    options_of: Callable[[Stage], Options],
    sbatch_options: Sequence[str],
    say: Callable[[str], None],
) -> int:
    """Submits one Slurm job per stage, and returns 0.

    Each job waits for the job of the stage before it. If that stage does not pass, Slurm cancels the job.
    sbatch_options: options for all jobs, with priority over a stage's key `slurm`.

    Raises PipelineError if Slurm refuses a job (jobs already submitted are then cancelled), and if jobs of
    this pipeline still wait or run.
    """
    slurm = Slurm(site_variables(os.environ), say)
    if not slurm.is_here:
        raise PipelineError("--slurm: this machine has no Slurm (scontrol); remove --slurm to run the stages here")
    if not (install_root() / BATCH).is_file():
        raise PipelineError(
            f"--slurm: {install_root() / BATCH} is missing; run the command from a clone of the repository"
        )
    with locked(pipeline.folder, say):
        state = State(pipeline.folder)
        _refuse_active(pipeline, state, slurm)
        (pipeline.folder / "logs").mkdir(exist_ok=True)
        for stage in stages:  # recorded before the first job can start and read them
            state.update(stage.name, options=options_of(stage).to_json())
        submitted: list[str] = []
        for stage in stages:
            words = _words(pipeline, stage, sbatch_options, submitted[-1] if submitted else None)
            done = subprocess.run(words, cwd=install_root(), capture_output=True, text=True)
            if done.returncode:
                slurm.cancel(submitted)
                raise PipelineError(
                    f"{shlex.join(words)}: {done.stderr.strip()}; all jobs submitted before it were cancelled"
                )
            job = done.stdout.strip().partition(";")[0]
            submitted.append(job)
            state.update(stage.name, job=job)
            dependency = f", after job {submitted[-2]}" if len(submitted) > 1 else ""
            say(f"{stage.name}: submitted job {job}{dependency}")
    return 0


def refuse_active_jobs(pipeline: Pipeline, state: State, say: Callable[[str], None]) -> None:
    """Raises PipelineError if Slurm jobs of the pipeline wait or run, unless this process runs in a Slurm
    job."""
    if "SLURM_JOB_ID" not in os.environ and any(state[stage.name].job for stage in pipeline.stages):
        slurm = Slurm(site_variables(os.environ), say)
        if slurm.is_here:
            _refuse_active(pipeline, state, slurm)


def _refuse_active(pipeline: Pipeline, state: State, slurm: Slurm) -> None:
    active = {name: number for name, (number, _) in _active_jobs(pipeline, state, slurm).items()}
    if active:
        jobs_text = ", ".join(f"{number} ({name})" for name, number in active.items())
        ending = f"scancel {' '.join(active.values())}"
        raise PipelineError(f"jobs of this pipeline wait or run: {jobs_text}; wait for them, or end them: {ending}")


def _active_jobs(pipeline: Pipeline, state: State, slurm: Slurm) -> dict[str, tuple[str, Job]]:
    """Returns (job number, job) for each Slurm job of the pipeline that waits or runs, by the name of its
    stage."""
    numbers = {stage.name: number for stage in pipeline.stages if (number := state[stage.name].job) is not None}
    jobs = {name: (number, slurm.job(number)) for name, number in numbers.items()}
    return {name: (number, job) for name, (number, job) in jobs.items() if job is not None and job.is_active}


def _words(pipeline: Pipeline, stage: Stage, options: Sequence[str], previous_job: str | None) -> list[str]:
    log = str(pipeline.folder / "logs" / stage.name).replace("%", "%%") + "-%j.out"
    waits = [f"--dependency=afterok:{previous_job}", "--kill-on-invalid-dep=yes"] if previous_job is not None else []
    name = f"{pipeline.title}-{stage.name}".replace("/", "-").replace(" ", "-")
    gpus = site_variables(os.environ).get("NEOX_GPUS_PER_NODE")
    gres = [f"--gres=gpu:{gpus}"] if gpus is not None and stage.kind == "train" else []
    return [
        "sbatch", "--parsable", f"--job-name={name}", f"--output={log}", *waits, *gres, *stage.slurm, *options,
        str(BATCH), str(pipeline.file), stage.name,
    ]  # fmt: skip


def jobs_now(pipeline: Pipeline, state: State, say: Callable[[str], None]) -> dict[str, str]:
    """Returns the state of each waiting or running job as text, such as `pending (Priority)`, by stage name.

    {} on a machine without Slurm."""
    slurm = Slurm(site_variables(os.environ), say)
    return {
        name: job.state.lower() + (f" ({job.reason})" if job.reason not in ("", "None") else "")
        for name, (_, job) in (_active_jobs(pipeline, state, slurm) if slurm.is_here else {}).items()
    }
