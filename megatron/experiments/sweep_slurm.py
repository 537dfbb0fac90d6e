"""Submits the runs of a sweep as Slurm jobs, each after that of its parent, and tells which wait or run."""

import os
import shlex
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron.data.files import write_json
from megatron.experiments.errors import RunError
from megatron.experiments.sweep_file import Link, Sweep
from megatron.launch import install_root
from megatron.launch.site import site_variables
from megatron.operations.jobs.scheduler import Slurm
from megatron.process.run_files import read_object

BATCH = Path("slurm/sweep_run.sbatch")
JOBS = "jobs.json"


def submit(
    sweep: Sweep, links: Sequence[Link], cwd: Path, sbatch_options: Sequence[str], say: Callable[[str], None]
) -> int:
    """Submits a job for each of `links` that has none waiting or running. Returns 0.

    Call it with the sweep's lock. If a parent does not finish, Slurm cancels the jobs after it.
    cwd: folder to which relative paths in configurations refer.
    sbatch_options: with priority over the key `slurm`.

    Raises RunError if Slurm refuses a job. Jobs submitted before stay: the same command submits the others.
    """
    slurm = Slurm(site_variables(os.environ), say)
    if not slurm.is_here:
        raise RunError("submit: this machine has no Slurm (scontrol); use `run` to train here")
    if not (install_root() / BATCH).is_file():
        raise RunError(f"submit: {install_root() / BATCH} is missing; run the command from a clone of the repository")
    jobs = _read_jobs(sweep)
    active = set(_states(jobs, slurm))
    for link in links:
        if link.name in active:
            say(f"{link.name}: job {jobs[link.name]} waits or runs already")
            continue
        parent = jobs[link.parent.name] if link.parent is not None and link.parent.name in active else None
        if link.parent is not None and parent is None and link.parent in links:
            raise RunError(f"{link.name}: the job of {link.parent.name} has ended early; type the command again")
        link.folder.mkdir(parents=True, exist_ok=True)
        words = _words(sweep, link, cwd, sbatch_options, parent)
        done = subprocess.run(words, cwd=install_root(), capture_output=True, text=True)
        if done.returncode:
            raise RunError(f"{shlex.join(words)}: {done.stderr.strip()}; type the command again to submit what is left")
        jobs[link.name] = done.stdout.strip().partition(";")[0]
        active.add(link.name)
        write_json(sweep.root / JOBS, jobs)  # after each, so that a job is never submitted twice
        say(f"{link.name}: submitted job {jobs[link.name]}" + (f", after job {parent}" if parent is not None else ""))
    return 0


def _words(sweep: Sweep, link: Link, cwd: Path, options: Sequence[str], parent: str | None) -> list[str]:
    log = str(link.folder / "job").replace("%", "%%") + "-%j.out"
    waits = [f"--dependency=afterok:{parent}", "--kill-on-invalid-dep=yes"] if parent is not None else []
    gpus = site_variables(os.environ).get("NEOX_GPUS_PER_NODE")
    gres = [f"--gres=gpu:{gpus}"] if gpus is not None else []
    stage = link.stage.slurm if link.stage is not None else ()
    return [
        "sbatch", "--parsable", f"--job-name={sweep.file.stem}-{link.name}", f"--output={log}", *waits, *gres, *stage,
        *sweep.keys.slurm, *options, str(BATCH), str(sweep.file), link.name, str(cwd),
    ]  # fmt: skip


def refuse_active_jobs(sweep: Sweep, say: Callable[[str], None]) -> None:
    """Raises RunError if Slurm jobs of the sweep wait or run."""
    if active := jobs_now(sweep, say):
        numbers = [_read_jobs(sweep)[name] for name in active]
        ending = f"scancel {' '.join(numbers)}"
        raise RunError(f"jobs of this sweep wait or run: {', '.join(active)}; wait for them, or end them: {ending}")


def jobs_now(sweep: Sweep, say: Callable[[str], None]) -> dict[str, str]:
    """Returns the state of each job that waits or runs as text, such as `pending (Priority)`, by run."""
    jobs = _read_jobs(sweep)
    slurm = Slurm(site_variables(os.environ), say) if jobs else None
    return _states(jobs, slurm) if slurm is not None and slurm.is_here else {}


def _states(jobs: dict[str, str], slurm: Slurm) -> dict[str, str]:
    jobs_by_id = {job.id: job for job in slurm.jobs(ids=list(jobs.values()))} if jobs else {}
    return {
        name: jobs_by_id[number].state.lower()
        + (f" ({reason})" if (reason := jobs_by_id[number].reason) not in ("", "None") else "")
        for name, number in jobs.items()
        if number in jobs_by_id and jobs_by_id[number].is_active
    }


def _read_jobs(sweep: Sweep) -> dict[str, str]:
    """Returns the number of the last job of each run, by its name."""
    path = sweep.root / JOBS
    if not path.is_file():
        return {}
    try:
        return {str(name): str(number) for name, number in read_object(path).items()}
    except (OSError, ValueError) as problem:
        raise RunError(f"{path}: cannot be read ({problem}); restore the file, which has the numbers of jobs") from None
