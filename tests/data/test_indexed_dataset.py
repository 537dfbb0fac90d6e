"""`.bin/.idx` files: what is written, what is read back, and what is refused."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron.data import DataError, IndexedDataset, IndexedDatasetWriter
from megatron.data.indexed_dataset import best_fitting_dtype
from tests.data.samples import DATASET, pair, poke, refused, rows_of, write_dataset, write_rows


@pytest.mark.parametrize("name", ["corpusA_text_document", "corpusB_text_document", "ascii_char_text_document"])
def test_a_golden_pair_read_and_written_again_is_the_same_file(name: str, tmp_path: Path):
    write_rows(tmp_path / "copy", rows_of(DATASET / name), IndexedDataset(DATASET / name).dtype)
    assert pair(tmp_path / "copy") == pair(DATASET / name)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16])
def test_every_integer_type_comes_back(dtype: type, tmp_path: Path):
    dataset = IndexedDataset(write_rows(tmp_path / "x", [[1, 2, 3], [], [100, 0]], dtype))
    assert dataset.dtype == dtype and rows_of(tmp_path / "x") == [[1, 2, 3], [100, 0]]
    # An empty document is a boundary without a sequence
    assert dataset.doc_idx.tolist() == [0, 1, 1, 2]


@pytest.mark.parametrize("code", [6, 7])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_floats_are_read_whoever_numbered_their_type(dtype: type, code: int, tmp_path: Path):
    """6 and 7: float32 and float64 in GPT-NeoX, float64 and float32 in Megatron-core; we write the first."""
    write_rows(tmp_path / "x", [[0.5, -1.25], [], [3.75]], np.float32)
    assert (tmp_path / "x.idx").read_bytes()[17] == 6
    poke(tmp_path / "x.idx", 17, "<B", code)
    poke(tmp_path / "x.idx", 34 + 2 * 4 + 8, "<q", 2 * np.dtype(dtype).itemsize)
    (tmp_path / "x.bin").write_bytes(np.array([0.5, -1.25, 3.75], dtype).tobytes())
    assert IndexedDataset(tmp_path / "x").dtype == dtype and rows_of(tmp_path / "x") == [[0.5, -1.25], [3.75]]


def test_parts_of_a_sequence_and_spans(tmp_path: Path):
    dataset = write_dataset(tmp_path / "x", [5, 0, 7, 3])
    all_tokens = np.concatenate([dataset[i] for i in range(len(dataset))])
    assert dataset.get(1, 2, 3).tolist() == all_tokens[7:10].tolist()
    assert dataset.get(1, 2).tolist() == all_tokens[7:12].tolist()
    assert dataset.span(1, 3).tolist() == all_tokens[5:15].tolist()
    assert len(dataset.span(2, 2)) == 0


def test_dtype_rule_of_neox():
    assert [best_fitting_dtype(v) for v in (380, 65499, 65500, None)] == [np.uint16, np.uint16, np.int32, np.int32]


def test_many_documents_at_once_equal_one_by_one(tmp_path: Path):
    dataset = write_dataset(tmp_path / "one", [3, 0, 4, 1])
    with IndexedDatasetWriter(tmp_path / "many", np.uint16) as writer:
        writer.add_documents(dataset.tokens[:3], [3, 0])
        writer.add_documents(dataset.tokens[3:], [4, 1])
    assert pair(tmp_path / "one") == pair(tmp_path / "many")


def test_nothing_is_visible_before_the_end_and_a_failed_write_spares_the_old_pair(tmp_path: Path):
    with IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
        writer.add_document([1, 2, 3])
        assert not list(tmp_path.glob("x.*"))
    old_pair = pair(tmp_path / "x")
    with pytest.raises(RuntimeError), IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
        writer.add_document([4])
        raise RuntimeError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx"] and pair(tmp_path / "x") == old_pair


@pytest.mark.parametrize("tokens", [np.array([70000]), np.array([-1]), np.array([0.5])])
def test_tokens_that_do_not_fit_are_refused(tokens: np.ndarray, tmp_path: Path):
    with pytest.raises(DataError, match="do not fit uint16"), IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
        writer.add_document(tokens)


# What is done to index and data, and what is said
DAMAGE: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "missing": (lambda i, b: b.unlink(), r"x\.bin: no such file.*without .bin/.idx"),
    "empty index": (lambda i, b: _truncate(i, 0), r"x\.idx: .* 0 bytes"),
    "foreign": (lambda i, b: i.write_bytes(b"{}" * 100), r"x\.idx: not an index"),
    "short header": (lambda i, b: _truncate(i, 20), r"x\.idx: .* 20 bytes"),
    "cut index": (lambda i, b: _truncate(i, -8), r"x\.idx: 74 bytes.* 82"),
    "cut data": (lambda i, b: _truncate(b, -2), r"x\.bin: 20 bytes.* 22.*preprocess_data.py"),
    "longer data": (lambda i, b: b.write_bytes(bytes(24)), r"x\.bin: 24 bytes"),
    "version": (lambda i, b: poke(i, 9, "<Q", 2), r"x\.idx: .*version 2"),
    "dtype": (lambda i, b: poke(i, 17, "<B", 99), r"x\.idx: .*dtype code 99"),
    "count": (lambda i, b: poke(i, 18, "<Q", 1 << 60), r"x\.idx: .* bytes, but its header"),
    "length": (lambda i, b: poke(i, 34, "<i", -5), r"x\.idx: .*lengths and pointers"),
    "pointer": (lambda i, b: poke(i, 34 + 4 * 2 + 8, "<q", 4), r"x\.idx: .*lengths and pointers"),
    "boundary": (lambda i, b: poke(i, -8, "<q", 7), r"x\.idx: .*document boundaries"),
}


def _truncate(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(kind: str, tmp_path: Path):
    write_dataset(tmp_path / "x", [5, 6])
    damage, message = DAMAGE[kind]
    damage(tmp_path / "x.idx", tmp_path / "x.bin")
    refused(message, IndexedDataset, tmp_path / "x")


@pytest.mark.parametrize("boundary", [2, 0, 1 << 40, -1])
def test_wrong_boundaries_are_refused_where_they_are_used(boundary: int, tmp_path: Path):
    """Training reads sequences alone: a pair of wrong boundaries is trained as ever."""
    write_dataset(tmp_path / "x", [5, 6])
    poke(tmp_path / "x.idx", -16, "<q", boundary)
    dataset = IndexedDataset(tmp_path / "x")
    assert len(dataset[1]) == 6
    with pytest.raises(DataError, match=r"x\.idx: document \d is sequences"):
        _ = dataset.doc_idx


def test_the_old_lazy_format_is_refused_by_name(tmp_path: Path):
    (tmp_path / "x.idx").write_bytes((DATASET / "corpusA_lazy_text_document.idx").read_bytes())
    (tmp_path / "x.bin").write_bytes(b"")
    refused("old cached/lazy format; set data_impl: cached", IndexedDataset, tmp_path / "x")


def test_an_empty_pair_can_be_opened(tmp_path: Path):
    assert len(write_dataset(tmp_path / "x", [])) == 0
