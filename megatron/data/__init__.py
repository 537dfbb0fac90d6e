"""Data room: `.bin/.idx` files, their index maps and sets, text preprocessing (numpy), and the Batch the model reads.

The names that need torch (Batch, collate, loaders) are imported on first use: the tools start without torch.
"""

import importlib
from typing import TYPE_CHECKING

from megatron.data.blending import build_blend
from megatron.data.curriculum import check_curriculum, has_curriculum, row_length, step_length
from megatron.data.datasets import (
    Datasets,
    SampleSet,
    build_datasets,
    epoch_iterations,
    holds_answers,
    rows_per_sample,
    split_boundaries,
    unigram_entropy,
)
from megatron.data.errors import DataError
from megatron.data.fingerprints import data_fingerprint, fingerprint, order_keys, order_sha256, path_key
from megatron.data.index_maps import Begun, build_packed
from megatron.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron.data.log_lines import data_notes
from megatron.data.npy_dataset import write_npy
from megatron.data.preprocessing.encode_job import EncodeJob
from megatron.data.preprocessing.job_runner import Progress, Result, preprocess
from megatron.data.storage import open_dataset

if TYPE_CHECKING:
    from megatron.data.batch import Batch
    from megatron.data.loader import cause_of, collation, eval_batches, train_loader


__all__ = [
    "Batch",
    "Begun",
    "DataError",
    "Datasets",
    "EncodeJob",
    "IndexedDataset",
    "IndexedDatasetWriter",
    "Progress",
    "Result",
    "SampleSet",
    "build_blend",
    "build_datasets",
    "build_packed",
    "cause_of",
    "check_curriculum",
    "collation",
    "data_fingerprint",
    "data_notes",
    "epoch_iterations",
    "eval_batches",
    "fingerprint",
    "has_curriculum",
    "holds_answers",
    "open_dataset",
    "order_keys",
    "order_sha256",
    "path_key",
    "preprocess",
    "row_length",
    "rows_per_sample",
    "split_boundaries",
    "step_length",
    "train_loader",
    "unigram_entropy",
    "write_npy",
]

_NEED_TORCH = {
    "Batch": "batch",
    "cause_of": "loader",
    "collation": "loader",
    "eval_batches": "loader",
    "train_loader": "loader",
}


def __getattr__(name: str):
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_NEED_TORCH[name]}"), name)
