"""Runs on disk read together: the same as one sort in memory, whatever a piece holds."""

from pathlib import Path

import numpy as np
import pytest

from megatron.data.cleaning.exact import hash_records, pieces, remove_pieces, repeats_across_parts
from megatron.data.cleaning.sorted_runs import document_numbers, merged, rows_of_part, write_run

RECORD = np.dtype([("key", "<u8"), ("document", "<u8")])


@pytest.mark.parametrize("at_once", [1, 7, 100, 10**6])
def test_pieces_are_one_sort(tmp_path: Path, at_once: int) -> None:
    draw = np.random.default_rng(0)
    runs = []
    for part in range(5):
        records = np.empty(int(draw.integers(0, 60)), RECORD)
        records["key"] = draw.integers(0, 2**64, len(records), dtype=np.uint64) // np.uint64(2**59) * np.uint64(2**59)
        records["key"][: len(records) // 4] = (0, 2**64 - 1, 2**63, 1)[part % 4]
        records["document"] = document_numbers(part, np.arange(len(records)))
        write_run(tmp_path / f"{part}.npy", records)
        runs.append(records)
    all_records = np.concatenate(runs)
    expected = all_records[np.argsort(all_records["key"], kind="stable")]
    pieces = list(merged([tmp_path / f"{part}.npy" for part in range(5)], at_once))
    assert np.array_equal(np.concatenate(pieces), expected)
    keys = [set(piece["key"].tolist()) for piece in pieces]
    assert sum(map(len, keys)) == len(set().union(*keys)), "no key in two of them"
    assert len(pieces) == 1 if at_once > 1000 else len(pieces) > 1
    assert [len(piece) for piece in merged([tmp_path / "0.npy"], 10**6)] == [len(runs[0])] * bool(len(runs[0]))


def test_numbers_of_documents() -> None:
    numbers = np.concatenate([document_numbers(part, np.array([0, 3, 2**32 - 1])) for part in (0, 2, 3)])
    assert (np.diff(numbers.astype(object)) > 0).all()
    for part, rows in ((0, [0, 3, 2**32 - 1]), (1, []), (2, [0, 3, 2**32 - 1]), (3, [0, 3, 2**32 - 1]), (4, [])):
        assert rows_of_part(numbers, part).tolist() == rows


def test_what_has_stood_before_in_an_earlier_part(tmp_path: Path) -> None:
    texts, repeats = [["a b", "c", "a  b", "d"], ["d", "e"], ["c\n", "c"]], []
    for part, part_texts in enumerate(texts):
        records, part_repeats = hash_records(enumerate(part_texts), part, "document", 0)
        write_run(tmp_path / f"{part}.npy", records)
        repeats.append(part_repeats)
    assert [len(part_repeats) for part_repeats in repeats] == [1, 0, 1], "what a part repeats of itself is not a record"
    repeats += repeats_across_parts([tmp_path / f"{part}.npy" for part in range(3)])
    places = {
        (int(record["document"]) >> 32, int(record["document"]) & 0xFFFFFFFF) for record in np.concatenate(repeats)
    }
    assert places == {(0, 2), (1, 0), (2, 0), (2, 1)}


@pytest.mark.parametrize("scope", ["line", "paragraph"])
def test_a_text_without_none_of_its_pieces_is_itself(scope: str) -> None:
    text = "one\ntwo\n\n  \nthree\n\nfour\nfive"
    assert remove_pieces(text, scope, []) == text and "".join(pieces(text, scope)) == text
    count = len(pieces(text, scope)[::2])
    assert remove_pieces(text, scope, range(count)) == ""
    assert remove_pieces("a\nb\nc", "line", [2]) == "a\nb" and remove_pieces("a\nb\nc", "line", [0]) == "b\nc"
