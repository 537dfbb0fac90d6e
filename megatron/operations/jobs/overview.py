"""One row for each job: what Slurm, its log, its status.json and its metrics say, together."""

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
_NEVER_S = 1e10  # 300 years
_NUMBER = r"\d+(_\d+)?"  # of a job, and of one of an array
_UNDER_WAY = (TRAINING, SAVING, EVALUATING)


@dataclass(frozen=True)
class Choice:
    """Which jobs are wanted. ids: numbers of jobs, or folders of runs of this machine; none: those of `user`
    that wait, run, or ended within since_s. name, experiment: patterns as of a shell. every: also jobs that
    do not train."""

    ids: Sequence[str] = ()
    user: str | None = None
    name: str | None = None
    experiment: str | None = None
    since_s: float = 86400.0
    every: bool = False


@dataclass(frozen=True)
class Row:
    """A job and what it is doing. tokens_per_s, model_flops (of each GPU, in a second), utilization: of its
    last logged step; eta_s: seconds until its last iteration at the speed of the last lines; scores: of its
    last evaluation. save, logs: the folders of its run; device: of rank 0. problems: what its files hold that
    cannot be used."""

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
        """Whether it has crashed, writes nothing any more, or has ended nobody knows how."""
        return self.verdict.kind in NEEDS_A_PERSON

    def as_dict(self) -> dict[str, Any]:
        """The row for `--json`, whose fields docs/jobs.md lists."""
        job, verdict, done = self.job, self.verdict, self.progress
        return {
            "id": job.id, "name": job.name, "user": job.user, "experiment": self.experiment, "state": job.state,
            "verdict": verdict.kind, "detail": verdict.detail or None, "silent_s": verdict.silent_s,
            "error_lines": list(verdict.error_lines), "iteration": done.iteration if done else None,
            "total": done.total if done else None,
            "loss": _finite(done.loss) if done else None,
            "tokens_per_s": _finite(self.tokens_per_s), "utilization": _finite(self.utilization), "eta_s": self.eta_s,
            "scores": {name: _finite(value) for name, value in self.scores.items()},
            "problems": list(self.problems), "nodes": job.nodes, "node_list": job.node_list or None,
            "submitted": job.submitted, "started": job.started, "ended": job.ended,
            "log": str(job.log) if job.log is not None else None,
            "save": str(self.save) if self.save is not None else None, "local": job.local,
        }  # fmt: skip


def overview(choice: Choice, slurm: Slurm, site: Mapping[str, str]) -> list[Row]:
    """The rows of the jobs and local runs that are wanted, the oldest first.

    Where Slurm never answers, local runs are shown alone, with a warning. Raises LaunchError for a number
    that Slurm does not know, a user that there is not, and where Slurm does not answer and nothing else is
    known; RunFolderError for a folder that holds no run.
    """
    rows = [row_of(job, site) for job in _jobs(choice, slurm, site)]
    return [row for row in rows if _matches(row, choice)]


def row_of(job: Job, site: Mapping[str, str]) -> Row:
    """What a job is doing now."""
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
    named = save or (_path(job, log.save) if log is not None and log.save else None)
    if named is not None:
        row = replace(row, experiment=experiment_of(named, _checkpoints(site, job.work_dir)))
    if run is None or (done is None and not job.local):
        return replace(row, eta_s=_eta(done, verdict))
    metrics = run.last_rows()
    done = row.progress or _progress(metrics, status)
    if done is not None:  # a later job may train there by now
        metrics = [one for one in metrics if one["iteration"] <= done.iteration]
    numbers: Mapping[str, Any] = next((one for one in reversed(metrics) if "runtime/tokens_per_sec" in one), {})
    return replace(
        row, progress=done, tokens_per_s=numbers.get("runtime/tokens_per_sec"),
        model_flops=numbers.get("runtime/model_flops_per_sec_per_gpu"),
        utilization=numbers.get("runtime/model_flops_utilization"),
        eta_s=_eta(done, verdict),
        scores={
            name.removeprefix(_SCORES): value
            for one in metrics for name, value in one.items() if name.startswith(_SCORES)
        },
    )  # fmt: skip


def _jobs(choice: Choice, slurm: Slurm, site: Mapping[str, str]) -> list[Job]:
    if choice.ids:
        words = [one for one in choice.ids if not re.fullmatch(_NUMBER, one) and not Path(one).exists()]
        if words:
            raise LaunchError(f"{', '.join(words)}: neither the number of a job nor the folder of a run (`save`)")
        numbers = [one for one in choice.ids if re.fullmatch(_NUMBER, one) and not Path(one).exists()]
        if numbers and not slurm.is_here:
            raise LaunchError(f"{', '.join(numbers)}: this machine has no Slurm (scontrol), nor is there such a folder")
        jobs = slurm.jobs(ids=numbers) if numbers else []
        unknown = [number for number in numbers if not any(job.is_called(number) for job in jobs)]
        if unknown:
            raise LaunchError(f"job {', '.join(unknown)}: Slurm knows no such job")
        return [*jobs, *(local_run(Path(one)) for one in choice.ids if one not in numbers)]
    if choice.user is not None:
        try:
            pwd.getpwnam(choice.user)
        except KeyError:
            raise LaunchError(f"--user {choice.user}: this machine knows no such user") from None
    runs = find_runs(_checkpoints(site, Path.cwd()) or Path("checkpoints"), choice.since_s)
    runs = [run for run in runs if run.user == (choice.user or _me())]
    try:
        jobs = slurm.jobs(choice.user, choice.since_s) if slurm.is_here else []
    except LaunchError as problem:
        if slurm.has_answered or not runs:
            raise
        slurm.do_without(problem)
        jobs = []
    return [*(job for job in jobs if choice.every or job.trains), *runs]


def _me() -> str:
    """Whoever asks, by name as `Job.user` is."""
    return user_name(os.getuid())


def _matches(row: Row, choice: Choice) -> bool:
    wanted = ((choice.name, row.job.name), (choice.experiment, row.experiment or ""))
    return all(pattern is None or fnmatchcase(value, pattern) for pattern, value in wanted)


def _run_folder(job: Job, log: LogFacts | None) -> RunFolder | None:
    """The folders of a job's run: its own, else those that its list of arguments names."""
    try:
        if job.save is not None:
            return open_run(job.save)
        if log is None or log.save is None:
            return None
        save = _path(job, log.save)
        return RunFolder(save, _path(job, log.log_dir) if log.log_dir is not None else save / "logs")
    except RunFolderError:
        return None


def _status(job: Job, run: RunFolder | None) -> Mapping[str, Any]:
    """status.json, if it speaks of this job: another may train in that folder by now."""
    status = run.status() if run is not None else {}
    return status if job.local or status.get("job") == job.id else {}


def _progress(metrics: Sequence[Mapping[str, Any]], status: Mapping[str, Any]) -> Progress | None:
    """Of a run whose output is in no log that is known."""
    total = status.get("train_iters")
    last = next((one for one in reversed(metrics) if "train/lm_loss" in one), None)
    if last is None or total is None:
        return None
    return Progress(last["iteration"], total, last["train/lm_loss"], last.get("runtime/iteration_time"))


def _eta(done: Progress | None, verdict: Verdict) -> float | None:
    if done is None or not done.seconds or verdict.kind not in _UNDER_WAY:
        return None
    seconds = (done.total - done.iteration) * done.seconds
    return seconds if seconds < _NEVER_S else None


def _finite(value: float | None) -> float | None:
    """A number that JSON has a form for."""
    return value if value is not None and math.isfinite(value) else None


def _path(job: Job, text: str) -> Path:
    return job.work_dir / text


def _checkpoints(site: Mapping[str, str], folder: Path) -> Path | None:
    return folder / site["NEOX_CHECKPOINT_DIR"] if "NEOX_CHECKPOINT_DIR" in site else None
