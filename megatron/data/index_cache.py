"""Arrays derived from data, kept in one file a set, named by all that decides them: whole or not there, never
stale.

`<digest of the keys>.maps` holds the arrays one after another, each from a multiple of 64 bytes on; then JSON
with the keys, the type, shape and place of every array, and the CRC-32 of every 16 MiB before it; last,
`TAIL`: the length of that JSON, and its own CRC-32. The process that sees to it that a file is there checks
it whole, once a start; one that was damaged is said and made again.
"""

import hashlib
import json
import logging
import math
import os
import struct
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from megatron.data.errors import DataError
from megatron.data.files import map_file, sync, temporary
from megatron.process import look_for_stop

SHARED_FILE_SYSTEM_DELAY = 60.0  # seconds a file written on another node may take to be seen on this one
THREADS = 8  # of making and checking maps: some of the time is waiting for the disk, most of a check holds no lock
BLOCK = 1 << 24  # bytes of one checksum
ALIGNMENT = 64
TAIL = struct.Struct("<QQ")

Maps = TypeVar("Maps")
MapBuilders = Mapping["CacheKey", Callable[[], Any]]


@dataclass(frozen=True)
class CacheKey:
    """The base of dataclasses whose fields are all that decides some arrays. Their names are part of file
    names."""

    @property
    def digest(self) -> str:
        """The first 32 hexadecimal digits of the SHA-256 of all fields."""
        return _digest(json.dumps(asdict(self), sort_keys=True))


@dataclass(frozen=True, eq=False)
class CachedMaps:
    """A file of the cache, mapped into memory.

    places: for each key, the type, shape and first byte of every array by its name. checksums: the CRC-32 of
    every BLOCK bytes of `content`, which ends where the arrays do.
    """

    content: np.ndarray
    places: Mapping[CacheKey, Mapping[str, tuple[str, list[int], int]]]
    checksums: list[int]

    def maps(self, key: CacheKey, kind: type[Maps]) -> Maps:
        """The arrays of `key` as the dataclass `kind`."""
        return kind(**{name: self._array(*place) for name, place in self.places[key].items()})

    def _array(self, dtype: str, shape: list[int], start: int) -> np.ndarray:
        size = np.dtype(dtype).itemsize * math.prod(shape)
        return self.content[start : start + size].view(dtype).reshape(shape)


def ensure_cached(cache_dir: Path, builders: MapBuilders) -> None:
    """Make sure that one file of cache_dir holds the arrays of all keys, undamaged.

    The arrays of a key are the fields of what its builder returns. A missing file is written under a
    temporary name, then renamed; what other processes have mapped stays what it was.
    Raises DataError where it cannot be written, StopRequested where a stop signal comes first.
    """
    path = _path(cache_dir, builders)
    if path.is_file():
        damage = _damage(path, builders)
        if damage is None:
            return
        logging.getLogger("megatron").warning(f"{path}: damaged ({damage}); these index maps are made again")
    unfinished = temporary(path)
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        _write(unfinished, builders)
        os.replace(unfinished, path)
    except OSError as problem:
        raise DataError(
            f"{cache_dir}: the index maps cannot be written here ({problem.strerror}); "
            "set index_cache_dir to a folder that every node can read and this one can write"
        ) from problem
    finally:
        unfinished.unlink(missing_ok=True)


def load_cached(cache_dir: Path, keys: Collection[CacheKey], wait: float = SHARED_FILE_SYSTEM_DELAY) -> CachedMaps:
    """Map the file of `keys`, of which some process has made sure; waits for it up to `wait` seconds.

    Raises DataError for a file that does not appear, or that is damaged.
    """
    path = _path(cache_dir, keys)
    deadline = time.monotonic() + wait
    while not path.is_file():
        if time.monotonic() > deadline:
            raise DataError(f"{path}: not there; index_cache_dir must be a folder that every node sees")
        time.sleep(0.1)
    try:
        return _open(path, keys)
    except (OSError, ValueError) as problem:
        raise DataError(f"{path}: damaged index maps ({problem}); delete this file, it is made again") from problem


def _described(keys: Collection[CacheKey]) -> str:
    return json.dumps([vars(key) for key in keys], sort_keys=True, default=vars)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _path(cache_dir: Path, keys: Collection[CacheKey]) -> Path:
    return cache_dir / f"{_digest(_described(keys))}.maps"


def _write(path: Path, builders: MapBuilders) -> None:
    places: list[dict[str, tuple[str, tuple[int, ...], int]]] = []
    with open(path, "wb") as file:
        for maps in _made(list(builders.values())):
            places.append({})
            for name, array in vars(maps).items():
                file.write(bytes(-file.tell() % ALIGNMENT))
                places[-1][name] = (array.dtype.str, array.shape, file.tell())
                file.write(np.ascontiguousarray(array).data)
        file.flush()
        keys = _described(builders)
        facts = {"digest": _digest(keys), "places": places, "crc32": _checksums(map_file(path, np.uint8))}
        text = json.dumps({"keys": json.loads(keys), **facts}).encode()
        file.write(text + TAIL.pack(len(text), zlib.crc32(text)))
    sync(path)


def _made(builders: list[Callable[[], Any]]) -> Iterator[Any]:
    """What the builders return, in order and a few at a time: maps of large sets need not all fit into
    memory."""
    with ThreadPoolExecutor(THREADS) as pool:
        for start in range(0, len(builders), THREADS):
            yield from pool.map(_unless_stopped, builders[start : start + THREADS])


def _unless_stopped(make: Callable[[], Any]) -> Any:
    look_for_stop()
    return make()


def _damage(path: Path, keys: Collection[CacheKey]) -> str | None:
    """Read a file whole and return in words what is wrong with it, None if nothing is."""
    try:
        entry = _open(path, keys)
    except (OSError, ValueError) as problem:
        return str(problem)
    return None if _checksums(entry.content) == entry.checksums else "its checksums do not fit"


def _open(path: Path, keys: Collection[CacheKey]) -> CachedMaps:
    """Raises ValueError for a file whose end does not describe the arrays of `keys`; they themselves are not
    read."""
    content = map_file(path, np.uint8)
    length, checksum = TAIL.unpack(content[-TAIL.size :].tobytes().ljust(TAIL.size, b"\0"))
    text = content[-TAIL.size - length : -TAIL.size].tobytes() if length <= len(content) - TAIL.size else b""
    if not text or zlib.crc32(text) != checksum:
        raise ValueError("cut off, or its end was changed")
    facts = json.loads(text)
    if facts["digest"] != _digest(_described(keys)):
        raise ValueError("it holds other maps")
    return CachedMaps(content[: -TAIL.size - length], dict(zip(keys, facts["places"], strict=True)), facts["crc32"])


def _checksums(content: np.ndarray) -> list[int]:
    with ThreadPoolExecutor(THREADS) as pool:
        blocks = range(0, len(content), BLOCK)
        return list(
            pool.map(lambda start: _unless_stopped(lambda: zlib.crc32(content[start : start + BLOCK].data)), blocks)
        )
