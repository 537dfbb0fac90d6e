"""Texts too long for a tokenizer are cut into pieces, and no token differs from the whole text's."""

import importlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from megatron.data import IndexedDataset
from megatron.data.preprocessing import EncodeJob, preprocess
from megatron.tokenizer import HFTokenizer, make_tokenizer
from tests.data.samples import TOKENIZER, jsonl, pair

module = importlib.import_module("megatron.data.preprocessing.encode_job")


def variant(kind: str, folder: Path) -> HFTokenizer:
    """The golden byte-level BPE, with what other tokenizers do to texts."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    if kind == "nfc and runs of blanks":  # as GPT-NeoX-20B's
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.add_tokens([AddedToken(" " * n, normalized=True) for n in range(2, 5)])
    elif kind == "a blank before every text":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif kind == "added tokens with blanks":
        tokenizer.add_tokens(["the kettle", "\nThe"])
    tokenizer.save(str(folder / f"{kind}.json"))
    return HFTokenizer(folder / f"{kind}.json")


WORDS = ["The", "the kettle", "paints", " ", "  ", "\n", "\n\n", "1234567", "ü", "e\u0301", "!?", "<|endoftext|>"]
KINDS = ["plain", "nfc and runs of blanks", "a blank before every text", "added tokens with blanks"]
LINE = "The patient ribbon paints the kettle. "


def assert_equal_in_pieces(text: str, tokenizer: HFTokenizer, longest: float = float("inf")) -> None:
    parts = module.pieces(text, tokenizer)
    assert "".join(parts) == text and max(map(len, parts), default=0) <= longest
    assert [token for part in parts for token in tokenizer.tokenize(part)] == tokenizer.tokenize(text)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(words=st.lists(st.sampled_from(WORDS) | st.text(max_size=8), max_size=120), separator=st.sampled_from([" ", ""]))
@example(words=["the kettle", "paints"] * 40, separator=" ")
@example(words=["ss"] * 90, separator="")
def test_pieces_have_the_tokens_of_the_full_text(kind, words, separator, tmp_path_factory, monkeypatch):
    monkeypatch.setattr(module, "LONG", 60)
    monkeypatch.setattr(module, "CONTEXT_CHARS", 24)
    assert_equal_in_pieces(separator.join(words), variant(kind, tmp_path_factory.mktemp("tokenizer")))


def test_a_text_without_seams_is_not_split(monkeypatch: pytest.MonkeyPatch):
    """Pairs of "s" are tokens: which, hangs on where the run begins."""
    monkeypatch.setattr(module, "LONG", 100)
    monkeypatch.setattr(module, "CONTEXT_CHARS", 24)
    assert module.pieces("s" * 1001, HFTokenizer(TOKENIZER)) == ["s" * 1001]


@pytest.mark.parametrize("text", [
    LINE * 50, "你好世界数据模型" * 40, "one-two,three.four!" * 20, "lessestoastassletter" * 20, "x" * 400,
])  # fmt: skip
def test_ordinary_text_and_text_without_blanks_is_split(text: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "LONG", 100)
    if text != LINE * 50:
        monkeypatch.setattr(module, "CONTEXT_CHARS", 24)
    assert_equal_in_pieces(text, HFTokenizer(TOKENIZER), longest=100)


@pytest.mark.parametrize("end", [False, True])
def test_a_long_document_is_written_as_without_splitting(end: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = jsonl(tmp_path / "a.jsonl", [{"text": text, "n": "x"} for text in ("short", LINE * 50, "", "last")])
    job = EncodeJob(make_tokenizer, ("HFTokenizer", str(TOKENIZER)), keys=("text", "n"), append_eod=end)
    for name, limit in (("whole", 1 << 20), ("cut", 100)):
        monkeypatch.setattr(module, "LONG", limit)
        preprocess([source], [tmp_path / f"{name}_{key}" for key in job.keys], job)
    assert pair(tmp_path / "cut_text") == pair(tmp_path / "whole_text")
    assert IndexedDataset(tmp_path / "cut_text").doc_idx.tolist() == [0, 1, 2, 2, 3]
