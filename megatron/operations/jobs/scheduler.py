"""What Slurm says of jobs: by sacct, and by scontrol where there is no accounting."""

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
from megatron.process.run_files import open_file

BATCH_FILE = "pretrain_neox.sbatch"
PENDING = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"})
RUNNING = frozenset({"RUNNING", "CONFIGURING", "COMPLETING", "STAGE_OUT", "SIGNALING", "STOPPED", "RESIZING"})
SUSPENDED = "SUSPENDED"
NO_LOG = "0:53"
"""Slurm's exit code of a job whose log it could not open."""
_GOES_ON = re.compile(rb"^The log goes on in (.+)$", re.MULTILINE)  # slurm/job.sh, within the first lines
_FIELDS = "JobID,JobName,User,State,ExitCode,Submit,Start,End,NNodes,NodeList,WorkDir,SubmitLine"
_EPOCH = {"SLURM_TIME_FORMAT": "%s"}  # seconds since 1970
_SEPARATOR = "\x1f"
ANSWERS_S = 15.0
"""How long a table waits for a command of Slurm; where sacct is silent the queue may answer all the same."""
PATIENT_S = 120.0
"""How long `submit` does, which has a job to see through."""


class SilentError(LaunchError):
    """A command of Slurm that does not answer."""


@dataclass(frozen=True)
class Job:
    """A job of Slurm, or a run of this machine (`local`), whose number is then the path of its folder.

    state: Slurm's word. submitted, started, ended: seconds since 1970. command: what was submitted. log:
    where its output is. reason: why it waits. save: its folder of checkpoints, where that is known without
    the log.
    """

    id: str
    name: str
    user: str
    state: str
    submitted: float | None = None
    started: float | None = None
    ended: float | None = None
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
        """Whether it waits or runs."""
        return self.state in PENDING or self.state in RUNNING or self.state == SUSPENDED

    def is_called(self, number: str) -> bool:
        """Whether this is the job of that number, or one of its array."""
        return self.id == number or self.id.startswith(f"{number}_")

    @property
    def trains(self) -> bool:
        """Whether it was submitted by the batch file of training, or bears its name."""
        return self.local or BATCH_FILE in self.command or self.name.startswith("neox-training")


class Slurm:
    """The jobs of this machine's Slurm. say: is told once which of Slurm's commands are used, where it is not
    sacct. site: variables of the site file. has_answered: whether it ever did."""

    def __init__(
        self,
        site: Mapping[str, str],
        say: Callable[[str], None],
        env: Mapping[str, str] = os.environ,
        answers_s: float = ANSWERS_S,
    ) -> None:
        """answers_s: how long each command of Slurm may take."""
        self._site, self._say, self._env, self._answers_s = site, say, dict(env), answers_s
        self._has_accounting = True
        self.has_answered = False
        self._is_left_out = False

    @property
    def is_here(self) -> bool:
        """Whether this machine can ask Slurm at all."""
        return not self._is_left_out and shutil.which("scontrol", path=self._env.get("PATH")) is not None

    def do_without(self, problem: LaunchError) -> None:
        """From here on this machine is taken for one without Slurm, which is said."""
        self._is_left_out = True
        self._say(f"{problem}; only runs that no scheduler started are shown")

    def jobs(self, user: str | None = None, since_s: float = 86400.0, ids: Sequence[str] = ()) -> list[Job]:
        """Jobs of a user (None: of whoever asks) that wait, run, or have ended in the last `since_s` seconds;
        or those of `ids`, whenever they were. The oldest first. Raises LaunchError where Slurm does not
        answer."""
        user = user or getpass.getuser()
        jobs = self._by_sacct(user, since_s, ids) if self._has_accounting else None
        if jobs is None:
            jobs = self._by_scontrol(user, since_s, ids)
        elif new := [number for number in ids if not any(job.is_called(number) for job in jobs)]:
            jobs += self._by_scontrol(user, since_s, new)  # accounts come a moment late
        self.has_answered = True
        return [self._with_log(job) for job in sorted(jobs, key=lambda job: (job.submitted or 0.0, job.id))]

    def job(self, number: str) -> Job | None:
        """One job; None for a number that Slurm does not know (any more)."""
        return next(iter(self.jobs(ids=[number])), None)

    def cancel(self, numbers: Sequence[str]) -> None:
        """End jobs. Raises LaunchError with what scancel says."""
        done = self._run("scancel", *numbers)
        if done.returncode or "error" in done.stderr:
            raise LaunchError(f"scancel {shlex.join(numbers)}: {done.stderr.strip()}")

    def _by_sacct(self, user: str, since_s: float, ids: Sequence[str]) -> list[Job] | None:
        """None where there is no accounting."""
        listed, chosen = f"--user={user}", [f"--user={user}", f"--starttime=now-{int(since_s)}seconds"]
        if ids:
            listed = "--jobs=" + ",".join(ids)
            chosen = [listed]
        command = ("sacct", "-X", "-P", "-n", f"--delimiter={_SEPARATOR}", f"--format={_FIELDS}", *chosen)
        try:
            done = self._run(*command)
        except FileNotFoundError:
            reason = "there is no sacct"
        except SilentError:
            reason = f"does not answer within {self._answers_s:g} s (--answers-within)"
        else:
            if not done.returncode:
                rows = [line.split(_SEPARATOR) for line in done.stdout.splitlines()]
                jobs = [
                    job for row in rows if len(row) == len(_FIELDS.split(",")) and (job := _of_sacct(row)) is not None
                ]
                return self._with_queue(jobs, self._queue(listed), user, 0.0 if ids else time.time() - since_s)
            reason = (done.stderr.strip().splitlines() or [f"ended with code {done.returncode}"])[0]
        self._has_accounting = False
        self._say(f"sacct: {reason}; scontrol is asked, which forgets jobs minutes after their end")
        return None

    def _queue(self, chosen: str) -> dict[str, str]:
        """The jobs that squeue shows, and why each waits; {} where it knows none of them."""
        done = self._run("squeue", "--noheader", f"--format=%i{_SEPARATOR}%r", chosen)
        return dict(line.split(_SEPARATOR, 1) for line in done.stdout.splitlines() if _SEPARATOR in line)

    def _with_queue(self, jobs: list[Job], queue: Mapping[str, str], user: str, recent: float) -> list[Job]:
        """The jobs of sacct that are recent, with the reasons why they wait, and those of the queue that it
        does not show: it leaves out what is held or not due yet, and hears of the others seconds late."""
        absent = {number.partition("_")[0] for number in queue.keys() - {job.id for job in jobs}}
        added = self._by_scontrol(user, 0.0, sorted(absent)) if absent else []
        jobs = [
            replace(job, reason=queue.get(job.id, "")) for job in jobs if job.is_active or (job.ended or 0) >= recent
        ]
        return [*jobs, *(job for job in added if job.id not in {one.id for one in jobs})]

    def _by_scontrol(self, user: str, since_s: float, ids: Sequence[str]) -> list[Job]:
        shown = []
        for words in [[number] for number in ids] or [[]]:
            done = self._run("scontrol", "show", "job", *words)
            if done.returncode and not ids:
                raise LaunchError(f"scontrol show job: {done.stderr.strip() or done.stdout.strip()}")
            shown += done.stdout.split("\n\n") if not done.returncode else []
        jobs = [of_scontrol(text) for text in shown if "JobId=" in text]
        recent = time.time() - since_s
        return [job for job in jobs if ids or job.user == user and (job.is_active or (job.ended or 0) >= recent)]

    def _with_log(self, job: Job) -> Job:
        """The job with its log: as Slurm says while it knows it, else as it was submitted, else in the site's
        folder; followed to where it goes on."""
        candidates: list[Path] = [job.log] if job.log is not None else []
        if job.log is None and job.is_active and job.state not in PENDING:
            done = self._run("scontrol", "show", "job", job.id)
            if not done.returncode:
                live = of_scontrol(done.stdout)
                job = replace(job, reason=live.reason, command=job.command or live.command)
                candidates += [live.log] if live.log is not None else []
        candidates += _asked_for(job)
        name = f"{job.name}-{job.id}.out"
        if folder := self._site.get("NEOX_LOG_DIR"):
            candidates.append(job.work_dir / folder / name)
        candidates += [job.work_dir / "logs" / name, job.work_dir / f"slurm-{job.id}.out"]
        log = next((path for path in candidates if path.is_file()), candidates[0])
        return replace(job, log=goes_on_in(log))

    def _run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        with subprocess.Popen(
            command, env={**self._env, **_EPOCH}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
        ) as process:  # fmt: skip
            try:
                out, err = process.communicate(timeout=self._answers_s)
            except BaseException as problem:
                os.killpg(process.pid, signal.SIGKILL)  # with what a wrapper has started, which holds the pipes
                if isinstance(problem, subprocess.TimeoutExpired):
                    why = f"Slurm does not answer within {self._answers_s:g} s (--answers-within)"
                    raise SilentError(f"{shlex.join(command)}: {why}") from None
                raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)


def goes_on_in(log: Path) -> Path:
    """The file in which the log of a site's job goes on, which its first lines name; else the log itself."""
    try:
        with open_file(log) as file:
            found = _GOES_ON.search(file.read(4096))
    except OSError:
        return log
    return Path(os.fsdecode(found[1])) if found is not None else log


def of_scontrol(text: str) -> Job:
    """A job as `scontrol show job` writes it, with times in seconds."""

    def field(name: str) -> str:
        match = re.search(rf"\b{name}=(\S*)", text)
        return match[1] if match is not None else ""

    def line(name: str) -> str:  # which may hold spaces
        match = re.search(rf"\b{name}=(.*?)\s*$", text, re.MULTILINE)
        return match[1] if match is not None else ""

    log, number, task = line("StdOut"), field("JobId"), field("ArrayTaskId")
    if task:
        number = f"{field('ArrayJobId')}_{task if task.isdecimal() else f'[{task}]'}"  # as squeue and sacct write it
    return Job(
        number, line("JobName"), field("UserId").partition("(")[0], field("JobState"),
        _time(field("SubmitTime")), _time(field("StartTime")), _time(field("EndTime")), field("ExitCode"),
        _nodes(field("NumNodes")),
        field("NodeList"), Path(line("WorkDir")), line("Command"), Path(log) if log else None, field("Reason"),
    )  # fmt: skip


def _of_sacct(row: Sequence[str]) -> Job | None:
    """None for a job of which only a part has come to the accounts."""
    number, name, user, state, code, submitted, started, ended, nodes, node_list, work_dir, command = row
    if not work_dir:
        return None
    word = (state.split() or ["UNKNOWN"])[0]  # `CANCELLED by 1000`
    return Job(
        number, name, user, word, _time(submitted), _time(started), _time(ended), code, _nodes(nodes),
        node_list, Path(work_dir), command,
    )  # fmt: skip


def _time(text: str) -> float | None:
    return float(text) if re.fullmatch(r"[0-9]{1,10}", text) else None


def _nodes(text: str) -> int:
    """A number of nodes, or of a job that waits the least of a range: `2-4`."""
    least = re.match(r"[0-9]{1,9}", text)
    return int(least[0]) if least is not None else 1


def _asked_for(job: Job) -> list[Path]:
    """The log that the line of sbatch names, if it does; the last one counts."""
    try:
        words = shlex.split(job.command)
    except ValueError:
        return []
    found: list[Path] = []
    array, _, task = job.id.partition("_")
    values = {"x": job.name, "j": job.id, "A": array, "a": task, "u": job.user, "%": "%"}
    for word, following in pairwise([*words, ""]):
        match = re.match(r"(?:--output=|-o(?=.))(.+)", word)
        pattern = match[1] if match is not None else following if word in ("-o", "--output") else None
        if pattern is not None:
            found = [job.work_dir / re.sub(r"%([xjAau%])", lambda match: values[match[1]], pattern)]
        if word.endswith(".sbatch"):
            break
    return found
