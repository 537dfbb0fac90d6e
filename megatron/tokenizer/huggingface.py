"""Tokenizers read by the HuggingFace libraries, from a `tokenizer.json`, GPT-2's two files, a folder or a
Hub name."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.neox_arguments.optional_packages import import_optional
from megatron.neox_arguments.values.json_text import parse_json
from megatron.tokenizer.interface import (
    END_OF_DOCUMENT,
    PADDING,
    Tokenizer,
    TokenizerError,
    no_end,
    no_such_token,
    read_file,
)

DECLARATIONS = ("special_tokens_map.json", "tokenizer_config.json")  # the later file overrides the earlier
ROLES = ("bos_token", "eos_token", "pad_token")


class HFTokenizer(Tokenizer):
    """A tokenizer from a `tokenizer.json` of the tokenizers library, or from a folder with this file.

    eod is `eod_token`, else `<|endoftext|>` (NeoX), else the eos_token that special_tokens_map.json or
    tokenizer_config.json in the same folder declares.
    """

    def __init__(self, vocab_file: str | Path, eod_token: str | None = None):
        path = Path(vocab_file)
        if path.is_dir():
            path = path / "tokenizer.json"
        self._content = read_file(path)
        tokenizers = _library("tokenizers")
        try:
            tokenizer = tokenizers.Tokenizer.from_buffer(self._content)
        except Exception as problem:  # the library raises bare Exception (ValueError in newer releases)
            raise TokenizerError(f"{path}: not a tokenizer.json of the tokenizers library ({problem})") from None
        self._set_backend(tokenizer, path, eod_token, _declared_tokens(path))

    def _set_backend(self, tokenizer: Any, source: object, eod_token: str | None, declared: Mapping[str, str]) -> None:
        """Store a tokenizer of the tokenizers library, turn off its truncation and padding, and look up its
        special tokens.

        declared: names of special tokens, such as {"bos_token": "<s>"}.
        source: the name of the tokenizer in errors.
        """
        # Truncation or padding saved in the file would silently change documents
        tokenizer.no_truncation()
        tokenizer.no_padding()
        _check_dropout(tokenizer, source)
        self._tokenizer, find = tokenizer, tokenizer.token_to_id
        # get_vocab_size() is too small if ids have holes
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if eod_token is not None and find(eod_token) is None:
            raise no_such_token(source, eod_token)
        names = {role: declared[role] for role in ROLES if find(declared.get(role, "")) is not None}
        eos = names.get("eos_token")
        end = eod_token or (END_OF_DOCUMENT if find(END_OF_DOCUMENT) is not None else eos)
        if end is None:
            raise no_end(source, "no tokenizer_config.json or special_tokens_map.json next to it declares an eos_token")
        padding = PADDING if find(PADDING) is not None else names.get("pad_token")
        self.eod, self.eos = find(end), find(eos or end)
        self.bos = find(names["bos_token"]) if "bos_token" in names else None
        self.pad = None if padding is None else find(padding)
        special = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self.special_tokens = special | {self.eod: end}
        # The tokenizer_config.json that a copy of tokenizer.json needs to give the same tokenizer
        self._config = None if end == END_OF_DOCUMENT else {**names, "eos_token": end}

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts))]

    def tokenize_bare(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def detokenize(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def files(self) -> dict[str, bytes]:
        contents = {"tokenizer.json": self._content}
        if self._config is not None:
            config = {**self._config, "tokenizer_class": "PreTrainedTokenizerFast"}
            contents["tokenizer_config.json"] = json.dumps(config, indent=1, sort_keys=True).encode()
        return contents


class GPT2BPETokenizer(HFTokenizer):
    """GPT-2's byte-level BPE from `vocab.json` and `merges.txt`.

    If a text contains `<|endoftext|>`, it is tokenized like other characters.
    """

    def __init__(self, vocab_file: str | Path, merge_file: str | Path, eod_token: str | None = None):
        self._vocab, self._merges = read_file(vocab_file), read_file(merge_file)
        tokenizers = _library("tokenizers")
        try:
            model = tokenizers.models.BPE.from_file(str(vocab_file), str(merge_file))
        except Exception as problem:  # the library raises bare Exception
            raise TokenizerError(f"{vocab_file}, {merge_file}: not GPT-2 vocabulary and merges ({problem})") from None
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        self._set_backend(tokenizer, vocab_file, eod_token, {})

    def files(self) -> dict[str, bytes]:
        end = {} if self._config is None else {"eod_token": self.special_tokens[self.eod].encode()}
        return {"vocab.json": self._vocab, "merges.txt": self._merges, **end}


class HFGPT2Tokenizer(HFTokenizer):
    """A tokenizer loaded by transformers' AutoTokenizer from a folder or a Hub name (default `gpt2`).

    As in NeoX, `<|padding|>` is added to its special tokens.
    """

    def __init__(self, vocab_file: str | Path | None = None, eod_token: str | None = None):
        name = str(vocab_file or "gpt2")
        transformers = _library("transformers")
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        except Exception as problem:  # OSError, ValueError, or any error of a broken file
            reason = str(problem).strip().split("\n")[0]
            raise TokenizerError(
                f"HFGPT2Tokenizer: {name} cannot be fetched: it is not a folder with tokenizer files, is not in the "
                f"local cache of the Hub, or the Hub cannot be reached ({reason}); "
                f"set vocab_file (--vocab-file) to a folder"
            ) from None
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise TokenizerError(
                f"HFGPT2Tokenizer: {name} has no tokenizer.json; set another tokenizer_type, such as SPMTokenizer"
            )
        tokenizer.add_special_tokens({"pad_token": PADDING})
        declared = {role: value for role in ROLES if (value := getattr(tokenizer, role))}
        if eod_token is None and "eos_token" not in declared:
            raise TokenizerError(
                f"{name}: has no eos_token; set eod_token (--eod-token) to the token that ends documents"
            )
        self._set_backend(backend, name, eod_token or declared["eos_token"], declared)
        self._content = backend.to_str().encode()
        self._config = {**declared, "eos_token": self.special_tokens[self.eod]}


def _declared_tokens(path: Path) -> dict[str, str]:
    """Return the bos_token, eos_token and pad_token that the files next to a `tokenizer.json` declare, by
    role."""
    declared: dict[str, str] = {}
    for file in map(path.with_name, DECLARATIONS):
        if path.name != "tokenizer.json" or not file.is_file():
            continue
        try:
            content = parse_json(file.read_bytes())
            for role in ROLES:
                value = content.get(role)
                value = value.get("content") if isinstance(value, dict) else value
                if isinstance(value, str):
                    declared[role] = value
                elif content.get(role) is not None:
                    raise ValueError(f"{role}: expected a token's text, got {json.dumps(content[role])}")
        except (ValueError, AttributeError) as problem:
            raise TokenizerError(f"{file}: cannot be read ({problem})") from None
    return declared


def _library(name: str) -> Any:
    return import_optional(name, TokenizerError(f"this tokenizer needs the {name} package (pip install {name})"))


def _check_dropout(tokenizer: Any, source: object) -> None:
    """Raise TokenizerError if the tokenizer has BPE dropout, which tokenizes a text differently each time."""
    dropout = getattr(tokenizer.model, "dropout", None)
    if dropout:
        raise TokenizerError(
            f"{source}: its BPE dropout of {dropout:g} would tokenize a text differently each time; set model.dropout "
            "to null in tokenizer.json"
        )
