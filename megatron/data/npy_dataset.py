"""Reads and writes packed data as a folder of `.npy` files: rows of one length, readable with numpy alone.

Every shard is an integer array [rows, width]. `metadata.json` lists the shards in order (`{"format": 1,
"dtype", "width", "tokens", "shards": {name: rows}}`); `write_npy` adds that file. Without it, as in folders
from other tools, shards are read in the order of their names. A folder is a data path like a `.bin/.idx`
prefix, and its rows are the documents: `pack_impl: packed` joins them, `unpacked` takes each as one sample of
width - 1 tokens and labels.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np

from megatron.data.errors import DataError
from megatron.data.files import map_npy, sync, temporary, write_json
from megatron.data.indexed_dataset import IndexedDataset
from megatron.neox_arguments.values.json_text import parse_json

METADATA = "metadata.json"


class NpyDataset(IndexedDataset):
    """An `IndexedDataset` over the rows of a folder of `.npy` files; item i is row i.

    Raises DataError for shards that cannot be read, do not hold rows of integers, or do not match
    `metadata.json`.
    """

    def __init__(self, prefix: str | Path, known_sha256: str | None = None):
        folder = Path(prefix)
        self.prefix, self.data_file, self.index_file = str(prefix), folder, folder / METADATA
        self.data_files = self._shard_files(folder)
        self.shards = [_map(file) for file in self.data_files]
        kinds = {(shard.dtype, shard.shape[1]) for shard in self.shards}
        if len(kinds) != 1:
            present = ", ".join(sorted(f"{dtype} [rows, {width}]" for dtype, width in kinds))
            raise DataError(
                f"{folder}: its shards differ ({present}), but all shards must have one dtype and row length"
            )
        (self.dtype, self.width) = kinds.pop()
        rows = [len(shard) for shard in self.shards]
        self.first_rows = np.cumsum([0, *rows])
        total = sum(rows)
        self.sizes = np.broadcast_to(np.int32(self.width), total)
        self.pointers = np.arange(total, dtype=np.int64) * (self.width * self.dtype.itemsize)
        self.doc_idx = np.arange(total + 1, dtype=np.int64)
        self.index_sha256 = hashlib.sha256(json.dumps([str(self.dtype), self.width, total]).encode()).hexdigest()

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        shard = int(np.searchsorted(self.first_rows, index, side="right")) - 1
        row = self.shards[shard][index - self.first_rows[shard]]
        return row[offset:] if length is None else row[offset : offset + length]

    def span(self, start: int, stop: int) -> np.ndarray:
        return np.concatenate([self.get(row) for row in range(start, stop)] or [np.empty(0, self.dtype)])

    @property
    def tokens(self) -> np.ndarray:  # type: ignore[override]
        """The tokens of all rows, joined: a view of the file if there is one shard, otherwise a copy."""
        return self.shards[0].reshape(-1) if len(self.shards) == 1 else np.concatenate([s.ravel() for s in self.shards])

    def _shard_files(self, folder: Path) -> tuple[Path, ...]:
        if not self.index_file.is_file():
            files = tuple(sorted(folder.glob("*.npy")))
            if not files:
                raise DataError(
                    f"{folder}: no .npy files in it; a data path is a folder of .npy files, or the prefix of a "
                    ".bin/.idx pair"
                )
            return files
        try:
            shards = parse_json(self.index_file.read_text())["shards"]
            files = tuple(folder / name for name in shards)
            wrong = [file for file in files if not file.is_file() or len(_map(file)) != shards[file.name]]
        except DataError:  # of a shard
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
            reason = f"{type(problem).__name__}: {str(problem)[:100]}"
            raise DataError(f"{self.index_file}: lists no shards ({reason}); copy the folder again") from None
        if wrong or not files:
            raise DataError(
                f"{wrong[0] if wrong else folder}: is missing, or has another number of rows than {METADATA} says; "
                "copy the folder again"
            )
        return files


def _map(file: Path) -> np.ndarray:
    try:
        array = map_npy(file)
    except (OSError, KeyError, ValueError) as problem:
        raise DataError(f"{file}: cannot be read as .npy ({' '.join(str(problem).split())}); copy it again") from None
    if array.ndim != 2 or array.dtype.kind not in "iu" or array.dtype.itemsize * array.size == 0:
        raise DataError(
            f"{file}: {array.dtype} {list(array.shape)}, expected rows of integer token ids [rows, tokens]; write it "
            "again"
        )
    return array


def write_npy(source: IndexedDataset, folder: str | Path, width: int, rows_per_shard: int = 1 << 16) -> tuple[int, int]:
    """Write the documents of `source`, joined in order, as rows of `width` tokens into `folder`.

    Returns (number of rows, number of dropped tokens): the last tokens are dropped if they do not fill a row.
      `folder` appears only when it is complete.
    """
    folder = Path(folder)
    rows, remainder = divmod(len(source.tokens), width)
    if not rows:
        raise DataError(
            f"{source.data_file}: its {remainder} tokens do not fill one row of {width}; use shorter rows or more data"
        )
    if folder.exists():
        raise DataError(f"{folder}: exists already; remove it first")
    table = source.tokens[: rows * width].reshape(rows, width)
    starts = range(0, rows, rows_per_shard)
    shards = {f"{i:06d}.npy": table[start : start + rows_per_shard] for i, start in enumerate(starts)}
    counts = {name: len(part) for name, part in shards.items()}
    facts = {"format": 1, "dtype": source.dtype.name, "width": width, "tokens": rows * width, "shards": counts}
    unfinished = temporary(folder)
    try:
        unfinished.mkdir(parents=True)
        for name, part in shards.items():
            np.save(unfinished / name, part)
            sync(unfinished / name)
        write_json(unfinished / METADATA, facts)
        sync(unfinished)
        os.rename(unfinished, folder)
    except OSError as problem:
        raise DataError(f"{folder}: cannot be written ({problem.strerror or problem})") from problem
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return rows, remainder
