"""Reads and writes pipeline_state.json (the progress of a pipeline), overrides, and the lock of its
folder."""

import errno
import fcntl
import getpass
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from megatron.data.files import sync, write_json
from megatron.pipelines.errors import PipelineError, cannot_write

STATE, OVERRIDES, LOCK = "pipeline_state.json", "overrides.jsonl", ".pipeline.lock"
_VERSION = 1
_PATIENCE_S = 600.0  # for what a killed pipeline has left running: it is told to save and end
# What a stage is doing or has come to.
WAITING, RUNNING, STOPPED, FAILED = "waiting", "running", "stopped", "failed"
REFUSED, DONE, PROMOTED = "refused", "done", "promoted"


@dataclass(frozen=True)
class StageRecord:
    """The record of one stage in pipeline_state.json.

    status: waiting, running, stopped, failed, refused (by its gate), done (a finished data stage) or
        promoted.
    inputs: what the result of the current attempt depends on, by name.
    weights: the result: `checkpoint` (relative to the pipeline's folder) and `sha256`.
    commands: digests of the finished commands of a data stage.
    evaluation: `id`, a digest of the weights and the evaluation's settings, and `scores`, the file of scores.
    verdict: file of the newest verdict.
    promoted: `sha256`, `verdict`, `time`, `requirements` (digest of the gate), and `override` if one was
        needed.
    reason: why the stage failed.
    retired: `folder`, `inputs`, `weights` and `evaluation` of earlier attempts.
    previous: `inputs`, `weights` and `evaluation` of the run before its training was made longer.
    outputs: digests of the files that a data stage's commands wrote.
    options: command-line options of the last run (`Options`).
    job: number of its Slurm job.
    started, ended: seconds since 1970.
    seconds: duration of its commands, over all starts.
    """

    status: str = WAITING
    inputs: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[str, str] = field(default_factory=dict)
    commands: tuple[str, ...] = ()
    evaluation: Mapping[str, str] = field(default_factory=dict)
    verdict: str | None = None
    promoted: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    retired: tuple[Mapping[str, Any], ...] = ()
    previous: Mapping[str, Any] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    job: str | None = None
    started: float | None = None
    ended: float | None = None
    seconds: float = 0.0


class State:
    """The records of all stages of a pipeline, kept in pipeline_state.json, which is replaced atomically.

    file: the name of the pipeline's file; None before the first run.
    """

    def __init__(self, folder: Path) -> None:
        """Reads pipeline_state.json in `folder`, if it exists. Raises PipelineError if it cannot be read."""
        self._path = folder / STATE
        self._stages: dict[str, StageRecord] = {}
        self.file: str | None = None
        try:
            raw = json.loads(self._path.read_text(encoding="utf-8"))
            if raw["version"] != _VERSION:
                raise PipelineError(f"{self._path}: has version {raw['version']}, but this program reads {_VERSION}")
            for name, values in raw["stages"].items():
                lists = {key: tuple(values[key]) for key in ("commands", "retired")}
                self._stages[name] = StageRecord(**{**values, **lists})
            self.file = str(raw["file"]) if raw["file"] is not None else None
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
            raise PipelineError(f"{self._path}: cannot be read ({problem}); restore the file") from None

    @property
    def exists(self) -> bool:
        """Returns whether the pipeline was ever started."""
        return self._path.is_file()

    def __getitem__(self, stage: str) -> StageRecord:
        return self._stages.get(stage, StageRecord())

    def update(self, stage: str, **changes: Any) -> None:
        """Changes fields of a stage's record, and writes pipeline_state.json."""
        self._stages[stage] = replace(self[stage], **changes)
        self.write()

    def write(self) -> None:
        """Writes the records to pipeline_state.json. Raises PipelineError if it cannot be written."""
        stages = {name: asdict(record) for name, record in self._stages.items()}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._path, {"version": _VERSION, "file": self.file, "stages": stages})
        except OSError as problem:
            raise cannot_write(self._path, problem) from None


@dataclass(frozen=True)
class Override:
    """One line of overrides.jsonl: a person promoted weights that a gate had refused. Lines are only
    appended.

    by: USER@HOST.
    sha256: digest of the promoted weights.
    requirements: digest of the gate at that time.
    baseline: SHA-256 of the weights that the gate compared with.
    verdict: file of the overridden verdict.
    """

    stage: str
    reason: str
    by: str
    time: float
    sha256: str
    requirements: str
    baseline: str | None
    verdict: str


def read_overrides(folder: Path) -> list[Override]:
    """Returns all overrides of a pipeline, the oldest first. Raises PipelineError for a damaged line."""
    path = folder / OVERRIDES
    if not path.is_file():
        return []
    overrides = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            overrides.append(Override(**json.loads(line)))
        except (ValueError, TypeError):
            raise PipelineError(f"{path}:{number}: is not a valid override; restore the line") from None
    return overrides


def add_override(folder: Path, verdict: Mapping[str, Any], reason: str) -> None:
    """Appends a line to overrides.jsonl: the overridden verdict, the reason, the user and the time."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a number without a name, as in containers
        user = f"uid {os.getuid()}"
    baseline = (verdict["baseline"] or {}).get("weights_sha256")
    override = Override(
        verdict["stage"], reason, f"{user}@{socket.gethostname()}", time.time(), verdict["weights_sha256"],
        verdict["requirements"], baseline, verdict["file"],
    )  # fmt: skip
    path = folder / OVERRIDES
    line = (json.dumps(asdict(override)) + "\n").encode()
    try:
        with path.open("ab", buffering=0) as file:
            offset = file.tell()
            if file.write(line) != len(line):
                file.truncate(offset)  # half a line would be an override that nobody can read
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(path)
    except OSError as problem:
        raise cannot_write(path, problem) from None


@contextmanager
def locked(folder: Path, say: Callable[[str], None]) -> Iterator[IO[str]]:
    """Holds the lock of a pipeline within the block. Yields the lock file, which child processes inherit.

    The lock is free once this process and all processes that inherited the file have ended. If the holder was
    killed, its children may still save and end, and this call waits for them.

    Raises PipelineError if another process runs the pipeline (in a Slurm job only after 10 minutes), or if
    children of a killed holder do not end in 10 minutes.
    """
    try:
        file = (folder / LOCK).open("a+", encoding="utf-8")
    except OSError as problem:
        raise cannot_write(folder / LOCK, problem) from None
    in_job = os.environ.get("SLURM_JOB_ID") is not None
    start, reported = time.monotonic(), False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            file.seek(0)
            holder = _holder(file.read())
            holder_text = f"process {holder.get('pid')} on {holder.get('host')}"
            holder_text += f", job {holder['job']}" if holder.get("job") else ""
            is_alive = holder.get("host") != socket.gethostname() or _is_alive(holder.get("pid"))
            # A job waits for a command that somebody has just typed, and for the lock of a node that is gone.
            if time.monotonic() - start > (_PATIENCE_S if in_job or not is_alive else 0.0):
                file.close()
                if is_alive:
                    raise PipelineError(
                        f"{folder}: another process runs this pipeline; wait for {holder_text}"
                    ) from None
                raise PipelineError(
                    f"{folder}: {holder_text} has ended, but processes it started still run; `fuser {folder / LOCK}` "
                    "lists them"
                ) from None
            if not reported:
                note = "" if is_alive else " is gone; what it has left running"
                say(f"{holder_text}{note} is waited for")
                reported = True
            time.sleep(0.2)
        except OSError as problem:
            file.close()
            raise PipelineError(f"{folder}: its disk has no file locks ({problem.strerror}); use another") from None
    try:
        own_job = os.environ.get("SLURM_JOB_ID")
        own_record = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "job": own_job}) + "\n"
        try:
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), own_record.encode())
        except OSError as problem:  # the lock holds without it
            say(f"warning: {folder / LOCK}: does not say who holds it ({problem.strerror})")
        yield file
    finally:
        file.close()


def is_locked(folder: Path) -> bool:
    """Returns whether a process holds the lock of the pipeline, so that the pipeline is running."""
    try:
        with (folder / LOCK).open("r+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except OSError:
        return False


def _holder(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _is_alive(pid: Any) -> bool:
    try:
        os.kill(int(pid), 0)
    except (OSError, TypeError, ValueError):
        return False
    return True
