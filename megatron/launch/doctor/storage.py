"""Checks disks, shared memory, and the limits of open files and locked memory."""

import errno
import os
import resource
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.launch.doctor.check import Check, failed, warning

MIB, GIB = 1 << 20, 1 << 30
_PROBE = 64 * MIB
_SECONDS = 0.5  # that the probe may take
_SLOW = 100 * MIB  # bytes a second


def disk_check(
    title: str, folder: str | Path, num_bytes: int, label: str, statvfs: Callable[[str], Any] = os.statvfs
) -> Check:
    """Checks that a folder has room for `num_bytes`, and how fast it can be written. If the folder does not
    exist, its nearest parent is checked.

    The file system reports the free space. To notice a full quota too, a file of up to 64 MiB is written.

    title: name of the check.
    label: what needs `num_bytes`, in words.
    statvfs: reads the free space of a folder.
    """
    existing_folder = Path(folder).absolute()
    while not existing_folder.exists():
        existing_folder = existing_folder.parent
    if not existing_folder.is_dir():
        return failed(title, f"{existing_folder} is a file", "name a folder")
    if not os.access(existing_folder, os.W_OK | os.X_OK):
        return failed(
            title,
            f"{existing_folder} may not be written by this user",
            "name another folder, or change its permissions",
        )
    space = statvfs(str(existing_folder))
    free = space.f_bavail * space.f_frsize
    space_text = f"{folder}: {size(free)} free"
    if space.f_files and not space.f_favail:
        return failed(title, f"{space_text}, but no inodes for new files", "delete files, or name another folder")
    if free < num_bytes:
        return failed(
            title,
            f"{space_text}, less than {label} needs (about {size(num_bytes)})",
            "make room, or name another folder",
        )
    try:
        speed = _write(existing_folder)
    except OSError as problem:
        is_full = problem.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "the disk or the quota is full" if is_full else f"cannot be written: {problem.strerror}"
        return failed(title, f"{space_text}, but {reason}", "make room, or name another folder")
    space_text += f", {speed / MIB:.0f} MiB/s"
    if free < 2 * num_bytes:
        return warning(title, space_text, f"has room for {label} (about {size(num_bytes)}), but not for two")
    if speed < _SLOW:
        return warning(title, space_text, f"slow: writing {label} of {size(num_bytes)} takes {num_bytes / speed:.0f} s")
    return Check(title, "ok", space_text)


def _write(folder: Path) -> float:
    """Writes and syncs a temporary file in `folder`. Returns the speed in bytes per second."""
    block, written = os.urandom(4 * MIB), 0
    file = folder / f".doctor-{secrets.token_hex(4)}"
    started = time.perf_counter()
    try:
        with open(file, "wb", buffering=0) as target:
            while written < _PROBE and time.perf_counter() - started < _SECONDS:
                written += target.write(block)
            os.fsync(target.fileno())
        return written / (time.perf_counter() - started)
    finally:
        file.unlink(missing_ok=True)


def shared_memory_check(folder: str = "/dev/shm", statvfs: Callable[[str], Any] = os.statvfs) -> Check | None:
    """Checks the free space of /dev/shm, through which ranks of a machine communicate. In containers its
    default is 64 MiB.

    Returns None if there is no such folder.
    """
    if not Path(folder).is_dir():
        return None
    space = statvfs(folder)
    free, total = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    space_text = f"{size(free)} of {size(total)} free"
    advice = "docker run --shm-size=16g (or --ipc=host); Kubernetes: an emptyDir with medium: Memory at /dev/shm"
    if free < 32 * MIB:
        return failed(folder, space_text, advice)
    return Check(folder, "ok", space_text) if free >= GIB else warning(folder, space_text, advice)


def open_files_check(limits: tuple[int, int] | None = None) -> Check:
    """Checks the limit of open files, to which every data file and every connection counts.

    limits: (soft, hard) limit; None: the limits of this process.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE) if limits is None else limits
    limit_text = f"{_limit(soft)} (may be raised to {_limit(hard)})"
    if soft != resource.RLIM_INFINITY and soft < 4096:
        return warning("open files", limit_text, f"ulimit -n {65536 if hard < 0 else min(hard, 65536)}")
    return Check("open files", "ok", limit_text)


def locked_memory_check() -> Check:
    """Checks the limit of locked memory, which RDMA networks (InfiniBand) need."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY and soft < GIB:
        return warning("locked memory", size(soft), "ulimit -l unlimited (limits.conf; docker --ulimit memlock=-1)")
    return Check("locked memory", "ok", _limit(soft) if soft < 0 else size(soft))


def size(number: float) -> str:
    """Returns a number of bytes as text, such as `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" or number >= 100 else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def _limit(number: int) -> str:
    return "unlimited" if number < 0 or number == resource.RLIM_INFINITY else str(number)
