"""Golden files and small datasets for the tests of this room."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from megatron.data import IndexedDataset, IndexedDatasetWriter
from megatron.data.index_maps import IndexMaps
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.keys.declaration import keys_of

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parent / "golden"
DATASET = GOLDEN / "dataset"
INDEXMAPS = GOLDEN / "indexmaps"
TOKENIZER = DATASET / "tokenizer.json"


def write_rows(prefix: Path, rows: Sequence[Any], dtype: type = np.int32) -> str:
    """A dataset with a document of each row; its prefix."""
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for row in rows:
            writer.add_document(np.asarray(row, dtype))
    return str(prefix)


def rows_of(prefix: Path | str) -> list[list[Any]]:
    """What the documents of a dataset hold."""
    dataset = IndexedDataset(prefix)
    return [dataset[i].tolist() for i in range(len(dataset))]


def pair(prefix: Path | str) -> tuple[bytes, bytes]:
    """The bytes of both files of a dataset."""
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def jsonl(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def plain_args(**changes: Any) -> SimpleNamespace:
    """Every key at its default but for these; nothing is derived or checked."""
    defaults = {name: key.default for name, key in keys_of(NeoXArgs).items()}
    return SimpleNamespace(**defaults | {"user_values": {}} | changes)


def golden_json(name: str) -> dict:
    return json.loads((INDEXMAPS / name).read_text())


def golden_maps(case: str) -> IndexMaps:
    return IndexMaps(**{name: np.load(INDEXMAPS / case / f"{name}.npy") for name in IndexMaps.__dataclass_fields__})


def assert_equal_maps(found: Any, expected: Any) -> None:
    assert vars(found).keys() == vars(expected).keys()
    for name, array in vars(expected).items():
        assert getattr(found, name).dtype == array.dtype
        np.testing.assert_array_equal(getattr(found, name), array, err_msg=name)


def write_dataset(prefix: Path, lengths: list[int], seed: int = 0, dtype: type = np.uint16) -> IndexedDataset:
    """A dataset of random tokens below 100 with documents of these lengths."""
    random = np.random.default_rng(seed)
    write_rows(prefix, [random.integers(0, 100, length) for length in lengths], dtype)
    return IndexedDataset(prefix)
