"""Golden files and small datasets for the tests of this room."""

import json
from pathlib import Path

import numpy as np

from megatron.data import IndexedDataset, IndexedDatasetWriter
from megatron.data.index_maps import IndexMaps

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parent / "golden"
DATASET = GOLDEN / "dataset"
INDEXMAPS = GOLDEN / "indexmaps"
TOKENIZER = DATASET / "tokenizer.json"


def golden_json(name: str) -> dict:
    return json.loads((INDEXMAPS / name).read_text())


def golden_maps(case: str) -> IndexMaps:
    return IndexMaps(**{name: np.load(INDEXMAPS / case / f"{name}.npy") for name in IndexMaps.__dataclass_fields__})


def write_dataset(prefix: Path, lengths: list[int], seed: int = 0, dtype: type = np.uint16) -> IndexedDataset:
    """A dataset of random tokens below 100 with documents of these lengths."""
    random = np.random.default_rng(seed)
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for length in lengths:
            writer.add_document(random.integers(0, 100, length).astype(dtype))
    return IndexedDataset(prefix)
