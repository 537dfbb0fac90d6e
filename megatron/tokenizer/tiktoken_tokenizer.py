"""Tokenizer for the encodings of tiktoken."""

import base64
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron.neox_arguments.optional_packages import import_optional
from megatron.neox_arguments.values.json_text import parse_json
from megatron.tokenizer.interface import END_OF_DOCUMENT, Tokenizer, TokenizerError, no_end, no_such_token, read_file


class TiktokenTokenizer(Tokenizer):
    """An encoding of tiktoken, given by its name (`cl100k_base`) or by a folder with the files that `files()`
    returns.

    Names of special tokens in a text become these tokens, as in NeoX.
    """

    def __init__(self, vocab_file: str | Path, eod_token: str | None = None):
        tiktoken = import_optional(
            "tiktoken", TokenizerError("TiktokenTokenizer needs the tiktoken package (pip install 'neox[data]')")
        )
        if Path(vocab_file).is_dir():
            encoding = _load_saved(Path(vocab_file), tiktoken)
        elif str(vocab_file) in (encoding_names := tiktoken.list_encoding_names()):
            try:
                encoding = tiktoken.get_encoding(str(vocab_file))
            except Exception as problem:  # the library that fetches it may raise anything
                raise TokenizerError(
                    f"TiktokenTokenizer: {vocab_file} is not in tiktoken's cache and cannot be fetched "
                    f"({type(problem).__name__}); fetch it where there is a network, with TIKTOKEN_CACHE_DIR set to a "
                    "folder, and copy that folder here"
                ) from None
        else:
            raise TokenizerError(
                f"vocab_file {vocab_file}: neither a folder nor an encoding of tiktoken; "
                f"use one of {', '.join(encoding_names)}"
            )
        self._encoding, self.vocab_size = encoding, encoding.n_vocab
        special: dict[str, int] = encoding._special_tokens
        if eod_token is not None and eod_token not in special:
            raise no_such_token(vocab_file, eod_token)
        end = eod_token or END_OF_DOCUMENT
        if end not in special:
            raise no_end(vocab_file, f"its special tokens are {', '.join(sorted(special)) or 'none'}")
        self.eod = self.eos = special[end]
        self.special_tokens = {i: name for name, i in special.items()}
        self._text_ids = frozenset(encoding._mergeable_ranks.values())  # ids have holes, which decode() refuses

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._encoding.encode_batch(list(texts), num_threads=1, allowed_special="all")

    def detokenize(self, ids: Iterable[int]) -> str:
        return self._encoding.decode([int(i) for i in ids if i in self._text_ids])

    def files(self) -> dict[str, bytes]:
        encoding = self._encoding
        ranks = sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1])
        settings = {
            "name": encoding.name, "pattern": encoding._pat_str, "special_tokens": encoding._special_tokens,
            "eod_token": self.special_tokens[self.eod],
        }  # fmt: skip
        return {
            "encoding.tiktoken": b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks),
            "encoding.json": json.dumps(settings, indent=1, sort_keys=True).encode(),
        }


def _load_saved(folder: Path, tiktoken: Any) -> Any:
    """Return an encoding loaded from a folder with the two files that `TiktokenTokenizer.files` returns.

    Raises TokenizerError if the files are not such an encoding.
    """
    settings, ranks = read_file(folder / "encoding.json"), read_file(folder / "encoding.tiktoken")
    try:
        content = parse_json(settings)
        lines = (line.split() for line in ranks.splitlines())
        return tiktoken.Encoding(
            content["name"],
            pat_str=content["pattern"],
            mergeable_ranks={base64.b64decode(token): int(rank) for token, rank in lines},
            special_tokens=content["special_tokens"],
        )
    except (KeyError, TypeError, ValueError) as problem:
        raise TokenizerError(f"{folder}: not a saved tiktoken encoding ({problem!r})") from None
