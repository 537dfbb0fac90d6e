"""Tokenizers against golden tokens, the transformers library, and bad files."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.data import IndexedDataset
from megatron.tokenizer.build import build_tokenizer, padded_vocab_size
from megatron.tokenizer.huggingface import GPT2BPETokenizer, HFTokenizer
from megatron.tokenizer.interface import CharLevelTokenizer, TokenizerError
from tests.data.samples import DATASET, TOKENIZER


def _texts(name: str) -> list[str]:
    return [json.loads(line)["text"] for line in (DATASET / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("tokenizer", "prefix"),
    [(HFTokenizer(TOKENIZER), "corpusA_text_document"), (CharLevelTokenizer(), "corpusA_char_text_document")],
)
def test_tokens_equal_neox_and_come_back_as_text(tokenizer, prefix: str):
    golden, texts = IndexedDataset(DATASET / prefix), _texts("corpusA")
    for i, (text, ids) in enumerate(zip(texts, tokenizer.tokenize_batch(texts), strict=True)):
        assert [*ids, tokenizer.eod] == golden[i].tolist()
        assert ids == tokenizer.tokenize(text)
        assert tokenizer.detokenize(ids) == text


def test_sizes_and_special_tokens():
    tokenizer = HFTokenizer(TOKENIZER)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (380, 0, 1)
    assert (CharLevelTokenizer().vocab_size, CharLevelTokenizer().eod, CharLevelTokenizer().pad) == (512, 0, 1)
    # NeoX's text output leaves special tokens out
    assert tokenizer.detokenize([*tokenizer.tokenize("word"), tokenizer.eod]) == "word"
    assert CharLevelTokenizer().detokenize([72, 105, 300]) == "Hi\ufffd"


def test_gpt2_equals_transformers(tmp_path: Path):
    from transformers import GPT2Tokenizer

    model = json.loads(TOKENIZER.read_text())["model"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    ours = GPT2BPETokenizer(tmp_path / "vocab.json", tmp_path / "merges.txt")
    theirs = GPT2Tokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    texts = _texts("corpusA")
    assert ours.tokenize_batch(texts) == theirs(texts)["input_ids"]
    assert ours.eod == 0 and ours.vocab_size == 380


def test_a_saved_tokenizer_is_the_same_tokenizer(tmp_path: Path):
    tokenizer = HFTokenizer(TOKENIZER)
    (tmp_path / "saved").mkdir()
    for name, content in tokenizer.files().items():
        (tmp_path / "saved" / name).write_bytes(content)
    again = HFTokenizer(tmp_path / "saved" / "tokenizer.json")
    assert again.fingerprint() == tokenizer.fingerprint()
    assert (tmp_path / "saved" / "tokenizer.json").read_bytes() == TOKENIZER.read_bytes()
    assert len({tokenizer.fingerprint(), CharLevelTokenizer().fingerprint(), "0" * 64}) == 3
    other = TOKENIZER.read_text().replace('"<|padding|>"', '"<|filling|>"')
    (tmp_path / "other.json").write_text(other)
    assert HFTokenizer(tmp_path / "other.json").fingerprint() != tokenizer.fingerprint()
    assert HFTokenizer(tmp_path / "other.json").pad is None


def test_a_file_that_cuts_and_fills_does_neither_and_holes_are_counted(tmp_path: Path):
    content = json.loads(TOKENIZER.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 1, "pad_type_id": 0,
        "pad_token": "<|padding|>",
    }  # fmt: skip
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 999, "content": "<|far|>"})
    (tmp_path / "t.json").write_text(json.dumps(content))
    tokenizer, text = HFTokenizer(tmp_path / "t.json"), _texts("corpusA")[0]
    assert tokenizer.tokenize(text) == HFTokenizer(TOKENIZER).tokenize(text)
    assert max(tokenizer.tokenize("a<|far|>")) < tokenizer.vocab_size


def test_files_that_are_no_tokenizer(tmp_path: Path):
    (tmp_path / "no_eod.json").write_text(TOKENIZER.read_text().replace("<|endoftext|>", "<|end|>"))
    (tmp_path / "junk.json").write_text("{}")
    for name, message in (("no_eod", r"<\|endoftext\|>"), ("junk", r"not a tokenizer\.json"), ("none", "no such file")):
        with pytest.raises(TokenizerError, match=rf"{name}\.json: .*{message}"):
            HFTokenizer(tmp_path / f"{name}.json")


def test_from_args():
    values = {"tokenizer_type": "HFTokenizer", "vocab_file": str(TOKENIZER), "merge_file": None, "eod_token": None}
    tokenizer = build_tokenizer(SimpleNamespace(**values))  # type: ignore[arg-type]
    assert isinstance(tokenizer, HFTokenizer) and tokenizer.vocab_size == 380
    with pytest.raises(TokenizerError, match="GPT2BPETokenizer .*merge_file"):
        build_tokenizer(SimpleNamespace(**values | {"tokenizer_type": "GPT2BPETokenizer"}))  # type: ignore[arg-type]


def test_padding_of_the_vocabulary():
    assert [padded_vocab_size(380, 64, tp) for tp in (1, 2, 3)] == [384, 384, 384]
    assert padded_vocab_size(50277, 128, 4) == 50304 and padded_vocab_size(380, 64, 5) == 640


def test_dropout_is_refused(tmp_path: Path):
    """Each run would read other tokens."""
    content = json.loads((TOKENIZER).read_text())
    content["model"]["dropout"] = 0.1
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: .*dropout 0\.1"):
        HFTokenizer(tmp_path)
