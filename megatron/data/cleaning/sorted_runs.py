"""Records on disk in sorted runs, read together in order of their keys, a range of keys at a time: whatever
there is in all, memory holds a range."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from megatron.data.files import map_npy, temporary

_RECORDS_AT_ONCE = 8_000_000  # a few hundred MB while they are sorted


def document_numbers(part: int, rows: np.ndarray) -> np.ndarray:
    """The numbers of documents, in the order of the input: the part in the upper, the row in the lower 32
    bits."""
    return (np.uint64(part) << np.uint64(32)) | rows.astype(np.uint64)


def rows_of_part(documents: np.ndarray, part: int) -> np.ndarray:
    """The rows of those documents that are in a part; documents: sorted."""
    first, last = np.searchsorted(documents, document_numbers(part, np.array([0, 2**32 - 1])))
    mine = documents[first : last + 1]
    return (mine[mine >> np.uint64(32) == part] & np.uint64(0xFFFFFFFF)).astype(np.int64)


def groups(*columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of records in order of some columns: which begin a group of equal ones, and where each one's group
    begins."""
    begins = np.zeros(len(columns[0]), bool)
    begins[:1] = True
    for column in columns:
        begins[1:] |= column[1:] != column[:-1]
    return begins, np.maximum.accumulate(np.where(begins, np.arange(len(begins)), 0))


def write_run(path: Path, records: np.ndarray) -> None:
    """Write records, an array with a field `key` (uint64) and others, in order of keys; the file appears
    whole."""
    unfinished = temporary(path)
    with open(unfinished, "wb") as file:
        np.save(file, records[np.argsort(records["key"], kind="stable")])
    os.replace(unfinished, path)


def merged(paths: Sequence[Path], at_once: int = _RECORDS_AT_ONCE) -> Iterator[np.ndarray]:
    """The records of all runs in order of their keys; of the same key in the order of the paths, and as they
    stood in their run. A key is never in two pieces. at_once: about how many records a piece has; keys are
    hashes, which lie evenly."""
    total = sum(len(map_npy(path)) for path in paths)
    if not total:
        return
    pieces = max(1, -(-total // at_once))
    bounds = [(1 << 64) * piece // pieces for piece in range(1, pieces)]
    begins = [0] * len(paths)
    for bound in [*bounds, None]:
        found = []
        for i, path in enumerate(paths):
            run = map_npy(path)
            last = len(run) if bound is None else _first_at_least(run["key"], bound)
            found.append(np.array(run[begins[i] : last]))
            begins[i] = last
        piece: np.ndarray = np.concatenate(found)
        if len(piece):
            yield piece[np.argsort(piece["key"], kind="stable")]


def _first_at_least(keys: np.ndarray, bound: int) -> int:
    """numpy's own search copies a field of records first."""
    low, high = 0, len(keys)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if int(keys[middle]) < bound else (low, middle)
    return low
