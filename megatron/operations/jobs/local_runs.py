"""Finds runs on this machine that no scheduler started, by the status.json in each run's `save` folder."""

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
from megatron.operations.jobs.verdict import DIED_SILENTLY, UNREADABLE
from megatron.operations.run_folder import RunFolder, RunFolderError, open_run
from megatron.process.run_files import STATUS

_DEPTH = ("*", "*/*")  # runs are looked for one and two levels below the folder of checkpoints
_FLOCK = "hhqqi4x"  # layout of Linux's `struct flock`


def find_runs(root: Path, max_age_s: float) -> list[Job]:
    """Returns the recent runs below the folder of checkpoints `root`, the oldest first, without Slurm's runs.

    A run is recent if it is running on this machine, or wrote its log or status in the last `max_age_s`
    seconds."""
    oldest, runs = time.time() - max_age_s, []
    for path in sorted({path for depth in _DEPTH for path in root.glob(f"{depth}/{STATUS}")}):
        with suppress(RunFolderError, OSError):  # the folder was removed in the meantime
            folder = open_run(path.parent)
            status = folder.status()
            if status.get("job") is None:
                run = _job(path.parent, folder, status)
                # Of a run on another machine only the last status is known; the run may have been killed
                # since.
                if (run.is_active and is_here(status)) or _written(run, path) >= oldest:
                    runs.append(run)
    return sorted(runs, key=lambda run: run.start_time or 0.0)


def local_run(folder: Path) -> Job:
    """Returns the run whose `save`, log folder or metrics.jsonl is `folder`, as a job.

    Raises RunFolderError if there is no run, or its `save` has no status.json."""
    run = open_run(folder)
    if run.save is None or not (run.save / STATUS).exists():
        raise RunFolderError(
            f"{folder}: the run has no {STATUS} in its folder `save`; a run writes the file before its first step, so "
            "wait, or check the path"
        )
    return _job(run.save, run, run.status())


def stop(run: Job) -> None:
    """Asks a run of this machine to finish its step, save and end (SIGTERM).

    Raises LaunchError if the run has ended, is on another machine, or its process is unknown."""
    assert run.save is not None
    status = open_run(run.save).status()
    if not run.is_active or not is_here(status):
        reason = f"it runs on host {status.get('host')}" if run.is_active else f"it has ended ({status.get('status')})"
        raise LaunchError(f"{run.id}: cannot be stopped from here: {reason}")
    # The pid in the file may belong to another program by now; the process with the lock is the run.
    holder = lock_holder(run.save) or 0
    pid = status["launcher_pid"] if launcher_is_alive(status) else holder if holder > 0 else status.get("pid")
    if pid is None:
        raise LaunchError(f"{run.id}: cannot be stopped: {run.save / STATUS} does not name the run's process")
    os.kill(pid, signal.SIGTERM)


def is_here(status: Mapping[str, Any]) -> bool:
    """Returns whether the host in a run's status.json is this machine."""
    return status.get("host") == socket.gethostname()


def lock_holder(save: Path) -> int | None:
    """Returns the id of the process that locks a folder of checkpoints; None if the folder is not locked.

    If the process runs on another machine, the result is 0 or a process id of that machine.
    """
    try:
        with (save / ".lock").open("rb+") as file:
            query = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, query))
    except OSError:
        return None
    return None if kind == fcntl.F_UNLCK else pid


def launcher_is_alive(status: Mapping[str, Any]) -> bool:
    """Returns whether the deepy.py that launched a local run is alive; if so, it may restart ranks that
    ended.

    status: the run's status.json."""
    try:
        words = Path(f"/proc/{status.get('launcher_pid') or 0}/cmdline").read_bytes()
    except OSError:
        return False
    return b"deepy.py" in words


def _written(run: Job, status: Path) -> float:
    """Returns the time at which a run last wrote its status file or log, in seconds since 1970."""
    return max(path.stat().st_mtime for path in (status, run.log) if path is not None and path.exists())


def _job(save: Path, run: RunFolder, status: Mapping[str, Any]) -> Job:
    relative, owner = os.path.relpath(save), user_name(save.stat().st_uid)
    log = run.logs / "rank_0.log"
    status_time = _seconds(status)
    state = _state(save, status)
    return Job(
        relative if not relative.startswith("..") else str(save), save.name, owner, state, start_time=status_time,
        submit_time=status_time, end_time=status_time if state not in ("RUNNING",) else None, work_dir=Path.cwd(),
        log=log if log.is_file() else run.metrics_file, save=save, local=True,
    )  # fmt: skip


def _state(save: Path, status: Mapping[str, Any]) -> str:
    """Returns the state of a local run by Slurm's names, such as RUNNING; else DIED_SILENTLY or UNREADABLE.

    For a run on another machine it is the status that the run wrote last."""
    reported = status.get("status")
    if reported is None:  # the file is unreadable or has no status: how the run ended is unknown
        return "RUNNING" if lock_holder(save) is not None else UNREADABLE
    if is_here(status):
        alive = lock_holder(save) is not None
        if launcher_is_alive(status) and reported in ("running", "failed"):
            return "RUNNING"
        if reported == "running" and not alive:
            return DIED_SILENTLY
    return {"running": "RUNNING", "failed": "FAILED"}.get(reported, "COMPLETED")


def user_name(number: int) -> str:
    """Returns the name of the user with this user id; the id as text if it has no name, as in a container."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _seconds(status: Mapping[str, Any]) -> float | None:
    try:
        return datetime.strptime(str(status.get("time")), "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except ValueError:
        return None
