"""Data that is no `.bin/.idx` pair of format MMIDIDX: folders of `.npy`, and cached/lazy files."""

import json
import pickle
from operator import itemgetter
from pathlib import Path

import numpy as np
import pytest

from megatron.data import IndexedDataset, fingerprint, open_dataset, write_npy
from megatron.data.index_maps import Packing
from megatron.data.npy_dataset import NpyDataset
from megatron.data.open_dataset import LegacyDataset
from tests.data.samples import DATASET, copy_dataset, poke, refused, write_dataset
from tests.data.test_packing import packed
from tools.datasets import pack_npy

A, LAZY = DATASET / "corpusA_text_document", DATASET / "corpusA_lazy_text_document"


def copy_lazy(folder: Path, change: dict[int, int]) -> Path:
    """The golden pair with 64-bit words of its index changed."""
    copy_dataset(LAZY, folder / "x")
    for word, value in change.items():
        poke(folder / "x.idx", 8 * word, "<Q", value)
    return folder / "x"


def test_data_in_an_object_store_are_refused_with_what_to_do():
    refused("s3://bucket/text_document: .*copy", open_dataset, "s3://bucket/text_document")


def test_neox_lazy_files_hold_what_its_mmap_files_do():
    lazy, mapped = open_dataset(LAZY), IndexedDataset(A)
    assert isinstance(lazy, LegacyDataset) and lazy.dtype == np.int32 and mapped.dtype == np.uint16
    assert len(lazy) == len(mapped) == 80
    for read in (lambda x: x.sizes, lambda x: x.doc_idx, lambda x: x.get(3, 2, 5), *map(itemgetter, range(80))):
        np.testing.assert_array_equal(read(lazy), read(mapped))
    unpickled = pickle.loads(pickle.dumps(lazy))
    assert unpickled.index_sha256 == lazy.index_sha256 and np.array_equal(unpickled[79], lazy[79])


def test_data_impl_says_which_format(tmp_path: Path):
    assert type(open_dataset(LAZY, "cached")) is LegacyDataset
    assert type(open_dataset(A, "infer")) is type(open_dataset(A, "mmap")) is IndexedDataset
    refused("cached/lazy.*data_impl: cached", open_dataset, LAZY, "mmap")
    refused(r"TNTIDX.*data_impl: mmap", open_dataset, A, "cached")
    refused(r"x\.idx: no such file", open_dataset, tmp_path / "x")


@pytest.mark.parametrize(("change", "message"), [
    ({1: 2}, "version 2"), ({2: 6}, "dtype code 6, 4 bytes an item"), ({3: 2}, "dtype code 4, 2 bytes an item"),
    ({4: 79}, "79 sequences"), ({6: 80}, "80 sequences .*80 document boundaries"),
    ({7 + 81 + 40: 5}, "lengths and pointers contradict"),
])  # fmt: skip
def test_damaged_lazy_files_are_named(change: dict[int, int], message: str, tmp_path: Path):
    open_dataset(copy_lazy(tmp_path, {}))
    refused(message, open_dataset, copy_lazy(tmp_path, change))


def npy_folder(tmp_path: Path, width: int = 33, rows_per_shard: int = 50) -> tuple[IndexedDataset, NpyDataset]:
    source = IndexedDataset(A)
    rows, remainder = write_npy(source, tmp_path / "rows", width, rows_per_shard)
    assert (rows, remainder) == divmod(7074, width) == divmod(len(source.tokens), width)
    dataset = open_dataset(tmp_path / "rows")
    assert isinstance(dataset, NpyDataset)
    return source, dataset


def test_npy_rows_are_the_joined_tokens(tmp_path: Path):
    source, rows = npy_folder(tmp_path)
    assert len(rows) == 214 and [len(shard) for shard in rows.shards] == [50, 50, 50, 50, 14]
    np.testing.assert_array_equal(rows.tokens, source.tokens[: 214 * 33])
    np.testing.assert_array_equal(rows[50], source.tokens[50 * 33 : 51 * 33])
    np.testing.assert_array_equal(rows.get(199, 30, 2), source.tokens[199 * 33 + 30 :][:2])
    np.testing.assert_array_equal(rows.span(49, 51), source.tokens[49 * 33 : 51 * 33])
    assert rows.sizes.tolist() == [33] * 214
    # numpy alone reads them, byte for byte
    numpy_tokens = np.concatenate([np.load(path) for path in sorted((tmp_path / "rows").glob("*.npy"))])
    assert numpy_tokens.dtype == np.uint16 and numpy_tokens.tobytes() == source.tokens[: 214 * 33].tobytes()
    unpickled = pickle.loads(pickle.dumps(rows))
    assert unpickled.index_sha256 == rows.index_sha256 and np.array_equal(unpickled[213], rows[213])


def test_npy_rows_are_samples_or_are_joined(tmp_path: Path):
    source, rows = npy_folder(tmp_path)
    samples = packed(rows, 214, 32, 1, Packing("unpacked"))
    sample_rows = np.stack([samples[i].tokens for i in range(len(samples))])
    table = source.tokens[: 214 * 33].reshape(214, 33)
    np.testing.assert_array_equal(np.sort(sample_rows, axis=0), np.sort(table, axis=0))
    assert not np.array_equal(sample_rows, table)
    windows = packed(rows, 100, 64, 1, Packing())
    assert len(windows) == (214 * 33 - 1) // 64 and windows[0].tokens.shape == (65,)


def test_a_folder_of_another_tool_needs_no_metadata(tmp_path: Path):
    for name, start in (("part-1", 100), ("part-0", 0)):
        np.save(tmp_path / f"{name}.npy", np.arange(start, start + 12).reshape(3, 4))
    assert open_dataset(tmp_path).tokens.tolist() == [*range(12), *range(100, 112)]


@pytest.mark.parametrize(("harm", "message"), [
    (lambda folder: (folder / "000001.npy").unlink(), r"000001\.npy: .*metadata\.json"),
    (lambda folder: np.save(folder / "000001.npy", np.ones((3, 33), np.uint16)), r"000001\.npy: .*metadata\.json"),
    (lambda folder: (folder / "metadata.json").write_text("{"), r"metadata\.json: lists no shards"),
    (lambda folder: (folder / "000002.npy").write_bytes(b"\x93NUMPY"), r"000002\.npy: cannot be read as \.npy"),
    (lambda folder: np.save(folder / "000000.npy", np.ones((50, 33))), r"float64 \[50, 33\], expected rows"),
    (lambda folder: np.save(folder / "000000.npy", np.ones((50, 32), np.uint16)), "its shards differ"),
    (lambda folder: [path.unlink() for path in folder.iterdir()], r"no \.npy files in it"),
])  # fmt: skip
def test_damaged_folders_are_named(harm, message: str, tmp_path: Path):
    npy_folder(tmp_path)
    harm(tmp_path / "rows")
    refused(message, open_dataset, tmp_path / "rows")


def test_the_tool(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pack_npy.main([str(A), str(tmp_path / "rows"), "--seq-length", "32", "--rows-per-shard", "100"])
    assert (
        capsys.readouterr().out
        == f"{tmp_path}/rows: 214 rows of 33 tokens; the last 12 tokens do not fill a row and were left out\n"
    )
    assert len(open_dataset(tmp_path / "rows").data_files) == 3
    with pytest.raises(SystemExit, match=r"^pack_npy\.py: error: .*rows: exists already"):
        pack_npy.main([str(A), str(tmp_path / "rows"), "--seq-length", "32"])


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_) -> None:
        raise OSError(28, "No space left on device")

    source = write_dataset(tmp_path / "x", [5, 6])
    refused("11 tokens .*12", write_npy, source, tmp_path / "rows", 12)
    write_npy(source, tmp_path / "rows", 3)
    monkeypatch.setattr(np, "save", full)
    old_files = set(tmp_path.iterdir())
    refused("No space left on device", write_npy, source, tmp_path / "other", 3)
    assert set(tmp_path.iterdir()) == old_files
    assert json.loads((tmp_path / "rows" / "metadata.json").read_text()) == {
        "format": 1, "dtype": "uint16", "width": 3, "tokens": 9, "shards": {"000000.npy": 3},
    }  # fmt: skip


def test_fingerprints_know_the_content(tmp_path: Path):
    npy_folder(tmp_path)
    rows, file = str(tmp_path / "rows"), tmp_path / "rows" / "000003.npy"
    original, shard = fingerprint(rows), np.load(file)
    assert original["bin_bytes"] == sum(path.stat().st_size for path in (tmp_path / "rows").glob("*.npy"))
    shard[7, 7] += 1
    np.save(file, shard)
    changed = fingerprint(rows)
    assert changed["bin_blocks_sha256"] != original["bin_blocks_sha256"]
    assert changed["idx_sha256"] == original["idx_sha256"]
    assert fingerprint(str(LAZY)) != fingerprint(str(A))
