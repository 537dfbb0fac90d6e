"""Opens the dataset at a data path, in any supported format."""

import struct
from pathlib import Path

import numpy as np

from megatron.data.errors import DataError
from megatron.data.files import map_file
from megatron.data.indexed_dataset import DTYPES, OLD_MAGIC, IndexedDataset, index_path
from megatron.data.npy_dataset import NpyDataset
from megatron.neox_arguments.values.remote_paths import remote_data_error

HEADER = struct.Struct("<8sQQQQQQ")


class LegacyDataset(IndexedDataset):
    """An `IndexedDataset` over a pair in the cached/lazy format (TNTIDX), which GPT-NeoX still writes with
    `--dataset-impl lazy` or `cached`.

    `.idx`, little-endian: magic `TNTIDX\\0\\0` (8 bytes), u64 version = 1, u64 dtype code, u64 bytes of a
    token, u64 n sequences, u64 n sizes, u64 n document boundaries, i64 dimension offsets [n + 1], i64 token
    offsets into `.bin` [n + 1], i64 sizes [n], i64 boundaries. `.bin`: the tokens, nothing else.
    """

    def _read_index(self) -> None:
        file = self.index_file
        size = file.stat().st_size
        with open(file, "rb") as opened:
            head = opened.read(HEADER.size)
        if not head.startswith(OLD_MAGIC[: len(head)]) or len(head) < HEADER.size:
            raise DataError(f"{file}: not an index of the cached/lazy format (TNTIDX); use data_impl: mmap or infer")
        _, version, code, width, n, sizes, boundaries = HEADER.unpack(head)
        expected = HEADER.size + 8 * (2 * (n + 1) + sizes + boundaries)
        if version != 1 or size != expected or boundaries < 1:
            raise DataError(
                f"{file}: version {version}, {size} bytes; expected version 1 and, for its {n} sequences and "
                f"{boundaries} document boundaries, {expected} bytes; make or copy it again"
            )
        if code not in DTYPES or np.dtype(DTYPES[code]).itemsize != width or sizes != n:
            raise DataError(
                f"{file}: dtype code {code}, {width} bytes an item, {sizes} sizes for {n} sequences: "
                "unsupported or damaged; make or copy it again"
            )
        self.dtype = np.dtype(DTYPES[code]).newbyteorder("<")
        numbers = map_file(file, "<i8", HEADER.size)
        num_offsets = n + 1
        self.pointers = np.asarray(numbers[num_offsets : num_offsets + n]) * width
        self.sizes = numbers[2 * num_offsets : 2 * num_offsets + n]
        self.boundaries = numbers[2 * num_offsets + n :]


def open_dataset(path: str | Path, data_impl: str = "infer") -> IndexedDataset:
    """Open a folder of `.npy` files, or the `.bin/.idx` pair of a prefix.

    data_impl: mmap (format MMIDIDX), cached (TNTIDX, also written by lazy), or infer (by the file's first
      bytes). Raises DataError for a missing, damaged or remote file.
    """
    if (remote := remote_data_error(str(path))) is not None:
        raise DataError(remote)
    if Path(path).is_dir() and not index_path(path).exists():
        return NpyDataset(path)
    is_cached = data_impl == "cached" or data_impl == "infer" and has_cached_format(path)
    return LegacyDataset(path) if is_cached else IndexedDataset(path)


def open_tokens(path: str | Path, data_impl: str = "infer") -> IndexedDataset:
    """Open a dataset of token ids, like `open_dataset`. Raises DataError also if it holds other numbers than
    integers, such as rewards."""
    dataset = open_dataset(path, data_impl)
    if dataset.dtype.kind not in "iu":
        raise DataError(
            f"{dataset.data_file}: holds {dataset.dtype}, but tokens are integers; give a dataset of token ids"
        )
    return dataset


def has_cached_format(path: str | Path) -> bool:
    """Return whether a `.bin/.idx` pair has the cached/lazy format (TNTIDX), judged by the first bytes of
    its `.idx`."""
    if not index_path(path).is_file():
        return False
    with open(index_path(path), "rb") as file:
        return file.read(len(OLD_MAGIC)) == OLD_MAGIC
