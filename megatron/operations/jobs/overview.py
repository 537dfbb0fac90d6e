"""Builds the table of jobs: joins the facts from Slurm, logs, status.json and metrics into one row per
job."""

import math
import os
import pwd
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megatron.launch.environment import LaunchError
from megatron.operations.jobs.joblog import LogFacts, Progress, read_log
from megatron.operations.jobs.local_runs import find_runs, local_run, user_name
from megatron.operations.jobs.scheduler import Job, Slurm
from megatron.operations.jobs.verdict import EVALUATING, NEEDS_A_PERSON, SAVING, TRAINING, Verdict, judge
from megatron.operations.run_folder import RunFolder, RunFolderError, experiment_of, open_run

_SCORES = "eval_tasks/"
_NEVER_S = 1e10  # 300 years: an ETA from here on is not shown
_NUMBER = r"\d+(_\d+)?"  # number of a job such as 12, or of a task in a job array such as 12_3
_PROGRESSING = (TRAINING, SAVING, EVALUATING)


@dataclass(frozen=True)
class Choice:
    """A selection of jobs to list.

    ids: numbers of jobs, or folders of local runs; (): jobs of `user` that wait, run, or ended within
        `max_age_s` seconds. user: None for the current user.
    name, experiment: shell patterns that the job's name and experiment must match; None: any.
    include_non_training: also list jobs that do not train.
    """

    ids: Sequence[str] = ()
    user: str | None = None
    name: str | None = None
    experiment: str | None = None
    max_age_s: float = 86400.0
    include_non_training: bool = False


@dataclass(frozen=True)
class Row:
    """One row of the table of jobs: a job, the verdict on it, and numbers of its run.

    tokens_per_s, model_flops (FLOP/s of a GPU), utilization (share of its peak): of the last logged step.
    eta_s: seconds to the last iteration at the recent speed.
    scores: scores of the last evaluation, by name.
    save, logs: the run's folders of checkpoints and logs.
    device: name of rank 0's device.
    problems: messages on values in the run's files that could not be used.
    """

    job: Job
    verdict: Verdict
    experiment: str | None = None
    progress: Progress | None = None
    tokens_per_s: float | None = None
    model_flops: float | None = None
    utilization: float | None = None
    eta_s: float | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    save: Path | None = None
    logs: Path | None = None
    device: str | None = None
    problems: tuple[str, ...] = ()

    @property
    def needs_a_person(self) -> bool:
        """Whether a person should look: the job crashed, stopped writing its log, or ended for an unknown
        reason."""
        return self.verdict.kind in NEEDS_A_PERSON

    def as_dict(self) -> dict[str, Any]:
        """Returns the row as JSON values by name, for `--json`; docs/jobs.md lists the fields."""
        job, verdict, done = self.job, self.verdict, self.progress
        return {
            "id": job.id, "name": job.name, "user": job.user, "experiment": self.experiment, "state": job.state,
            "verdict": verdict.kind, "detail": verdict.detail or None, "silent_s": verdict.silent_s,
            "error_lines": list(verdict.error_lines), "iteration": done.iteration if done else None,
            "total": done.total if done else None, "loss": _finite(done.loss) if done else None,
            "tokens_per_s": _finite(self.tokens_per_s), "utilization": _finite(self.utilization), "eta_s": self.eta_s,
            "scores": {name: _finite(value) for name, value in self.scores.items()},
            "problems": list(self.problems), "nodes": job.nodes, "node_list": job.node_list or None,
            "submitted": job.submit_time, "started": job.start_time, "ended": job.end_time,
            "log": str(job.log) if job.log is not None else None,
            "save": str(self.save) if self.save is not None else None, "local": job.local,
        }  # fmt: skip


def overview(choice: Choice, slurm: Slurm, site: Mapping[str, str]) -> list[Row]:
    """Returns the rows of the selected Slurm jobs, then those of local runs, each the oldest first.

    If Slurm never answers, only local runs are returned, with a warning. Raises LaunchError for a job number
    or user that does not exist, and if Slurm does not answer and there is no local run. Raises RunFolderError
    for a folder without a run.
    """
    rows = [row_of(job, site) for job in _jobs(choice, slurm, site)]
    return [row for row in rows if _matches(row, choice)]


def row_of(job: Job, site: Mapping[str, str]) -> Row:
    """Reads the log, status.json and metrics of a job, and returns its row for the table of jobs."""
    now = time.time()
    log = read_log(job.log) if job.log is not None else None
    run = _run_folder(job, log)
    row = _row_of(job, log, run, site, now)
    return replace(row, problems=tuple(run.problems.lines())) if run is not None else row


def _row_of(job: Job, log: LogFacts | None, run: RunFolder | None, site: Mapping[str, str], now: float) -> Row:
    status = _status(job, run)
    verdict = judge(job, log, status, now)
    save = job.save or (run.save if run is not None else None)
    logs = run.logs if run is not None else None
    done = log.progress if log is not None else None
    row = Row(job, verdict, save=save, logs=logs, progress=done, device=status.get("device"))
    experiment_save = save or (job.work_dir / log.save if log is not None and log.save else None)
    if experiment_save is not None:
        row = replace(row, experiment=experiment_of(experiment_save, _checkpoints(site, job.work_dir)))
    if run is None or (done is None and not job.local):
        return replace(row, eta_s=_eta(done, verdict))
    metrics = run.last_rows()
    done = row.progress or _progress(metrics, status)
    if done is not None:  # a later job of the same run may have added rows
        metrics = [metrics_row for metrics_row in metrics if metrics_row["iteration"] <= done.iteration]
    measured = (metrics_row for metrics_row in reversed(metrics) if "runtime/tokens_per_sec" in metrics_row)
    numbers: Mapping[str, Any] = next(measured, {})
    return replace(
        row, progress=done, tokens_per_s=numbers.get("runtime/tokens_per_sec"),
        model_flops=numbers.get("runtime/model_flops_per_sec_per_gpu"),
        utilization=numbers.get("runtime/model_flops_utilization"), eta_s=_eta(done, verdict),
        scores={
            name.removeprefix(_SCORES): value
            for metrics_row in metrics for name, value in metrics_row.items() if name.startswith(_SCORES)
        },
    )  # fmt: skip


def _jobs(choice: Choice, slurm: Slurm, site: Mapping[str, str]) -> list[Job]:
    if choice.ids:
        no_folders = [identifier for identifier in choice.ids if not Path(identifier).exists()]
        numbers = [identifier for identifier in no_folders if re.fullmatch(_NUMBER, identifier)]
        if invalid := [identifier for identifier in no_folders if identifier not in numbers]:
            raise LaunchError(
                f"{', '.join(invalid)}: neither a job number nor an existing folder; give a number, or the "
                "`save` of a run"
            )
        if numbers and not slurm.is_here:
            raise LaunchError(
                f"{', '.join(numbers)}: no such folder, and this machine has no Slurm (scontrol) to look for a job of "
                "this number"
            )
        jobs = slurm.jobs(ids=numbers) if numbers else []
        unknown = [number for number in numbers if not any(job.is_called(number) for job in jobs)]
        if unknown:
            raise LaunchError(f"job {', '.join(unknown)}: Slurm knows no such job; check the number")
        return [*jobs, *(local_run(Path(identifier)) for identifier in choice.ids if identifier not in numbers)]
    if choice.user is not None:
        try:
            pwd.getpwnam(choice.user)
        except KeyError:
            raise LaunchError(f"--user {choice.user}: no such user on this machine") from None
    runs = find_runs(_checkpoints(site, Path.cwd()) or Path("checkpoints"), choice.max_age_s)
    runs = [run for run in runs if run.user == (choice.user or user_name(os.getuid()))]
    try:
        jobs = slurm.jobs(choice.user, choice.max_age_s) if slurm.is_here else []
    except LaunchError as problem:
        if slurm.has_answered or not runs:
            raise
        slurm.disable(problem)
        jobs = []
    return [*(job for job in jobs if choice.include_non_training or job.trains), *runs]


def _matches(row: Row, choice: Choice) -> bool:
    conditions = ((choice.name, row.job.name), (choice.experiment, row.experiment or ""))
    return all(pattern is None or fnmatchcase(value, pattern) for pattern, value in conditions)


def _run_folder(job: Job, log: LogFacts | None) -> RunFolder | None:
    """Returns the folders of a job's run; None if unknown.

    log: facts of the job's log, which names the folders of a Slurm job."""
    try:
        if job.save is not None:
            return open_run(job.save)
        if log is None or log.save is None:
            return None
        save = job.work_dir / log.save
        return RunFolder(save, job.work_dir / log.log_dir if log.log_dir is not None else save / "logs")
    except RunFolderError:
        return None


def _status(job: Job, run: RunFolder | None) -> Mapping[str, Any]:
    """Returns the content of the run's status.json; {} if another job wrote it, which now trains in this
    folder."""
    status = run.status() if run is not None else {}
    return status if job.local or status.get("job") == job.id else {}


def _progress(metrics: Sequence[Mapping[str, Any]], status: Mapping[str, Any]) -> Progress | None:
    """Returns the progress from the rows of metrics.jsonl and status.json, for a job without a usable log.

    None if no row has a loss or status.json does not have `train_iters`."""
    total = status.get("train_iters")
    last = next((row for row in reversed(metrics) if "train/lm_loss" in row), None)
    if last is None or total is None:
        return None
    return Progress(last["iteration"], total, last["train/lm_loss"], last.get("runtime/iteration_time"))


def _eta(done: Progress | None, verdict: Verdict) -> float | None:
    if done is None or not done.seconds or verdict.kind not in _PROGRESSING:
        return None
    seconds = (done.total - done.iteration) * done.seconds
    return seconds if seconds < _NEVER_S else None


def _finite(value: float | None) -> float | None:
    """Returns the number; None for NaN and infinity, which JSON cannot represent."""
    return value if value is not None and math.isfinite(value) else None


def _checkpoints(site: Mapping[str, str], folder: Path) -> Path | None:
    return folder / site["NEOX_CHECKPOINT_DIR"] if "NEOX_CHECKPOINT_DIR" in site else None
