"""Defines the interface of all tokenizers, and the character-level tokenizer, which needs no library."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from megatron.neox_arguments.errors import UserError, lfs_pointer_error

END_OF_DOCUMENT = "<|endoftext|>"  # GPT-NeoX's names; they go before the tokens that a tokenizer declares
PADDING = "<|padding|>"


class TokenizerError(UserError, ValueError):
    """Raised if a tokenizer cannot be built or used. The message names the file, package or key and says
    what to do."""


class Tokenizer(ABC):
    """The interface of all tokenizers.

    vocab_size: ids are 0..vocab_size-1, before the embedding is padded.
    eod: id of the token that ends a document.
    eos: id of the token that ends an answer, usually the same as eod.
    bos, pad: ids of these tokens; None: there is no such token.
    special_tokens: {id: name}.
    """

    vocab_size: int
    eod: int
    eos: int
    bos: int | None = None
    pad: int | None = None
    special_tokens: Mapping[int, str]

    @abstractmethod
    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, without an eod at the end."""

    @abstractmethod
    def detokenize(self, ids: Iterable[int]) -> str:
        """Return the text of token ids. Special tokens are skipped (NeoX)."""

    @abstractmethod
    def files(self) -> dict[str, bytes]:
        """Return {file name: content} of the files that define this tokenizer, as they were when it was
        built."""

    def tokenize(self, text: str) -> list[int]:
        return self.tokenize_batch([text])[0]

    def tokenize_bare(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens that the tokenizer adds to every text,
        such as BOS."""
        return self.tokenize(text)

    def fingerprint(self) -> str:
        """Return the hex SHA-256 of the tokenizer's kind and files."""
        digest = hashlib.sha256(type(self).__name__.encode())
        for name, content in sorted(self.files().items()):
            digest.update(f"\0{name}\0{len(content)}\0".encode() + content)
        return digest.hexdigest()


class CharLevelTokenizer(Tokenizer):
    """Uses the UTF-8 bytes of a text as token ids; vocabulary 512, eod 0, pad 1 (NeoX)."""

    vocab_size = 512
    eod = eos = 0
    pad = 1
    special_tokens = {0: END_OF_DOCUMENT, 1: PADDING}

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode("utf-8")) for text in texts]

    def detokenize(self, ids: Iterable[int]) -> str:
        """Return the text of token ids. Ids of 256 and more, and bytes that are not valid UTF-8, become
        U+FFFD."""
        return bytes(i if i < 256 else 0xFF for i in ids).decode("utf-8", errors="replace")

    def files(self) -> dict[str, bytes]:
        return {}


def read_file(path: str | Path) -> bytes:
    if not Path(path).is_file():
        raise TokenizerError(f"{path}: no such file (vocab_file, --vocab-file)")
    if (pointer := lfs_pointer_error(path)) is not None:
        raise TokenizerError(pointer)
    return Path(path).read_bytes()


def no_such_token(source: object, token: str) -> TokenizerError:
    return TokenizerError(f"{source}: holds no token {token}; set eod_token (--eod-token) to a token that it has")


def no_end(source: object, details: str) -> TokenizerError:
    return TokenizerError(
        f"{source}: holds no {END_OF_DOCUMENT} token and {details}; "
        "set eod_token (--eod-token) to the token that ends every document"
    )
