"""Opens a data path of any supported format."""

from pathlib import Path

from megatron.data.errors import DataError
from megatron.data.indexed_dataset import OLD_MAGIC, IndexedDataset, index_path
from megatron.data.legacy_dataset import LegacyDataset
from megatron.data.npy_dataset import NpyDataset
from megatron.neox_arguments.values.remote_paths import remote_data_error


def open_dataset(path: str | Path, data_impl: str = "infer") -> IndexedDataset:
    """Open a folder of `.npy` files, or the `.bin/.idx` pair of a prefix.

    data_impl: mmap (format MMIDIDX), cached (TNTIDX, cached/lazy), infer (by the file's first bytes). Raises
    DataError.
    """
    if (remote := remote_data_error(str(path))) is not None:
        raise DataError(remote)
    if Path(path).is_dir() and not index_path(path).exists():
        return NpyDataset(path)
    if data_impl == "infer" and index_path(path).is_file():
        with open(index_path(path), "rb") as file:
            data_impl = "cached" if file.read(len(OLD_MAGIC)) == OLD_MAGIC else "mmap"
    return LegacyDataset(path) if data_impl == "cached" else IndexedDataset(path)
