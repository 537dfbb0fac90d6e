"""Writes sorted files of records (runs), and merges them in key order. Memory holds one range of keys at a
time."""

import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from megatron.data.files import map_npy, temporary

_RECORDS_AT_ONCE = 8_000_000  # a few hundred MB while they are sorted


def document_numbers(part: int, rows: np.ndarray) -> np.ndarray:
    """Return the number in the job of each document, given its part and its row in the part.

    A number holds the part in the upper 32 bits and the row in the lower 32, so numbers rise in input order.
    """
    return (np.uint64(part) << np.uint64(32)) | rows.astype(np.uint64)


def rows_of_part(documents: np.ndarray, part: int) -> np.ndarray:
    """Return the rows, in part `part`, of those documents of `documents` (sorted numbers) that belong to
    the part."""
    first_index, last_index = np.searchsorted(documents, document_numbers(part, np.array([0, 2**32 - 1])))
    candidates = documents[first_index : last_index + 1]
    return (candidates[candidates >> np.uint64(32) == part] & np.uint64(0xFFFFFFFF)).astype(np.int64)


def groups(*columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Group consecutive records with equal values in all columns, which must be sorted.

    Returns (True at the first record of each group, for each record the index of its group's first record).
    """
    begins = np.zeros(len(columns[0]), bool)
    begins[:1] = True
    for column in columns:
        begins[1:] |= column[1:] != column[:-1]
    return begins, np.maximum.accumulate(np.where(begins, np.arange(len(begins)), 0))


def write_run(path: Path, records: np.ndarray) -> None:
    """Sort records by their field `key` (uint64), and write them to `path`.

    The file gets its name only when it is complete.
    """
    unfinished = temporary(path)
    with open(unfinished, "wb") as file:
        np.save(file, records[np.argsort(records["key"], kind="stable")])
    os.replace(unfinished, path)


def merged(paths: Sequence[Path], at_once: int = _RECORDS_AT_ONCE) -> Iterator[np.ndarray]:
    """Merge the sorted files `paths`: yield their records in key order, in arrays.

    All records of one key are in the same array, in the order of `paths` and within a path in the order of
    its file.
    at_once: approximate number of records in an array; the keys must be evenly distributed hashes.
    """
    total = sum(len(map_npy(path)) for path in paths)
    if not total:
        return
    pieces = max(1, -(-total // at_once))
    bounds = [(1 << 64) * piece // pieces for piece in range(1, pieces)]
    begins = [0] * len(paths)
    for bound in [*bounds, None]:
        slices = []
        for i, path in enumerate(paths):
            run = map_npy(path)
            # numpy's own search would copy the field first.
            last = len(run) if bound is None else bisect_left(run["key"], bound, key=int)
            slices.append(np.array(run[begins[i] : last]))
            begins[i] = last
        piece: np.ndarray = np.concatenate(slices)
        if len(piece):
            yield piece[np.argsort(piece["key"], kind="stable")]
