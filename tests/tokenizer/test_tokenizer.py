"""Tokenizers against golden tokens, the transformers library, and bad files."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.tokenizer.build import build_tokenizer, padded_vocab_size
from megatron.tokenizer.huggingface import GPT2BPETokenizer, HFTokenizer
from megatron.tokenizer.interface import CharLevelTokenizer, TokenizerError
from tests.data.samples import DATASET, TOKENIZER, gpt2_files, rows_of
from tests.tokenizer.test_kinds import TEXTS, save


@pytest.mark.parametrize(("tokenizer", "name"), [(HFTokenizer(TOKENIZER), "text"), (CharLevelTokenizer(), "char_text")])
def test_tokens_equal_neox_and_come_back_as_text(tokenizer, name: str):
    golden, rows = rows_of(DATASET / f"corpusA_{name}_document"), tokenizer.tokenize_batch(TEXTS)
    for text, ids, row in zip(TEXTS, rows, golden, strict=True):
        assert [*ids, tokenizer.eod] == row
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

    files = gpt2_files(tmp_path)
    tokenizer, hf_tokenizer = GPT2BPETokenizer(*files), GPT2Tokenizer(*map(str, files))
    assert tokenizer.tokenize_batch(TEXTS) == hf_tokenizer(TEXTS)["input_ids"]
    assert tokenizer.eod == 0 and tokenizer.vocab_size == 380


def test_a_saved_tokenizer_is_the_same_tokenizer(tmp_path: Path):
    tokenizer = HFTokenizer(TOKENIZER)
    saved = save(tokenizer, tmp_path / "saved") / "tokenizer.json"
    assert HFTokenizer(saved).fingerprint() == tokenizer.fingerprint()
    assert saved.read_bytes() == TOKENIZER.read_bytes()
    assert len({tokenizer.fingerprint(), CharLevelTokenizer().fingerprint(), "0" * 64}) == 3
    (tmp_path / "other.json").write_text(TOKENIZER.read_text().replace('"<|padding|>"', '"<|filling|>"'))
    changed_tokenizer = HFTokenizer(tmp_path / "other.json")
    assert changed_tokenizer.fingerprint() != tokenizer.fingerprint() and changed_tokenizer.pad is None


def test_a_file_that_cuts_and_fills_does_neither_and_holes_are_counted(tmp_path: Path):
    content = json.loads(TOKENIZER.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 1,
                          "pad_type_id": 0, "pad_token": "<|padding|>"}  # fmt: skip
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 999, "content": "<|far|>"})
    (tmp_path / "t.json").write_text(json.dumps(content))
    tokenizer = HFTokenizer(tmp_path / "t.json")
    assert tokenizer.tokenize(TEXTS[0]) == HFTokenizer(TOKENIZER).tokenize(TEXTS[0])
    assert max(tokenizer.tokenize("a<|far|>")) < tokenizer.vocab_size


def test_files_that_are_no_tokenizer(tmp_path: Path):
    (tmp_path / "junk.json").write_text("{}")
    for name, message in (("junk", r"not a tokenizer\.json"), ("none", "no such file")):
        with pytest.raises(TokenizerError, match=rf"{name}\.json: .*{message}"):
            HFTokenizer(tmp_path / f"{name}.json")


def test_from_args():
    values = {"tokenizer_type": "HFTokenizer", "vocab_file": str(TOKENIZER), "merge_file": None, "eod_token": None}
    tokenizer = build_tokenizer(SimpleNamespace(**values))  # type: ignore[arg-type]
    assert isinstance(tokenizer, HFTokenizer) and tokenizer.vocab_size == 380


def test_padding_of_the_vocabulary():
    assert [padded_vocab_size(380, 64, tp) for tp in (1, 2, 3)] == [384, 384, 384]
    assert padded_vocab_size(50277, 128, 4) == 50304 and padded_vocab_size(380, 64, 5) == 640


def test_dropout_is_refused(tmp_path: Path):
    """Each run would read other tokens."""
    content = json.loads((TOKENIZER).read_text())
    content["model"]["dropout"] = 0.1
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: .*dropout.* 0\.1"):
        HFTokenizer(tmp_path)
