"""`.bin/.idx` pairs with wrong headers, tables and sizes."""

import struct
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from megatron.data import IndexedDataset, open_dataset, write_npy
from megatron.data.indexed_dataset import HEADER, OLD_MAGIC
from megatron.data.open_dataset import HEADER as CACHED
from tests.data.samples import write_rows
from tests.fuzz.campaign import Kind, command
from tests.fuzz.cases import Case
from tests.fuzz.mutations import odd_files, spoilt_bytes, spoilt_folder
from tools.datasets import inspect_samples, merge_datasets, verify

_NUMBERS = (0, 1, 2, 3, 7, 8, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
_FIELDS = ((9, "<Q"), (17, "<B"), (18, "<Q"), (26, "<Q"))  # of the header


@cache
def _pair(dtype: str) -> dict[str, bytes]:
    with TemporaryDirectory() as folder:
        write_rows(Path(folder) / "a", [[1, 2, 3], [4], [5, 6, 7, 8]], np.dtype(dtype).type)
        return {suffix: (Path(folder) / f"a.{suffix}").read_bytes() for suffix in ("bin", "idx")}


@cache
def _older() -> dict[str, bytes]:
    """A pair in the cached format (TNTIDX) of three documents."""
    tokens, sizes = np.arange(1, 9, dtype=np.int32), np.array([3, 1, 4])
    ends = np.concatenate([[0], np.cumsum(sizes)])
    header = CACHED.pack(OLD_MAGIC.ljust(8, b"\0"), 1, 4, 4, 3, 3, 4)
    tables = b"".join(part.astype("<i8").tobytes() for part in (np.arange(4), ends, sizes, np.arange(4)))
    return {"idx": header + tables, "bin": tokens.tobytes()}


@cache
def _npy() -> dict[str, bytes]:
    """A folder of `.npy` shards."""
    with TemporaryDirectory() as folder:
        write_npy(IndexedDataset(write_rows(Path(folder) / "a", [list(range(8))])), Path(folder) / "npy", 2, 2)
        return {file.name: file.read_bytes() for file in (Path(folder) / "npy").iterdir()}


@st.composite
def _shards(draw: DrawFn) -> Case:
    files = {**_npy(), **draw(spoilt_folder(_npy(), ["metadata.json"]))}
    return {f"data_text_document/{name}": entry for name, entry in files.items()}


@st.composite
def _cached(draw: DrawFn) -> Case:
    pair = _older()
    content = bytearray(pair["idx"])
    if draw(st.booleans()):
        offset = 8 * draw(st.integers(1, len(content) // 8 - 1))
        struct.pack_into("<Q", content, offset, draw(st.sampled_from(_NUMBERS)))
    spoilt = draw(spoilt_bytes(bytes(content))) if draw(st.integers(0, 3)) == 0 else bytes(content)
    return {"data_text_document.idx": spoilt, "data_text_document.bin": pair["bin"]}


@st.composite
def _cases(draw: DrawFn) -> Case:
    pair: dict[str, Any] = dict(_pair(draw(st.sampled_from(["uint16", "int32", "float32"]))))
    match draw(st.sampled_from(["header", "table", "table", "bytes", "file"])):
        case "header":
            content = bytearray(pair["idx"])
            for _ in range(draw(st.integers(1, 2))):
                offset, layout = draw(st.sampled_from(_FIELDS))
                struct.pack_into(
                    layout, content, offset, draw(st.sampled_from(_NUMBERS)) % 2 ** (8 * struct.calcsize(layout))
                )
            pair["idx"] = bytes(content)
        case "table":
            content = bytearray(pair["idx"])
            for _ in range(draw(st.integers(1, 3))):
                offset = draw(st.integers(HEADER.size, len(content) - 4))
                struct.pack_into("<I", content, offset, draw(st.sampled_from(_NUMBERS)) % 2**32)
            pair["idx"] = bytes(content)
        case "bytes":
            name = draw(st.sampled_from(["bin", "idx"]))
            pair[name] = draw(spoilt_bytes(pair[name]))
        case "file":
            pair[draw(st.sampled_from(["bin", "idx"]))] = draw(odd_files)
    suffix = draw(st.sampled_from(["_text_document", "_text_document", "_label_document", "_reward_document"]))
    return {f"data{suffix}.{name}": entry for name, entry in pair.items()} | (
        {f"data_text_document.{name}": entry for name, entry in _pair("int32").items()} if "text" not in suffix else {}
    )


def _run(folder: Path) -> None:
    prefix = next(iter(folder.glob("*.idx")), folder / "data_text_document.idx").with_suffix("")
    dataset = open_dataset(prefix)
    for sequence in range(len(dataset)):
        dataset[sequence].sum()
    dataset.span(0, len(dataset))
    name = prefix if prefix.is_dir() else folder / "data"
    command(verify.main, name, "--vocab-size", 100)
    command(inspect_samples.main, name, "--tokenizer-type", "CharLevelTokenizer")
    if not prefix.is_dir():
        command(
            merge_datasets.main, "--input", folder, "--output-prefix", folder / "merged", "--match", "*text_document"
        )


KIND = Kind("indexed_data", st.one_of(_cases(), _cases(), _cached(), _shards()), _run)
