"""SentencePiece and tiktoken behind the interface."""

import base64
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron.neox_arguments.optional_packages import package
from megatron.tokenizer.interface import (
    END_OF_DOCUMENT,
    PADDING,
    Tokenizer,
    TokenizerError,
    no_end,
    no_such_token,
    read_file,
)

INSTALL = "(pip install 'neox[data]')"


class SPMTokenizer(Tokenizer):
    """A SentencePiece `.model`. eod: `eod_token`, else the piece `<|endoftext|>` (NeoX), else the model's own
    EOS."""

    def __init__(self, vocab_file: str | Path, eod_token: str | None = None):
        missing = TokenizerError(f"SPMTokenizer needs the sentencepiece package {INSTALL}")
        sentencepiece = package("sentencepiece", missing)
        self._content = read_file(vocab_file)
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(self._content)
        except RuntimeError as problem:
            raise TokenizerError(f"{vocab_file}: not a SentencePiece model ({problem})") from None
        model = self._processor
        self.vocab_size = model.get_piece_size()
        # A piece that is not there is given the id of the unknown piece
        pieces = {model.id_to_piece(i): i for i in range(self.vocab_size)}
        if eod_token is not None and eod_token not in pieces:
            raise no_such_token(vocab_file, eod_token)
        eos = model.eos_id()
        self.eod = pieces[eod_token] if eod_token is not None else pieces.get(END_OF_DOCUMENT, eos)
        if self.eod < 0:
            raise no_end(vocab_file, "was trained without an EOS")
        self.eos = eos if eos >= 0 else self.eod
        self.bos = model.bos_id() if model.bos_id() >= 0 else None
        self.pad = pieces.get(PADDING, model.pad_id() if model.pad_id() >= 0 else None)
        self.special_tokens = {i: piece for piece, i in pieces.items() if model.is_control(i) or i == self.eod}

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._processor.encode(list(texts), num_threads=1)

    def detokenize(self, ids: Iterable[int]) -> str:
        return self._processor.decode([int(i) for i in ids if i not in self.special_tokens])

    def files(self) -> dict[str, bytes]:
        default = self._processor.piece_to_id(END_OF_DOCUMENT)
        default = self._processor.eos_id() if default == self._processor.unk_id() else default
        end = {} if self.eod == default else {"eod_token": self.special_tokens[self.eod].encode()}
        return {"tokenizer.model": self._content, **end}


class TiktokenTokenizer(Tokenizer):
    """An encoding of tiktoken by its name (`cl100k_base`), or a folder with the files that `files()` gives.

    Names of special tokens in the text are these tokens, as in NeoX.
    """

    def __init__(self, vocab_file: str | Path, eod_token: str | None = None):
        tiktoken = package("tiktoken", TokenizerError(f"TiktokenTokenizer needs the tiktoken package {INSTALL}"))
        if Path(vocab_file).is_dir():
            encoding = _saved(Path(vocab_file), tiktoken)
        elif str(vocab_file) in (known := tiktoken.list_encoding_names()):
            try:
                encoding = tiktoken.get_encoding(str(vocab_file))
            except Exception as problem:  # of whatever library fetches it
                raise TokenizerError(
                    f"TiktokenTokenizer: {vocab_file} is not in tiktoken's cache and cannot be fetched "
                    f"({type(problem).__name__}); fetch it where there is a network, with TIKTOKEN_CACHE_DIR set to a "
                    "folder, and take the folder along"
                ) from None
        else:
            raise TokenizerError(
                f"vocab_file {vocab_file}: no folder, and no encoding of tiktoken; those are {', '.join(known)}"
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
        about = {
            "name": encoding.name, "pattern": encoding._pat_str, "special_tokens": encoding._special_tokens,
            "eod_token": self.special_tokens[self.eod],
        }  # fmt: skip
        return {
            "encoding.tiktoken": b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks),
            "encoding.json": json.dumps(about, indent=1, sort_keys=True).encode(),
        }


def _saved(folder: Path, tiktoken: Any) -> Any:
    """An encoding from the two files that TiktokenTokenizer.files names."""
    about, ranks = read_file(folder / "encoding.json"), read_file(folder / "encoding.tiktoken")
    try:
        content = json.loads(about)
        lines = (line.split() for line in ranks.splitlines())
        return tiktoken.Encoding(
            content["name"],
            pat_str=content["pattern"],
            mergeable_ranks={base64.b64decode(token): int(rank) for token, rank in lines},
            special_tokens=content["special_tokens"],
        )
    except (KeyError, TypeError, ValueError) as problem:
        raise TokenizerError(f"{folder}: not a saved tiktoken encoding ({problem!r})") from None
