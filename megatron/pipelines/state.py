"""Reads and writes pipeline_state.json (the progress of a pipeline) and overrides.jsonl, and locks its
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
from megatron.neox_arguments.values.json_text import parse_json
from megatron.pipelines.errors import PipelineError, cannot_write

STATE, OVERRIDES = "pipeline_state.json", "overrides.jsonl"
_VERSION = 1
_PATIENCE_S = 600.0  # seconds to wait for processes that a killed pipeline has left running, which save and end
# Statuses of a stage.
WAITING, RUNNING, STOPPED, FAILED = "waiting", "running", "stopped", "failed"
REFUSED, DONE, PROMOTED = "refused", "done", "promoted"


@dataclass(frozen=True)
class StageRecord:
    """The record of one stage in pipeline_state.json.

    status: waiting, running, stopped, failed, refused (by its gate), done (a finished data stage) or
        promoted.
    inputs: everything that the result of the current attempt depends on, by name.
    weights: the resulting weights: `checkpoint` (path relative to the pipeline's folder) and `sha256`.
    commands: digests of the finished commands of a data stage.
    evaluation: `id`, a digest of the weights and the evaluation's settings, and `scores`, the file of scores.
    verdict: file of the newest verdict.
    promoted: `sha256` of the promoted weights, `verdict`, `time`, `requirements` (digest of the gate), and
        `override`, None if the gate passed.
    reason: why the stage failed or stopped.
    retired: `folder`, `inputs`, `weights` and `evaluation` of earlier attempts.
    previous: `inputs`, `weights` and `evaluation` of the run before it was continued for longer.
    outputs: digests of the files that a data stage's commands wrote.
    options: command-line options of the last run (`Options`).
    job: number of the stage's last Slurm job.
    started, ended: seconds since 1970.
    seconds: total time that the stage ran, over all starts.
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
    """The records of all stages of a pipeline. `state["sft"]` is the record of the stage sft.

    They are kept in pipeline_state.json, which every change replaces atomically.
    file: name of the pipeline's file; None before the first run.
    """

    def __init__(self, folder: Path) -> None:
        """Reads pipeline_state.json in `folder`, if it exists. Raises PipelineError if it cannot be read."""
        self._path = folder / STATE
        self._stages: dict[str, StageRecord] = {}
        self.file: str | None = None
        try:
            raw = parse_json(self._path.read_text(encoding="utf-8"))
            if raw["version"] != _VERSION:
                raise PipelineError(
                    f"{self._path}: has version {raw['version']}, but this program reads only version {_VERSION}"
                )
            for name, values in raw["stages"].items():
                lists = {key: tuple(values[key]) for key in ("commands", "retired")}
                self._stages[name] = StageRecord(**{**values, **lists})
            self.file = str(raw["file"]) if raw["file"] is not None else None
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
            raise PipelineError(
                f"{self._path}: the state of the pipeline cannot be read ({problem}); restore the file from a copy"
            ) from None

    @property
    def exists(self) -> bool:
        """Whether pipeline_state.json exists, so the pipeline was started at least once."""
        return self._path.is_file()

    def __getitem__(self, stage: str) -> StageRecord:
        return self._stages.get(stage, StageRecord())

    def update(self, stage: str, **changes: Any) -> None:
        """Changes fields of a stage's record, and writes pipeline_state.json. changes: new values by
        field."""
        self._stages[stage] = replace(self[stage], **changes)
        self.write()

    def write(self) -> None:
        """Writes the records of all stages to pipeline_state.json. Raises PipelineError if that fails."""
        stages = {name: asdict(record) for name, record in self._stages.items()}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._path, {"version": _VERSION, "file": self.file, "stages": stages})
        except OSError as problem:
            raise cannot_write(self._path, problem) from None


@dataclass(frozen=True)
class Override:
    """One line of overrides.jsonl: a person's decision to promote weights that a gate had refused.

    by: the person, as USER@HOST.
    sha256: digest of the promoted weights.
    requirements: digest of the gate at that time.
    baseline: SHA-256 of the baseline weights with which the gate compared; None without a baseline.
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
    """Reads all overrides of a pipeline from overrides.jsonl, the oldest first.

    Raises PipelineError for a damaged line. folder: the pipeline's folder."""
    path = folder / OVERRIDES
    if not path.is_file():
        return []
    overrides = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            overrides.append(Override(**parse_json(line)))
        except (ValueError, TypeError):
            raise PipelineError(
                f"{path}:{number}: this line is not a valid override; restore or remove the line"
            ) from None
    return overrides


def add_override(folder: Path, verdict: Mapping[str, Any], reason: str) -> None:
    """Appends a line to overrides.jsonl: which verdict this user overrides now, and why."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # the user id has no name, as in a container
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
def locked(folder: Path, say: Callable[[str], None], kind: str = "pipeline") -> Iterator[IO[str]]:
    """Holds the lock of a folder within the block. Yields the open lock file, for child processes to
    inherit.

    The lock is released once this process and all processes that inherited the file have ended. If the
    process that took the lock was killed, its children still hold it while they save and end.

    Raises PipelineError if another process holds it. Before that it waits 10 minutes if this process
    is in a Slurm job, or if the lock is only held by children of a killed process. say: told about the wait.
    kind: what the folder holds; a folder has one lock for each kind.
    """
    path = lock_file(folder, kind)
    try:
        file = path.open("a+", encoding="utf-8")
    except OSError as problem:
        raise cannot_write(path, problem) from None
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
            # A Slurm job waits for a short command that a person has typed, and for the lock of a crashed
            # node.
            if time.monotonic() - start > (_PATIENCE_S if in_job or not is_alive else 0.0):
                file.close()
                if is_alive:
                    raise PipelineError(
                        f"{folder}: another process runs this {kind}; wait until it ends: {holder_text}"
                    ) from None
                raise PipelineError(
                    f"{folder}: {holder_text} has ended, but processes that it started still run; list them with "
                    f"`fuser {path}`, and end them"
                ) from None
            if not reported:
                note = "" if is_alive else ", or rather the processes that it left running,"
                say(f"waiting until {holder_text}{note} has ended")
                reported = True
            time.sleep(0.2)
        except OSError as problem:
            file.close()
            raise PipelineError(
                f"{folder}: its file system supports no file locks ({problem.strerror}); use a folder on another one"
            ) from None
    try:
        own_job = os.environ.get("SLURM_JOB_ID")
        own_record = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "job": own_job}) + "\n"
        try:
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), own_record.encode())
        except OSError as problem:  # the lock works even if the file does not say who holds it
            say(f"warning: cannot write into {path} which process holds the lock ({problem.strerror})")
        yield file
    finally:
        file.close()


def lock_file(folder: Path, kind: str = "pipeline") -> Path:
    """Returns the lock file of a folder that holds a pipeline, or something else of the kind `kind`."""
    return folder / f".{kind}.lock"


def is_locked(folder: Path, kind: str = "pipeline") -> bool:
    """Returns whether a process holds the lock of the pipeline in `folder`, which means that it is
    running."""
    try:
        with lock_file(folder, kind).open("r+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except OSError:
        return False


def _holder(text: str) -> dict[str, Any]:
    try:
        value = parse_json(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _is_alive(pid: Any) -> bool:
    try:
        os.kill(int(pid), 0)
    except (OSError, TypeError, ValueError):
        return False
    return True
