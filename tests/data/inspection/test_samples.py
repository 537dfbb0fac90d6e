"""Viewers show the stored tokens, and which of them are trained."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megatron.data import IndexedDataset
from megatron.data.batch import collate_samples
from megatron.data.inspection import samples
from megatron.data.inspection.file_groups import FileGroup, find_file_groups
from megatron.data.inspection.render import terminal, visible
from megatron.data.inspection.samples import PADDING, TRAINED, DisplayedPart, PackedRows, StoredDocuments, text_spans
from megatron.data.inspection.statistics import CANDIDATE_LENGTHS, dataset_stats, histogram, table
from megatron.tokenizer import HFTokenizer
from megatron.tokenizer.sentencepiece_tokenizer import SPMTokenizer
from tests.data.samples import DATASET, TOKENIZER, write_dataset, write_rows

CHAT = DATASET / "chat_kto_conversation_document"
HF = HFTokenizer(TOKENIZER)


def text_of(part: DisplayedPart, tokenizer) -> str:
    return "".join(span.text for span in text_spans(part, tokenizer))


def stored(kind: str) -> np.ndarray:
    return np.fromfile(f"{CHAT}".replace("_document", f"{kind}_document.bin"), "<i4")


def test_columns_are_found():
    def names(prefix: str) -> list[tuple[str, bool, bool]]:
        return [(c.name, c.label is not None, c.reward is not None) for c in find_file_groups(DATASET / prefix)]

    assert names("corpusA_text_document") == names("corpusA_text_document.bin") == [("text", False, False)]
    assert names("chat_kto") == [("conversation", True, True)]
    assert names("instruct") == [("text", True, False)], "preprocess_data_with_mask.py names labels without the key"
    pair = [("chosen", True, False), ("rejected", True, False)]
    assert names("pairs_chosen_document") == names("pairs_rejected_document") == pair
    assert [len(group) for group in samples.group_pairs(find_file_groups(DATASET / "pairs_chosen_document"))] == [2]


def test_documents_are_shown_in_full():
    source = StoredDocuments(find_file_groups(CHAT))
    labels, rewards, text = stored("_label"), stored("_reward"), IndexedDataset(CHAT)
    for index in range(len(source)):
        (view,) = source[index]
        (part,) = view.parts
        spans, start = list(text_spans(part, HF)), int(text.pointers[index]) // 4
        assert text_of(part, HF) == HF.detokenize(text[index]) + "<|endoftext|>" and view.reward == rewards[index]
        document_labels = labels[start : start + len(text[index])]
        assert view.count(TRAINED) == (document_labels != -100).sum()
        trained = "".join(span.text for span in spans if span.kind == "trained")
        assert trained == HF.detokenize(document_labels[document_labels != -100]) + (
            "<|endoftext|>" if document_labels[-1] != -100 else ""
        )
        assert spans[0].start == 0 and sum(span.tokens for span in spans) == len(text[index])


def test_text_survives_splitting_into_spans(tmp_path: Path):
    """Blanks that a decoder drops at the beginning, and characters of several tokens, are in a span."""
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "t").write_text("the quick brown fox jumps over it\n" * 50)
    sentencepiece.SentencePieceTrainer.train(input=str(tmp_path / "t"), model_prefix=str(tmp_path / "m"),
                                             vocab_size=300, byte_fallback=True, minloglevel=2,
                                             hard_vocab_limit=False)  # fmt: skip
    for tokenizer, text in ((SPMTokenizer(tmp_path / "m.model"), "the fox jumps over it"), (HF, "the fox, é and 漢")):
        ids = np.array(tokenizer.tokenize(text))
        for boundary in range(1, len(ids)):
            kinds = np.where(np.arange(len(ids)) < boundary, 0, 1)
            rendered = text_of(DisplayedPart("document 0", ids, kinds), tokenizer)
            assert "\ufffd" in rendered or rendered == text, boundary
    foreign = DisplayedPart("document 0", np.array([HF.eod, 380, -1]), np.zeros(3, int))
    unknown = [f"<{number}: not in the vocabulary>" for number in (380, -1)]
    assert [span.text for span in text_spans(foreign, HF)] == ["<|endoftext|>", *unknown]


@pytest.mark.parametrize("pack_impl", ["packed", "pack_until_overflow", "unpacked", "best_fit"])
def test_rows_are_what_is_trained(pack_impl: str):
    """Against the batch the model is given."""
    rows = PackedRows(find_file_groups(CHAT)[0], 300, pack_impl, seed=7)
    for index in range(len(rows)):
        (view,) = rows[index]
        kinds, tokens = (np.concatenate([getattr(part, name) for part in view.parts]) for name in ("kinds", "tokens"))
        batch = collate_samples([rows._set[index]])
        assert np.array_equal(batch.tokens[0], tokens[:-1])
        assert np.array_equal(batch.loss_weights[0], kinds[1:] == TRAINED) and kinds[0] != TRAINED
        assert (tokens[kinds == PADDING] == 0).all() and not batch.loss_weights[0][kinds[1:] == PADDING].any()
    if pack_impl == "unpacked":
        assert {len(rows[i][0].parts) for i in range(len(rows))} == {2}, "a document, and padding"


def test_rows_begin_where_documents_do(tmp_path: Path):
    write_dataset(tmp_path / "x_document", [5, 3, 4])
    (view,) = PackedRows(FileGroup("x", str(tmp_path / "x_document")), 11, "packed", seed=1)[0]
    assert sorted(len(part.tokens) for part in view.parts) == [3, 4, 5]
    assert "".join(sorted(part.name for part in view.parts)) == "document 0document 1document 2"


def test_terminal():
    (view,) = StoredDocuments(find_file_groups(CHAT))[0]
    uncoloured = terminal(view, HF, colour=False)
    assert uncoloured.startswith("━━ document 0 · 174 tokens · 75 trained, 99 masked · reward 1\n")
    assert "── document 0, positions 0–173\n[system] The quiet copper" in uncoloured and "«<|endoftext|>»" in uncoloured
    coloured = terminal(view, HF, colour=True)
    assert "\x1b[2m[user] The patient bridge warms the saddle.\x1b[0m\n" in coloured
    assert "\x1b[32m" in coloured and "«" not in coloured
    assert visible("a\x1b[31mb\x9b\x00\n\t") == "a␛[31mb\ufffd␀\n\t", "data cannot drive the terminal"


def test_stats(tmp_path: Path):
    stats = dataset_stats(find_file_groups(CHAT)[0], HF.special_tokens)
    text, labels = stored(""), stored("_label")
    assert stats.special == {"<|endoftext|>": (text == 0).sum(), "<|padding|>": (text == 1).sum()}
    assert stats.trained == (labels != -100).mean() and stats.rewards == {-1: 18, 1: 6}
    sizes = np.sort(IndexedDataset(CHAT).sizes)
    assert stats.percentiles[50] == sizes[12] and stats.percentiles[100] == sizes[-1] and stats.tokens == len(text)
    assert histogram({"chat": stats.lengths}).startswith(b"\x89PNG")
    assert histogram({"nothing": np.zeros(3, np.int64)}).startswith(b"\x89PNG")

    documents = [[1, 2, 3], [4] * 1500, [1, 2, 3], [], [5] * 600, [1, 2, 3, 4], [6] * 3000, [7] * 400]
    write_rows(tmp_path / "x_document", documents, np.uint16)
    write_rows(tmp_path / "x_label_document", [row if i % 2 else [-100] * len(row) for i, row in enumerate(documents)])
    stats = dataset_stats(find_file_groups(tmp_path / "x_document")[0], {})
    assert (stats.documents, stats.empty, stats.duplicates, stats.untrained_documents) == (8, 1, 1, 4)
    assert Counter(stats.lengths.tolist()) == Counter(map(len, documents))
    row = stats.packing[CANDIDATE_LENGTHS.index(1024)]
    truncated_lengths = [3, 1024, 3, 600, 4, 1024, 400]
    assert row.fit == 5 / 7 and row.unpacked == pytest.approx(sum(truncated_lengths) / (7 * 1024))
    assert row.best_fit == pytest.approx(sum(truncated_lengths) / (3 * 1024)), "1024 | 1024 | 600 + 400 + 4 + 3 + 3"
    assert row.next_fit == pytest.approx(sum(truncated_lengths) / (5 * 1024)), "3 | 1024 | 3 + 600 + 4 | 1024 | 400"
    ends = np.cumsum([3, 1500, 3, 600, 4, 3000, 400])
    cuts = [any(b % 1024 == 0 for b in range(s + 1, e)) for s, e in zip([0, *ends], ends, strict=False)]
    assert row.packed_cuts == sum(cuts) / 7
    assert len(table(stats)) == 5 + len(CANDIDATE_LENGTHS)
    assert samples.KINDS[TRAINED] == "trained"
