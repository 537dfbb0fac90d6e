"""Manages the folder in which a job keeps finished work, so that the same job resumes when it is run
again."""

import fcntl
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from megatron.data.errors import DataError


def digest(identity: Any) -> str:
    """Return a short hash of `identity`, the JSON values that identify a job."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


@contextmanager
def work_folder(
    folder: Path,
    pattern: str,
    target: str,
    advice: str,
    is_worth_keeping: Callable[[Path], bool],
    keep_others: bool = False,
) -> Iterator[Path]:
    """Context manager that yields the job's folder, new or left by an earlier run, and deletes it when the
    block succeeds.

    After a failure the folder is deleted too, unless `is_worth_keeping` returns True for it. Folders of other
    jobs for this target, found by `pattern`, are deleted before the block; with keep_others, only after
    success.
    target: the output's name in messages.
    advice: ends the message if the folder cannot be written.
    Raises DataError if another process uses one of the folders.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for sibling in folder.parent.glob(pattern):
            with _locked(sibling, target):
                if sibling != folder and not keep_others:
                    _remove(sibling)
        folder.mkdir(exist_ok=True)
        lock = _locked(folder, target)
    except OSError as problem:
        raise DataError(f"{os_error(problem, folder)}; {advice}") from None
    done = False
    try:
        yield folder
        done = True
        for sibling in folder.parent.glob(pattern):
            if sibling != folder:
                _remove(sibling)
    finally:
        if done or not is_worth_keeping(folder):
            _remove(folder)
        lock.close()


def os_error(problem: OSError, folder: Path) -> str:
    """Return "FILE: REASON" for an OSError. If the error names no file, FILE is the parent of `folder`."""
    return f"{problem.filename or folder.parent}: {problem.strerror}"


def _locked(folder: Path, target: str) -> IO[str]:
    """Lock a folder for this process and return the lock file; closing it unlocks the folder.

    The lock ends with this process, even if its workers live on. Raises DataError if another process holds
    the lock.
    """
    lock = open(folder / "lock", "w")
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise DataError(
            f"{target}: another process is writing it ({folder}); wait until that process ends, or stop it"
        ) from None
    return lock


def _remove(folder: Path) -> None:
    """Remove a folder, with retries because a worker of a killed run may still write a file."""
    for _ in range(10):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)
