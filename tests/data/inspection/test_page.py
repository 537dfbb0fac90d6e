"""The page of a dataset's samples and statistics: what it lists, and in Chromium at two widths."""

from pathlib import Path

import pytest

from megatron.data.indexed_dataset import IndexedDatasetWriter
from megatron.data.inspection.file_groups import find_file_groups
from megatron.data.inspection.render import MOST_SPECIAL, page
from megatron.data.inspection.samples import StoredDocuments
from megatron.data.inspection.statistics import dataset_stats, histogram
from tests.operations.report.chromium import open_sound_page

WORDS = {2: "<pad>", **{100 + number: f"<extra_{number}>" for number in range(60)}, 7: "<never>"}


class Words:
    """Each token is a word; those of WORDS are special."""

    special_tokens = WORDS
    vocab_size = 200

    def detokenize(self, tokens: list[int]) -> str:
        return "".join(WORDS.get(token, f" word{token}") for token in tokens)


@pytest.fixture
def html(tmp_path: Path) -> Path:
    """The page of two documents, the frequent with a script, the rare with 40 special tokens."""
    with IndexedDatasetWriter(tmp_path / "a_text_document", "int32") as writer:
        writer.add_document([11, 2, 12, 2])
        writer.add_document([*range(100, 140), 100])
    groups = find_file_groups(str(tmp_path / "a_text_document"))
    stats = [dataset_stats(groups[0], WORDS)]
    samples = StoredDocuments(groups)
    text = page("<b>a</b>", [samples[0], samples[1]], Words(), stats, histogram({"a": stats[0].lengths}))
    file = tmp_path / "a.html"
    file.write_text(text)
    return file


def test_special_tokens_that_occur_are_listed(html: Path) -> None:
    text = html.read_text()
    assert "&lt;b&gt;a&lt;/b&gt;" in text and "&lt;never&gt;</td>" not in text
    assert f"the {MOST_SPECIAL} most frequent of 41 that occur" in text
    assert text.count("&gt;</td>") == MOST_SPECIAL
    frequent, rare = (text.index(f'<td class="number">{name}</td>') for name in ("&lt;pad&gt;", "&lt;extra_1&gt;"))
    assert frequent < rare


@pytest.mark.browser
@pytest.mark.parametrize("width", [1200, 400])
def test_in_chromium(html: Path, width: int) -> None:
    answers = open_sound_page(html, width)
    assert answers["title"] == "<b>a</b>" and "word11" in answers["text"]
