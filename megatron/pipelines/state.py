"""pipeline_state.json: what has been done in a pipeline, and the lock by which one process works in it."""

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
    """What is known of one stage.

    status: one of the words above; `refused`: by its gate, `done`: a data stage. inputs: what its present
    result was or is made of, by name. weights: of its result: `checkpoint`, relative to the pipeline's
    folder, and `sha256`. evaluation: `id` of what was scored and how, and the file `scores`. commands,
    outputs: of a data stage, digests of the commands that are done and of the files that they made. verdict:
    the file of the newest verdict. promoted: `sha256`, `verdict`, `time`, `requirements`, and `override`
    where one was needed. reason: why it failed. retired: `folder`, `inputs`, `weights` and `evaluation` of
    earlier attempts. previous: the same but `folder` of the run before it was made longer. options: what was
    typed for it. job: of Slurm. started, ended: seconds since 1970; seconds: what its commands took, over all
    starts.
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
    """The records of all stages, in a file that is replaced whole. file: the name of the pipeline's file."""

    def __init__(self, folder: Path) -> None:
        """Read what there is. Raises PipelineError for a file that cannot be read."""
        self._path = folder / STATE
        self._stages: dict[str, StageRecord] = {}
        self.file: str | None = None
        try:
            raw = json.loads(self._path.read_text(encoding="utf-8"))
            if raw["version"] != _VERSION:
                raise PipelineError(f"{self._path}: is of version {raw['version']}, this program reads {_VERSION}")
            for name, values in raw["stages"].items():
                lists = {key: tuple(values[key]) for key in ("commands", "retired")}
                self._stages[name] = StageRecord(**{**values, **lists})
            self.file = str(raw["file"]) if raw["file"] is not None else None
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
            raise PipelineError(f"{self._path}: cannot be read ({problem}); put back the file as it was") from None

    @property
    def exists(self) -> bool:
        """Whether the pipeline was ever begun."""
        return self._path.is_file()

    def __getitem__(self, stage: str) -> StageRecord:
        return self._stages.get(stage, StageRecord())

    def update(self, stage: str, **changes: Any) -> StageRecord:
        """Change fields of a stage's record, and write the file."""
        self._stages[stage] = replace(self[stage], **changes)
        self.write()
        return self._stages[stage]

    def write(self) -> None:
        """Replace the file by what is in memory. Raises PipelineError where the disk does not take it."""
        stages = {name: asdict(record) for name, record in self._stages.items()}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._path, {"version": _VERSION, "file": self.file, "stages": stages})
        except OSError as problem:
            raise cannot_write(self._path, problem) from None


@dataclass(frozen=True)
class Override:
    """One line of overrides.jsonl, which is only ever added to. sha256: of the weights; requirements: a
    digest of the gate as it was; baseline: of the weights that it compared with; verdict: its file."""

    stage: str
    reason: str
    by: str
    time: float
    sha256: str
    requirements: str
    baseline: str | None
    verdict: str


def read_overrides(folder: Path) -> list[Override]:
    """All overrides that were ever given in a pipeline. Raises PipelineError for a line that is damaged."""
    path = folder / OVERRIDES
    if not path.is_file():
        return []
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            found.append(Override(**json.loads(line)))
        except (ValueError, TypeError):
            raise PipelineError(f"{path}:{number}: is no override; put the line back as it was") from None
    return found


def add_override(folder: Path, verdict: Mapping[str, Any], reason: str) -> Override:
    """Record for ever that a person lets a verdict's weights pass, with who it was and when."""
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
            begun = file.tell()
            if file.write(line) != len(line):
                file.truncate(begun)  # half a line would be an override that nobody can read
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(path)
    except OSError as problem:
        raise cannot_write(path, problem) from None
    return override


@contextmanager
def locked(folder: Path, say: Callable[[str], None]) -> Iterator[IO[str]]:
    """Hold a pipeline for this process and what it starts with the lock's file open.

    The lock ends when all of them have. A pipeline that was killed leaves commands behind that are told to
    save and end: they are waited for. Raises PipelineError where another pipeline goes on."""
    try:
        file = (folder / LOCK).open("a+", encoding="utf-8")
    except OSError as problem:
        raise cannot_write(folder / LOCK, problem) from None
    in_job = os.environ.get("SLURM_JOB_ID") is not None
    begun, said = time.monotonic(), False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            file.seek(0)
            holder = _holder(file.read())
            where = f"process {holder.get('pid')} on {holder.get('host')}"
            where += f", job {holder['job']}" if holder.get("job") else ""
            is_alive = holder.get("host") != socket.gethostname() or _is_alive(holder.get("pid"))
            # A job waits for a command that somebody has just typed, and for the lock of a node that is gone.
            if time.monotonic() - begun > (_PATIENCE_S if in_job or not is_alive else 0.0):
                file.close()
                if is_alive:
                    raise PipelineError(f"{folder}: another process works in this pipeline ({where})") from None
                raise PipelineError(
                    f"{folder}: {where} is gone, but what it started does not end; `fuser {folder / LOCK}` names it"
                ) from None
            if not said:
                gone = "" if is_alive else " is gone; what it has left running"
                say(f"{where}{gone} is waited for")
                said = True
            time.sleep(0.2)
        except OSError as problem:
            file.close()
            raise PipelineError(f"{folder}: its file system takes no locks ({problem.strerror})") from None
    try:
        own_job = os.environ.get("SLURM_JOB_ID")
        ours = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "job": own_job}) + "\n"
        try:
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), ours.encode())
        except OSError as problem:  # the lock holds without it
            say(f"warning: {folder / LOCK}: does not say who holds it ({problem.strerror})")
        yield file
    finally:
        file.close()


def is_locked(folder: Path) -> bool:
    """Whether some process works in a pipeline now."""
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
