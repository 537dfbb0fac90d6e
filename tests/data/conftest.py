"""Fixtures that several files of this folder use."""

from pathlib import Path

import pytest

from megatron.data import build_packed
from megatron.data.packed_dataset import PackedDataset
from tests.data.samples import write_dataset


@pytest.fixture
def dataset(tmp_path: Path) -> PackedDataset:
    """Samples of 8 tokens, of short and long documents."""
    indexed = write_dataset(tmp_path / "x", [30, 5, 41, 2, 17] * 4)
    return PackedDataset(indexed, build_packed(indexed.sizes, 0, len(indexed), 50, 8, 3), 8)
