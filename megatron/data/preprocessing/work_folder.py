"""The folder in which a job over files keeps what it has done, so that the same job given again goes on."""

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
    """A short name for what JSON values say of a job."""
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
    """The folder, as an earlier run of the job left it or new; gone when the block is done.

    Where nothing in it is worth keeping it goes after a failure too. Folders of other jobs for this target,
    beside it by `pattern`, go first; with keep_others, once this one is done. target: what the job writes, as
    messages call it. advice: for a place that cannot be written. Raises DataError where another process has
    one of them.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for other in folder.parent.glob(pattern):
            with _locked(other, target):
                if other != folder and not keep_others:
                    _remove(other)
        folder.mkdir(exist_ok=True)
        lock = _locked(folder, target)
    except OSError as problem:
        raise DataError(f"{os_error(problem, folder)}; {advice}") from None
    done = False
    try:
        yield folder
        done = True
        for other in folder.parent.glob(pattern):
            if other != folder:
                _remove(other)
    finally:
        if done or not is_worth_keeping(folder):
            _remove(folder)
        lock.close()


def os_error(problem: OSError, folder: Path) -> str:
    """What the system says, and of which file."""
    return f"{problem.filename or folder.parent}: {problem.strerror}"


def _locked(folder: Path, target: str) -> IO[str]:
    """A record lock: unlike others it dies with this process, whatever its workers do."""
    lock = open(folder / "lock", "w")
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise DataError(f"{target}: another process is writing it ({folder})") from None
    return lock


def _remove(folder: Path) -> None:
    """A worker of a killed run may write one more file while this goes on."""
    for _ in range(10):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)
