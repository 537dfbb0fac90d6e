"""Caches index maps, arrays derived from data, in one file per dataset, named by a digest of its cache keys.

A file is complete or absent, never stale. `<digest of the keys>.maps` holds the arrays one after another,
each aligned to 64 bytes. Then follows JSON: the keys, the type, shape and position of every array, and the
CRC-32 of every 16 MiB before the JSON. Last comes `TAIL`: the length of the JSON, and its CRC-32. At each
start one process checks the full file (`ensure_cached`); a damaged file is reported and rebuilt.
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
from megatron.process.progress import ProgressBar

SHARED_FILE_SYSTEM_DELAY = 60.0  # seconds a file written on another node may take to be seen on this one
THREADS = 8  # that build and check maps: they often wait for the disk, and a CRC-32 releases the GIL
BLOCK = 1 << 24  # bytes covered by one checksum
ALIGNMENT = 64
TAIL = struct.Struct("<QQ")

Maps = TypeVar("Maps")
MapBuilders = Mapping["CacheKey", Callable[[], Any]]


@dataclass(frozen=True)
class CacheKey:
    """Base class of cache keys: dataclasses whose fields decide the content of the cached arrays.

    Renaming a field changes the names of cached files.
    """

    @property
    def digest(self) -> str:
        """The first 32 hexadecimal digits of the SHA-256 of all fields."""
        return _digest(json.dumps(asdict(self), sort_keys=True))


@dataclass(frozen=True, eq=False)
class CachedMaps:
    """A memory-mapped file of the index cache.

    content: the bytes of all arrays.
    places: for each cache key, {name of an array: (dtype, shape, offset in bytes)}.
    checksums: the CRC-32 of every BLOCK bytes of `content`.
    """

    content: np.ndarray
    places: Mapping[CacheKey, Mapping[str, tuple[str, list[int], int]]]
    checksums: list[int]

    def maps(self, key: CacheKey, kind: type[Maps]) -> Maps:
        """Return the arrays of `key` as an object of the dataclass `kind`, which has a field for each
        array."""
        return kind(**{name: self._array(*place) for name, place in self.places[key].items()})

    def _array(self, dtype: str, shape: list[int], start: int) -> np.ndarray:
        size = np.dtype(dtype).itemsize * math.prod(shape)
        return self.content[start : start + size].view(dtype).reshape(shape)


def ensure_cached(cache_dir: Path, builders: MapBuilders) -> None:
    """Write the cache file for `builders` into `cache_dir`, unless an undamaged file exists; a damaged file
    is rebuilt.

    builders: {cache key: function without arguments that returns a dataclass of arrays}; the file holds these
      arrays. It is written under a temporary name, then renamed, so processes keep a file they have mapped.
    Raises DataError if the file cannot be written, StopRequested at a stop signal.
    """
    path = _path(cache_dir, builders)
    if path.is_file():
        damage = _damage(path, builders)
        if damage is None:
            return
        logging.getLogger("megatron").warning(
            f"{path}: damaged ({damage}); the index maps in this file are rebuilt now"
        )
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
    """Memory-map the cache file of `keys` that `ensure_cached` wrote in some process; wait for it up to
    `wait` seconds.

    Raises DataError if the file does not appear or is damaged.
    """
    path = _path(cache_dir, keys)
    deadline = time.monotonic() + wait
    while not path.is_file():
        if time.monotonic() > deadline:
            raise DataError(
                f"{path}: index maps written on another node are not visible here; set index_cache_dir to a shared "
                "folder that every node sees"
            )
        time.sleep(0.1)
    try:
        return _open(path, keys)
    except (OSError, ValueError) as problem:
        raise DataError(
            f"{path}: damaged index maps ({problem}); delete this file: the next start builds it again"
        ) from problem


def _described(keys: Collection[CacheKey]) -> str:
    return json.dumps([vars(key) for key in keys], sort_keys=True, default=vars)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _path(cache_dir: Path, keys: Collection[CacheKey]) -> Path:
    return cache_dir / f"{_digest(_described(keys))}.maps"


def _write(path: Path, builders: MapBuilders) -> None:
    places: list[dict[str, tuple[str, tuple[int, ...], int]]] = []
    with open(path, "wb") as file:
        for maps in _built_maps(list(builders.values())):
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


def _built_maps(builders: list[Callable[[], Any]]) -> Iterator[Any]:
    """Call the builders in threads, and yield their results in order.

    At most THREADS results are in memory, because the maps of all large datasets might not fit.
    """
    logger = logging.getLogger("megatron")
    progress = ProgressBar("building index maps", len(builders), "dataset", logger, visible=True, transient=True)
    with ThreadPoolExecutor(THREADS) as pool, progress:
        for start in range(0, len(builders), THREADS):
            for done, maps in enumerate(pool.map(_unless_stopped, builders[start : start + THREADS]), start + 1):
                yield maps
                progress.advance_to(done)


def _unless_stopped(make: Callable[[], Any]) -> Any:
    look_for_stop()
    return make()


def _damage(path: Path, keys: Collection[CacheKey]) -> str | None:
    """Check the full content of the cache file of `keys`; return a text on what is damaged, None if
    nothing is."""
    try:
        entry = _open(path, keys)
    except (OSError, ValueError) as problem:
        return str(problem)
    return None if _checksums(entry.content) == entry.checksums else "its checksums do not match"


def _open(path: Path, keys: Collection[CacheKey]) -> CachedMaps:
    """Memory-map the cache file of `keys` without reading its arrays.

    Raises ValueError if the JSON at its end is damaged or belongs to other keys.
    """
    content = map_file(path, np.uint8)
    length, checksum = TAIL.unpack(content[-TAIL.size :].tobytes().ljust(TAIL.size, b"\0"))
    text = content[-TAIL.size - length : -TAIL.size].tobytes() if length <= len(content) - TAIL.size else b""
    if not text or zlib.crc32(text) != checksum:
        raise ValueError("truncated, or its last bytes were changed")
    facts = json.loads(text)
    if facts["digest"] != _digest(_described(keys)):
        raise ValueError("it holds the maps of other data or settings")
    return CachedMaps(content[: -TAIL.size - length], dict(zip(keys, facts["places"], strict=True)), facts["crc32"])


def _checksums(content: np.ndarray) -> list[int]:
    with ThreadPoolExecutor(THREADS) as pool:
        blocks = range(0, len(content), BLOCK)
        return list(
            pool.map(lambda start: _unless_stopped(lambda: zlib.crc32(content[start : start + BLOCK].data)), blocks)
        )
