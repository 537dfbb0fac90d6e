"""Runs that no scheduler started, by the status.json that each keeps in its `save`."""

import fcntl
import os
import pwd
import signal
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron.launch.environment import LaunchError
from megatron.operations.jobs.scheduler import Job
from megatron.operations.jobs.verdict import GONE, UNREADABLE
from megatron.operations.run_folder import RunFolder, RunFolderError, open_run
from megatron.process.run_files import STATUS

_DEPTH = ("*", "*/*")  # of the folders of runs below that of checkpoints
_FLOCK = "hhqqi4x"  # struct flock of Linux


def find_runs(root: Path, since_s: float) -> list[Job]:
    """The runs below a folder of checkpoints that go on here, or have written or ended in the last `since_s`
    seconds, the oldest first; those that Slurm started are left to it."""
    recent, runs = time.time() - since_s, []
    for path in sorted({path for depth in _DEPTH for path in root.glob(f"{depth}/{STATUS}")}):
        with suppress(RunFolderError, OSError):  # it was removed a moment ago
            folder = open_run(path.parent)
            status = folder.status()
            if status.get("job") is None:
                run = _job(path.parent, folder, status)
                # Of one on another machine, which may have died unseen, the last word is all that is known.
                if (run.is_active and is_here(status)) or _written(run, path) >= recent:
                    runs.append(run)
    return sorted(runs, key=lambda run: run.started or 0.0)


def local_run(folder: Path) -> Job:
    """The run that a folder holds. Raises RunFolderError where it holds none."""
    run = open_run(folder)
    if run.save is None or not (run.save / STATUS).exists():
        raise RunFolderError(f"{folder}: there is no {STATUS}, which a run writes into `save` before its first step")
    return _job(run.save, run, run.status())


def stop(run: Job) -> None:
    """Let a run of this machine finish its step, save and end. Raises LaunchError where that cannot be asked
    for from here."""
    assert run.save is not None
    status = open_run(run.save).status()
    if not run.is_active or not is_here(status):
        where = f"on host {status.get('host')}" if run.is_active else f"it has ended ({status.get('status')})"
        raise LaunchError(f"{run.id}: cannot be stopped from here: {where}")
    # The number in the file may be another program's by now; who holds the lock trains there.
    holder = lock_holder(run.save) or 0
    pid = status["launcher_pid"] if launcher_is_alive(status) else holder if holder > 0 else status.get("pid")
    if pid is None:
        raise LaunchError(f"{run.id}: cannot be stopped: {run.save / STATUS} does not say by which process it runs")
    os.kill(pid, signal.SIGTERM)


def is_here(status: Mapping[str, Any]) -> bool:
    """Whether a run was started on this machine."""
    return status.get("host") == socket.gethostname()


def lock_holder(save: Path) -> int | None:
    """The process that holds the lock of a folder of checkpoints, by its number; None where none does. It may
    be on another machine (0 or a number of there)."""
    try:
        with (save / ".lock").open("rb+") as file:
            asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
    except OSError:
        return None
    return None if kind == fcntl.F_UNLCK else pid


def launcher_is_alive(status: Mapping[str, Any]) -> bool:
    """Whether the deepy.py that started a run of this machine is there: it may start the ranks again."""
    try:
        words = Path(f"/proc/{status.get('launcher_pid') or 0}/cmdline").read_bytes()
    except OSError:
        return False
    return b"deepy.py" in words


def _written(run: Job, status: Path) -> float:
    """When a run last wrote anything, in seconds of the clock."""
    return max(path.stat().st_mtime for path in (status, run.log) if path is not None and path.exists())


def _job(save: Path, run: RunFolder, status: Mapping[str, Any]) -> Job:
    shown = os.path.relpath(save)
    log = run.logs / "rank_0.log"
    at = _seconds(status)
    state = _state(save, status)
    return Job(
        shown if not shown.startswith("..") else str(save), save.name, user_name(save.stat().st_uid), state, started=at,
        submitted=at, ended=at if state not in ("RUNNING",) else None, work_dir=Path.cwd(),
        log=log if log.is_file() else run.metrics_file, save=save, local=True,
    )  # fmt: skip


def _state(save: Path, status: Mapping[str, Any]) -> str:
    """The word that Slurm would have. Of a run of another machine nothing is known but its own last word."""
    said = status.get("status")
    if said is None:  # the file cannot be read, or does not say it: whether it ended well is not known
        return "RUNNING" if lock_holder(save) is not None else UNREADABLE
    if is_here(status):
        alive = lock_holder(save) is not None
        if launcher_is_alive(status) and said in ("running", "failed"):
            return "RUNNING"
        if said == "running" and not alive:
            return GONE
    return {"running": "RUNNING", "failed": "FAILED"}.get(said, "COMPLETED")


def user_name(number: int) -> str:
    """The name of a user; the number where it has none, as in a container."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _seconds(status: Mapping[str, Any]) -> float | None:
    try:
        return datetime.strptime(str(status.get("time")), "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except ValueError:
        return None
