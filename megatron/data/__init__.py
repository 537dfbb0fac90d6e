"""Reads training data: `.bin/.idx` files, their index maps, a run's train, validation and test sets, and
`Batch`.

`preprocessing/` makes these files from raw text, and `inspection/` shows and checks them; training imports
neither. Names that need torch (Batch, the loaders) are imported on first use, so that tools start without
torch.
"""

import importlib
from typing import TYPE_CHECKING

from megatron.data.blending import build_blend
from megatron.data.build import build_datasets, epoch_iterations
from megatron.data.curriculum import check_curriculum, has_curriculum, row_length, step_length
from megatron.data.errors import DataError
from megatron.data.fingerprints import (
    FileStamp,
    data_fingerprint,
    data_stamps,
    fingerprint,
    order_keys,
    order_sha256,
    path_key,
)
from megatron.data.index_maps import DataState, build_packed
from megatron.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron.data.log_lines import data_log_lines
from megatron.data.npy_dataset import write_npy
from megatron.data.open_dataset import open_dataset
from megatron.data.run_datasets import Datasets, SampleSet
from megatron.data.set_config import rows_per_sample, split_boundaries, trains_preferences

if TYPE_CHECKING:
    from megatron.data.batch import Batch
    from megatron.data.loader import collation, eval_batches, root_cause, train_loader


__all__ = [
    "Batch",
    "DataError",
    "DataState",
    "Datasets",
    "FileStamp",
    "IndexedDataset",
    "IndexedDatasetWriter",
    "SampleSet",
    "build_blend",
    "build_datasets",
    "build_packed",
    "check_curriculum",
    "collation",
    "data_fingerprint",
    "data_stamps",
    "data_log_lines",
    "epoch_iterations",
    "eval_batches",
    "fingerprint",
    "has_curriculum",
    "open_dataset",
    "order_keys",
    "order_sha256",
    "path_key",
    "root_cause",
    "row_length",
    "rows_per_sample",
    "split_boundaries",
    "step_length",
    "train_loader",
    "trains_preferences",
    "write_npy",
]

_NEED_TORCH = {
    "Batch": "batch",
    **dict.fromkeys(("collation", "eval_batches", "root_cause", "train_loader"), "loader"),
}


def __getattr__(name: str):
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_NEED_TORCH[name]}"), name)
