"""Golden files and small datasets for the tests of this room."""

import json
import shutil
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron.data import DataError, IndexedDataset, IndexedDatasetWriter
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
    """Returns the tokens of each document of a dataset."""
    dataset = IndexedDataset(prefix)
    return [dataset[i].tolist() for i in range(len(dataset))]


def pair(prefix: Path | str) -> tuple[bytes, bytes]:
    """The bytes of both files of a dataset."""
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def copy_dataset(source: Path | str, prefix: Path) -> str:
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{source}{suffix}", f"{prefix}{suffix}")
    return str(prefix)


def poke(file: Path, offset: int, layout: str, value: object) -> None:
    """Put a value into a file; offsets below zero count from its end."""
    content = bytearray(file.read_bytes())
    struct.pack_into(layout, content, offset, value)
    file.write_bytes(content)


def jsonl(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def json_rows(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def gpt2_files(folder: Path) -> tuple[Path, Path]:
    """GPT-2's vocabulary and merges, of the golden byte-level BPE."""
    model = json.loads(TOKENIZER.read_text())["model"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    vocabulary_file, merges_file = folder / "gpt2-vocab.json", folder / "gpt2-merges.txt"
    vocabulary_file.write_text(json.dumps(model["vocab"]))
    merges_file.write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    return vocabulary_file, merges_file


def refused(message: str, call: Callable, *args: Any, **options: Any) -> None:
    with pytest.raises(DataError, match=message):
        call(*args, **options)


def plain_args(**changes: Any) -> SimpleNamespace:
    """Every key at its default but for these; nothing is derived or checked."""
    defaults = {name: key.default for name, key in keys_of(NeoXArgs).items()}
    return SimpleNamespace(**defaults | {"user_values": {}} | changes)


def golden_json(name: str) -> dict:
    return json.loads((INDEXMAPS / name).read_text())


def golden_maps(case: str) -> IndexMaps:
    return IndexMaps(**{name: np.load(INDEXMAPS / case / f"{name}.npy") for name in IndexMaps.__dataclass_fields__})


def assert_equal_maps(actual: Any, expected: Any) -> None:
    assert vars(actual).keys() == vars(expected).keys()
    for name, array in vars(expected).items():
        assert getattr(actual, name).dtype == array.dtype
        np.testing.assert_array_equal(getattr(actual, name), array, err_msg=name)


def write_dataset(prefix: Path, lengths: list[int], seed: int = 0, dtype: type = np.uint16) -> IndexedDataset:
    """A dataset of random tokens below 100 with documents of these lengths."""
    random = np.random.default_rng(seed)
    write_rows(prefix, [random.integers(0, 100, length) for length in lengths], dtype)
    return IndexedDataset(prefix)
