"""Document, sample and shuffle order of packed pre-training data, equal to NeoX's for the same seed.

The documents of a split are shuffled (all epochs together), laid end to end, and cut into windows of seq_length + 1
tokens that overlap by one; the windows are shuffled again by the same generator. Documents cross window borders.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from megatron.data.errors import DataError
from megatron.data.files import sync, temporary

INT32_MAX = np.iinfo(np.int32).max
UINT32_MAX = np.iinfo(np.uint32).max
SHARED_FILE_SYSTEM_DELAY = 60.0  # seconds a folder written on another node may take to be seen on this one


@dataclass(frozen=True)
class IndexMaps:
    """doc_idx [epochs * documents] sequence numbers; sample_idx [samples + 1, 2] = (place in doc_idx, token offset) of
    every window's first token; shuffle_idx [samples] windows in training order."""

    doc_idx: np.ndarray
    sample_idx: np.ndarray
    shuffle_idx: np.ndarray


@dataclass(frozen=True)
class IndexKey:
    """All that decides the maps; its digest names the cache folder, so a stale cache cannot be found."""

    index_sha256: str
    first: int
    last: int
    num_samples: int
    seq_length: int
    seed: int
    pack_impl: str
    format_version: int = 1

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:32]


def epochs_for(tokens_per_epoch: int, seq_length: int, num_samples: int) -> int:
    """The least e >= 1 with (e * tokens_per_epoch - 1) // seq_length >= num_samples."""
    return max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))


def build_packed(sizes: np.ndarray, first: int, last: int, num_samples: int, seq_length: int, seed: int) -> IndexMaps:
    """Maps over sequences [first, last) whose lengths are sizes [n]; enough epochs for num_samples windows.

    All windows that fit into these epochs are used; upstream's `len(dataset)` is one short of them.
    """
    tokens_per_epoch = int(sizes[first:last].sum(dtype=np.int64))
    epochs = epochs_for(tokens_per_epoch, seq_length, num_samples)
    random = np.random.RandomState(seed)
    doc_idx = np.tile(np.arange(first, last, dtype=np.int32 if last <= INT32_MAX else np.int64), epochs)
    random.shuffle(doc_idx)
    sample_idx = _sample_idx(sizes, doc_idx, seq_length)
    samples = len(sample_idx) - 1
    shuffle_idx = np.arange(samples, dtype=np.uint32 if samples < UINT32_MAX - 1 else np.int64)
    random.shuffle(shuffle_idx)
    return IndexMaps(doc_idx, sample_idx, shuffle_idx)


def _sample_idx(sizes: np.ndarray, doc_idx: np.ndarray, seq_length: int) -> np.ndarray:
    lengths = sizes[doc_idx]
    ends = np.cumsum(lengths, dtype=np.int64)
    samples = (int(ends[-1]) - 1) // seq_length
    # Window i begins at token i * seq_length of the joined documents: in the first one that ends after it
    begins = np.arange(samples + 1, dtype=np.int64) * seq_length
    place = np.searchsorted(ends, begins, side="right")
    offset = begins - (ends[place] - lengths[place])
    # The first window begins at the first document, be it empty
    place[0] = offset[0] = 0
    dtype = np.int32 if 2 * (samples + 1) < INT32_MAX and len(doc_idx) <= INT32_MAX else np.int64
    return np.stack([place, offset], axis=1).astype(dtype)


def cached(cache_dir: Path, key: IndexKey, make: Callable[[], IndexMaps]) -> None:
    """See that the maps of `key` lie in cache_dir: written under a temporary name, then renamed."""
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


def load(cache_dir: Path, key: IndexKey, wait: float = SHARED_FILE_SYSTEM_DELAY) -> IndexMaps:
    """Memory-map the maps of `key`; waits for them up to `wait` seconds."""
    folder = cache_dir / key.digest
    deadline = time.monotonic() + wait
    while not folder.is_dir():
        if time.monotonic() > deadline:
            raise DataError(f"{folder}: not there; index_cache_dir must be a folder that every node sees")
        time.sleep(0.1)
    try:
        maps = IndexMaps(**{n: np.load(folder / f"{n}.npy", mmap_mode="r") for n in IndexMaps.__dataclass_fields__})
    except (OSError, ValueError) as problem:
        raise DataError(f"{folder}: damaged index maps ({problem}); delete this folder, it is made again") from problem
    return maps
