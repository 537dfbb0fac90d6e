"""Provides file helpers: durable writes, hashes computed block by block, and memory maps."""

import contextlib
import ctypes
import hashlib
import json
import mmap
import os
import stat
import time
import weakref
from functools import cache
from pathlib import Path
from tokenize import TokenError
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import DTypeLike

from megatron.process import look_for_stop
from megatron.process.run_files import to_json

NPY_ERRORS = (OSError, ValueError, EOFError, TokenError, BadZipFile)  # of `numpy.load` for a damaged file
_BLOCK = 1 << 20  # bytes that are hashed at once
_SETTLED = 2_000_000_000  # nanoseconds since the last change after which a file's hash is cached


def sync(path: str | Path) -> None:
    """Flush a file or folder to disk (fsync), so that a later rename never exposes a partly written file."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def temporary(path: str | Path) -> Path:
    """Return a temporary name in the folder of `path`, different in every process.

    Because it is in the same folder, `os.replace` moves the file to `path` atomically.
    """
    path = Path(path)
    return path.with_name(f".{path.name}.tmp-{os.getpid()}")


def write_json(path: str | Path, content: Any) -> None:
    """Write `content` as JSON into the file `path`, atomically and durably (see `replace_text`)."""
    replace_text(path, to_json(content, indent=1) + "\n")


def replace_text(path: str | Path, text: str) -> None:
    """Write `text` into the file `path`, atomically and durably; an existing file is replaced.

    If writing fails, for example on a full disk, OSError names `path` and the existing file stays unchanged.
    """
    unfinished = temporary(path)
    try:
        unfinished.write_text(text, encoding="utf-8")
        sync(unfinished)
        os.replace(unfinished, path)
    except OSError as problem:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise OSError(problem.errno, problem.strerror, str(path)) from None


def sha256(path: str | Path) -> str:
    """Return the hex SHA-256 of a file's content. Raises StopRequested if the process gets a stop signal."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            look_for_stop()
            digest.update(block)
    return digest.hexdigest()


def cached_sha256(path: str | Path, folder: Path) -> str:
    """Return the hex SHA-256 of a file's content, cached in `folder` while the file's size, times and inode
    stay the same.

    A file that changed in the last seconds is not cached: it might change again within the same time stamp.
    """
    path = Path(path).resolve()
    stat = path.stat()
    now = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
    note = folder / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"
    with contextlib.suppress(OSError, ValueError, KeyError):
        cached = json.loads(note.read_text())
        if cached["path"] == str(path) and cached["stat"] == now:
            return cached["sha256"]
    digest = sha256(path)
    if time.time_ns() - max(now[1:3]) > _SETTLED:
        # A folder that cannot be written is no error here: without the cache only time is lost.
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            unfinished = temporary(note)
            unfinished.write_text(json.dumps({"path": str(path), "stat": now, "sha256": digest}) + "\n")
            os.replace(unfinished, note)
    return digest


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def map_file(path: str | Path, dtype: DTypeLike, offset: int = 0) -> np.ndarray:
    """Return the content of a file from byte `offset` on as a read-only, memory-mapped array.

    Unlike numpy.memmap it keeps no file open, because thousands of datasets would exceed the limit of open
    files.
    """
    size = os.path.getsize(path)
    if size <= offset:  # mmap refuses a length of 0
        return np.empty(0, dtype)
    libc = _libc()
    with open(path, "rb") as file:
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    memory = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(memory, libc.munmap, address, size).atexit = False
    array = np.frombuffer(memory, dtype, offset=offset)  # type: ignore[call-overload]
    array.flags.writeable = False
    return array


def map_npy(path: str | Path) -> np.ndarray:
    """Return the array of a `.npy` file, read-only and memory-mapped (see `map_file`).

    Raises ValueError for another file format, for an array of objects, and for an array in Fortran order.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would be waited for
        raise ValueError("not a regular file")
    with open(path, "rb") as file:
        read_header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[np.lib.format.read_magic(file)]
        try:
            shape, fortran_order, dtype = read_header(file)
        except (TokenError, ValueError):  # numpy reads a header as Python, and reports its own errors
            raise ValueError("its header is damaged") from None
        offset = file.tell()
    if dtype.hasobject or fortran_order:
        raise ValueError("not a C-contiguous array of numbers")
    return map_file(path, dtype, offset).reshape(shape)
