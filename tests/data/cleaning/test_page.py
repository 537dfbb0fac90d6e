"""The page of a job of cleaning in Chromium: every reason, its count and its samples, nothing fetched."""

import json
from pathlib import Path

import pytest

from megatron.data.cleaning.page import _pair
from tests.data.cleaning.test_clean import ALL, clean, rows
from tests.data.samples import jsonl
from tests.operations.report.chromium import open_sound_page


def test_words_that_differ_are_marked() -> None:
    pair = _pair("A red fox ran.", "A brown fox ran home.")
    assert pair["text"] == [("A ", False), ("red", True), (" fox ", False), ("ran.", True)]
    assert pair["kept"] == [("A ", False), ("brown", True), (" fox ", False), ("ran home.", True)]
    assert _pair("A fox", None) == {"text": [("A fox", False)], "kept": None}


@pytest.mark.browser
@pytest.mark.parametrize("width", [1200, 400])
def test_it_shows_what_went(tmp_path: Path, width: int) -> None:
    source_rows = [*rows(150, seed=3), {"id": "x", "text": "<script>document.title = 'broken'</script>"}]
    flags = [*ALL[:4], "--exact", "document", "--minhash"]
    metadata = clean(tmp_path / "out", jsonl(tmp_path / "raw.jsonl", source_rows), *flags)
    page_state = open_sound_page(tmp_path / "out" / "report.html", width)
    retained = sum(metadata["document_counts"].values())
    assert (
        page_state["title"] == "Cleaning: 151 documents" and f"{retained} of 151 documents stay" in page_state["text"]
    )
    lines = page_state["text"].splitlines()
    for reason, count in metadata["counts"].items():
        assert any(line.split()[:2] == [reason, str(count)] for line in lines), (reason, count)
    page = (tmp_path / "out" / "report.html").read_text()
    for reason, samples in metadata["account"]["samples"].items():
        assert 0 < len(samples) <= min(8, metadata["counts"][reason]) and f"<summary>{reason}: " in page
        assert len({sample[0] for sample in samples}) == len(samples), "no text twice"
    twins = metadata["account"]["samples"]["exact/document"]
    assert twins and all(json.dumps(sample[3]) != "null" for sample in twins)
