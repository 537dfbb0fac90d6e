"""Arrays derived from data, kept in a folder named by all that decides them: whole or not there, never stale."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from megatron.data.errors import DataError
from megatron.data.files import map_npy, sync, temporary

SHARED_FILE_SYSTEM_DELAY = 60.0  # seconds a folder written on another node may take to be seen on this one

Maps = TypeVar("Maps")


@dataclass(frozen=True)
class CacheKey:
    """A base for the fields that decide an array; their digest is the folder's name."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:32]


def cached(cache_dir: Path, key: CacheKey, make: Callable[[], Any]) -> None:
    """See that the arrays of `key` (the fields of what `make` returns) lie in cache_dir: written under a temporary
    name, then renamed."""
    folder = cache_dir / key.digest
    if folder.is_dir():
        return
    unfinished = temporary(folder)
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
        for name, array in vars(make()).items():
            np.save(unfinished / f"{name}.npy", array)
            sync(unfinished / f"{name}.npy")
        (unfinished / "key.json").write_text(json.dumps(asdict(key), indent=1) + "\n")
        sync(unfinished)
        os.rename(unfinished, folder)
    except OSError as problem:
        if folder.is_dir():  # another job wrote the same content first
            return
        raise DataError(
            f"{cache_dir}: the index maps cannot be written here ({problem.strerror}); "
            "set index_cache_dir to a folder that every node can read and this one can write"
        ) from problem
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def load(cache_dir: Path, key: CacheKey, kind: type[Maps], wait: float = SHARED_FILE_SYSTEM_DELAY) -> Maps:
    """Memory-map the arrays of `key` into the dataclass `kind`; waits for them up to `wait` seconds."""
    folder = cache_dir / key.digest
    deadline = time.monotonic() + wait
    while not folder.is_dir():
        if time.monotonic() > deadline:
            raise DataError(f"{folder}: not there; index_cache_dir must be a folder that every node sees")
        time.sleep(0.1)
    try:
        names = kind.__annotations__
        return kind(**{name: map_npy(folder / f"{name}.npy") for name in names})
    except (OSError, KeyError, ValueError) as problem:
        raise DataError(f"{folder}: damaged index maps ({problem}); delete this folder, it is made again") from problem
