"""Asks Slurm about jobs: with sacct, or with scontrol on clusters without accounting."""

import getpass
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from megatron.launch.environment import LaunchError
from megatron.launch.slurm import to_end_of_line
from megatron.process.run_files import open_file

BATCH_FILE = "pretrain_neox.sbatch"
PENDING = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"})
RUNNING = frozenset({"RUNNING", "CONFIGURING", "COMPLETING", "STAGE_OUT", "SIGNALING", "STOPPED", "RESIZING"})
SUSPENDED = "SUSPENDED"
NO_LOG = "0:53"
"""The exit code that Slurm gives a job if it could not open the job's log file."""
_CONTINUED = re.compile(rb"^The log goes on in (.+)$", re.MULTILINE)  # slurm/job.sh writes it as one of the first lines
_FIELDS = "JobID,JobName,User,State,ExitCode,Submit,Start,End,NNodes,NodeList,WorkDir,SubmitLine"
_EPOCH = {"SLURM_TIME_FORMAT": "%s"}  # seconds since 1970
_SEPARATOR = "\x1f"
ANSWERS_S = 15.0
"""Timeout in seconds for each command of Slurm when jobs are listed; squeue may answer even if sacct does
not."""
PATIENT_S = 120.0
"""Timeout in seconds for each command of Slurm while `tools/jobs.py submit` watches a job."""


class SilentError(LaunchError):
    """A command of Slurm, such as sacct, did not answer within its timeout."""


@dataclass(frozen=True)
class Job:
    """A Slurm job, or a run that was started without Slurm (`local`); the id of a local run is its folder.

    state: Slurm's name of the state, such as RUNNING.
    submit_time, start_time, end_time: seconds since 1970.
    command: the command line that submitted it.
    log: file of its output.
    reason: why it waits, for a pending job.
    save: its folder of checkpoints; None if only the log names the folder.
    """

    id: str
    name: str
    user: str
    state: str
    submit_time: float | None = None
    start_time: float | None = None
    end_time: float | None = None
    exit_code: str = ""
    nodes: int = 1
    node_list: str = ""
    work_dir: Path = Path()
    command: str = ""
    log: Path | None = None
    reason: str = ""
    save: Path | None = None
    local: bool = False

    @property
    def is_active(self) -> bool:
        """Whether the job is pending, running or suspended."""
        return self.state in PENDING or self.state in RUNNING or self.state == SUSPENDED

    def is_called(self, number: str) -> bool:
        """Returns whether this job has the number `number`, or is a task of the job array `number`."""
        return self.id == number or self.id.startswith(f"{number}_")

    @property
    def trains(self) -> bool:
        """Whether the job trains: it is local, or its command or job name is that of pretrain_neox.sbatch."""
        return self.local or BATCH_FILE in self.command or self.name.startswith("neox-training")


class Slurm:
    """Queries the jobs of the Slurm cluster that this machine belongs to.

    site: variables of the site file.
    say: called with a warning if sacct does not work, or Slurm does not answer.
    env: environment of Slurm's commands.
    has_answered: whether a query has succeeded.
    """

    def __init__(
        self, site: Mapping[str, str], say: Callable[[str], None], env: Mapping[str, str] = os.environ,
        answers_s: float = ANSWERS_S,
    ) -> None:  # fmt: skip
        """answers_s: timeout in seconds for each command of Slurm."""
        self._site, self._say, self._env, self._answers_s = site, say, dict(env), answers_s
        self._has_accounting = True
        self.has_answered = False
        self._is_disabled = False

    @property
    def is_here(self) -> bool:
        """Whether this machine has Slurm's command scontrol, and `disable` was not called."""
        return not self._is_disabled and shutil.which("scontrol", path=self._env.get("PATH")) is not None

    def disable(self, problem: LaunchError) -> None:
        """Makes `is_here` False from now on, and prints `problem` as the reason."""
        self._is_disabled = True
        self._say(f"{problem}; showing only local runs, which no scheduler started")

    def jobs(self, user: str | None = None, max_age_s: float = 86400.0, ids: Sequence[str] = ()) -> list[Job]:
        """Returns a user's jobs that wait, run, or ended in the last `max_age_s` seconds, the oldest first.

        user: None for the current user. ids: numbers of jobs to return instead, of any user and age.
        Raises LaunchError if Slurm does not answer.
        """
        user = user or getpass.getuser()
        jobs = self._sacct_jobs(user, max_age_s, ids) if self._has_accounting else None
        if jobs is None:
            jobs = self._scontrol_jobs(user, max_age_s, ids)
        elif missing := [number for number in ids if not any(job.is_called(number) for job in jobs)]:
            jobs += self._scontrol_jobs(user, max_age_s, missing)  # sacct shows a new job seconds late
        self.has_answered = True
        return [self._with_log(job) for job in sorted(jobs, key=lambda job: (job.submit_time or 0.0, job.id))]

    def job(self, number: str) -> Job | None:
        """Returns the job with this number; None if Slurm does not know it, or no longer knows it."""
        return next(iter(self.jobs(ids=[number])), None)

    def cancel(self, numbers: Sequence[str]) -> None:
        """Cancels the jobs of these numbers with scancel. Raises LaunchError with the message of scancel."""
        done = self._run("scancel", *numbers)
        if done.returncode or "error" in done.stderr:
            raise LaunchError(f"scancel {shlex.join(numbers)}: {done.stderr.strip()}")

    def _sacct_jobs(self, user: str, max_age_s: float, ids: Sequence[str]) -> list[Job] | None:
        """Returns jobs as sacct lists them; None, with a message, if sacct is missing, fails or does not
        answer.

        ids: numbers of jobs; []: the jobs of `user` from the last `max_age_s` seconds."""
        selection = f"--jobs={','.join(ids)}" if ids else f"--user={user}"
        start_option = [] if ids else [f"--starttime=now-{int(max_age_s)}seconds"]
        command = (
            "sacct",
            "-X",
            "-P",
            "-n",
            f"--delimiter={_SEPARATOR}",
            f"--format={_FIELDS}",
            selection,
            *start_option,
        )
        try:
            done = self._run(*command)
        except FileNotFoundError:
            reason = "is not installed here"
        except SilentError:
            reason = f"does not answer within {self._answers_s:g} s (--answers-within)"
        else:
            if not done.returncode:
                rows = (line.split(_SEPARATOR) for line in done.stdout.splitlines())
                jobs = [job for row in rows if (job := _parse_sacct(row)) is not None]
                return self._with_queue(jobs, self._queue(selection), user, 0.0 if ids else time.time() - max_age_s)
            reason = (done.stderr.strip().splitlines() or [f"ended with code {done.returncode}"])[0]
        self._has_accounting = False
        self._say(f"sacct: {reason}; using scontrol instead, which forgets jobs minutes after they end")
        return None

    def _queue(self, selection: str) -> dict[str, str]:
        """Returns the reason to wait of each job that squeue shows, by job number; {} if it shows none.

        selection: option that selects jobs, such as `--user=NAME`."""
        done = self._run("squeue", "--noheader", f"--format=%i{_SEPARATOR}%r", selection)
        return dict(line.split(_SEPARATOR, 1) for line in done.stdout.splitlines() if _SEPARATOR in line)

    def _with_queue(self, jobs: list[Job], queue: Mapping[str, str], user: str, oldest: float) -> list[Job]:
        """Returns sacct's jobs with their reasons to wait, and queued jobs that sacct does not show.

        sacct omits jobs that are held or not due yet, and lists new jobs seconds late. queue: reasons by job
        number, from squeue. oldest: jobs that ended before this time (seconds since 1970) are left out.
        """
        absent = {number.partition("_")[0] for number in queue.keys() - {job.id for job in jobs}}
        added = self._scontrol_jobs(user, 0.0, sorted(absent)) if absent else []
        jobs = [
            replace(job, reason=queue.get(job.id, "")) for job in jobs if job.is_active or (job.end_time or 0) >= oldest
        ]
        return [*jobs, *(job for job in added if job.id not in {sacct_job.id for sacct_job in jobs})]

    def _scontrol_jobs(self, user: str, max_age_s: float, ids: Sequence[str]) -> list[Job]:
        outputs = []
        for words in [[number] for number in ids] or [[]]:
            done = self._run("scontrol", "show", "job", *words)
            if done.returncode and not ids:
                raise LaunchError(f"scontrol show job: {done.stderr.strip() or done.stdout.strip()}")
            outputs += done.stdout.split("\n\n") if not done.returncode else []
        jobs = [parse_scontrol(text) for text in outputs if "JobId=" in text]
        oldest = time.time() - max_age_s
        return [job for job in jobs if ids or job.user == user and (job.is_active or (job.end_time or 0) >= oldest)]

    def _with_log(self, job: Job) -> Job:
        """Returns the job with the path of its log in `log`.

        The path comes from Slurm while it knows the job, else from the submit command or the site's log
        folder. If the log's first lines say that it continues in another file, the path is that file.
        """
        candidates: list[Path] = [job.log] if job.log is not None else []
        if job.log is None and job.is_active and job.state not in PENDING:
            done = self._run("scontrol", "show", "job", job.id)
            if not done.returncode:
                live = parse_scontrol(done.stdout)
                job = replace(job, reason=live.reason, command=job.command or live.command)
                candidates += [live.log] if live.log is not None else []
        candidates += _requested_log(job)
        name = f"{job.name}-{job.id}.out"
        if folder := self._site.get("NEOX_LOG_DIR"):
            candidates.append(job.work_dir / folder / name)
        candidates += [job.work_dir / "logs" / name, job.work_dir / f"slurm-{job.id}.out"]
        log = next((path for path in candidates if path.is_file()), candidates[0])
        return replace(job, log=continued_log(log))

    def _run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        with subprocess.Popen(
            command, env={**self._env, **_EPOCH}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
        ) as process:  # fmt: skip
            try:
                out, err = process.communicate(timeout=self._answers_s)
            except BaseException as problem:
                os.killpg(process.pid, signal.SIGKILL)  # also kills a wrapper's children, which hold the pipes open
                if isinstance(problem, subprocess.TimeoutExpired):
                    reason = f"Slurm does not answer within {self._answers_s:g} s (--answers-within)"
                    raise SilentError(f"{shlex.join(command)}: {reason}") from None
                raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)


def continued_log(log: Path) -> Path:
    """Returns the file in which a log continues, if one of its first lines names it; else `log` itself."""
    try:
        with open_file(log) as file:
            match = _CONTINUED.search(file.read(4096))
    except OSError:
        return log
    return Path(os.fsdecode(match[1])) if match is not None else log


def parse_scontrol(text: str) -> Job:
    """Parses the entry of one job in the output of `scontrol show job`, whose times are seconds since
    1970."""

    def field(name: str) -> str:
        match = re.search(rf"\b{name}=(\S*)", text)
        return match[1] if match is not None else ""

    log, number, task = to_end_of_line("StdOut", text), field("JobId"), field("ArrayTaskId")
    if task:
        number = f"{field('ArrayJobId')}_{task if task.isdecimal() else f'[{task}]'}"  # as squeue and sacct write it
    return Job(
        number, to_end_of_line("JobName", text), field("UserId").partition("(")[0], field("JobState"),
        _time(field("SubmitTime")), _time(field("StartTime")), _time(field("EndTime")), field("ExitCode"),
        _nodes(field("NumNodes")), field("NodeList"), Path(to_end_of_line("WorkDir", text)),
        to_end_of_line("Command", text), Path(log) if log else None, field("Reason"),
    )  # fmt: skip


def _parse_sacct(row: Sequence[str]) -> Job | None:
    """Parses one line of sacct's output, split into fields; None if its accounting record is still
    incomplete."""
    if len(row) != len(_FIELDS.split(",")):
        return None
    number, name, user, state, code, submit_time, start_time, end_time, nodes, node_list, work_dir, command = row
    if not work_dir:
        return None
    word = (state.split() or ["UNKNOWN"])[0]  # `CANCELLED by 1000`
    return Job(
        number, name, user, word, _time(submit_time), _time(start_time), _time(end_time), code, _nodes(nodes),
        node_list, Path(work_dir), command,
    )  # fmt: skip


def _time(text: str) -> float | None:
    return float(text) if re.fullmatch(r"[0-9]{1,10}", text) else None


def _nodes(text: str) -> int:
    """Parses a job's number of nodes; a range such as `2-4` (of a waiting job) gives its minimum."""
    minimum = re.match(r"[0-9]{1,9}", text)
    return int(minimum[0]) if minimum is not None else 1


def _requested_log(job: Job) -> list[Path]:
    """Returns [path of the log] from the last -o or --output of the job's sbatch command; [] without one."""
    try:
        words = shlex.split(job.command)
    except ValueError:
        return []
    logs: list[Path] = []
    array, _, task = job.id.partition("_")
    values = {"x": job.name, "j": job.id, "A": array, "a": task, "u": job.user, "%": "%"}
    for word, following in pairwise([*words, ""]):
        match = re.match(r"(?:--output=|-o(?=.))(.+)", word)
        pattern = match[1] if match is not None else following if word in ("-o", "--output") else None
        if pattern is not None:
            logs = [job.work_dir / re.sub(r"%([xjAau%])", lambda match: values[match[1]], pattern)]
        if word.endswith(".sbatch"):
            break
    return logs
