"""Small disks for tests: `python -m tests.disks FOLDER KILOBYTES COPY COMMAND...`.

The command finds a tmpfs at FOLDER, a read-only one if of 0 kilobytes. Its files are copied to COPY at the
end.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path


def mount(folder: Path, kilobytes: int, read_only: bool) -> None:
    """A small tmpfs that only this process sees, and those that it starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, new_user, private, recursive = 0x00020000, 0x10000000, 1 << 18, 1 << 14
    user, group = os.getuid(), os.getgid()
    flags = new_mounts if user == 0 else new_mounts | new_user
    assert libc.unshare(flags) == 0, os.strerror(ctypes.get_errno())
    if user != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    assert libc.mount(b"none", b"/", None, private | recursive, None) == 0, os.strerror(ctypes.get_errno())
    options = f"size={kilobytes}k".encode()
    mounted = libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 1 if read_only else 0, options)
    assert mounted == 0, os.strerror(ctypes.get_errno())


def remount(folder: Path, read_only: bool) -> None:
    """Makes a disk of `mount` read-only or writable."""
    libc = ctypes.CDLL(None, use_errno=True)
    read_only_flag, remount_flag = 1, 32
    done = libc.mount(b"none", str(folder).encode(), None, remount_flag | read_only * read_only_flag, None)
    assert done == 0, os.strerror(ctypes.get_errno())


def fill(folder: Path) -> Path:
    """Leave no room there; the file to remove again."""
    path = folder / "fill"
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return path


def main() -> int:
    folder, kilobytes, copy, *command = sys.argv[1:]
    mount(Path(folder), int(kilobytes) or 1000, kilobytes == "0")
    code = subprocess.run(command).returncode
    shutil.copytree(folder, copy)
    return code


if __name__ == "__main__":
    sys.exit(main())
