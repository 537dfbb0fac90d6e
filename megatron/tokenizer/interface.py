"""The one interface over all kinds of tokenizers, and the two that need no library."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from megatron.neox_arguments.errors import UserError, lfs_pointer_error

END_OF_DOCUMENT = "<|endoftext|>"  # GPT-NeoX's names, looked for before what a tokenizer says of itself
PADDING = "<|padding|>"


class TokenizerError(UserError, ValueError):
    """A tokenizer that cannot be had: the message names the file or key and what to do."""


class Tokenizer(ABC):
    """vocab_size: ids are 0..vocab_size-1, before padding of the embedding; special_tokens: id -> name.

    eod: id that ends a document; eos: that ends an answer, mostly the same; bos, pad: ids, or None without
    one.
    """

    vocab_size: int
    eod: int
    eos: int
    bos: int | None = None
    pad: int | None = None
    special_tokens: Mapping[int, str]

    @abstractmethod
    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without eod."""

    @abstractmethod
    def detokenize(self, ids: Iterable[int]) -> str:
        """Text of ids; special tokens leave no trace (NeoX)."""

    @abstractmethod
    def files(self) -> dict[str, bytes]:
        """File name -> content of what defines this tokenizer, as read when it was built."""

    def tokenize(self, text: str) -> list[int]:
        return self.tokenize_batch([text])[0]

    def tokenize_bare(self, text: str) -> list[int]:
        """Ids of a text that does not begin a document: without what the tokenizer puts around every text, as
        a BOS."""
        return self.tokenize(text)

    def fingerprint(self) -> str:
        """Hex SHA-256 over kind and files."""
        digest = hashlib.sha256(type(self).__name__.encode())
        for name, content in sorted(self.files().items()):
            digest.update(f"\0{name}\0{len(content)}\0".encode() + content)
        return digest.hexdigest()


class CharLevelTokenizer(Tokenizer):
    """UTF-8 bytes as ids; vocabulary 512, eod 0, pad 1 (NeoX)."""

    vocab_size = 512
    eod = eos = 0
    pad = 1
    special_tokens = {0: END_OF_DOCUMENT, 1: PADDING}

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode("utf-8")) for text in texts]

    def detokenize(self, ids: Iterable[int]) -> str:
        """Ids that are no byte, and bytes that form no character, come out as U+FFFD."""
        return bytes(i if i < 256 else 0xFF for i in ids).decode("utf-8", errors="replace")

    def files(self) -> dict[str, bytes]:
        return {}


def read_file(path: str | Path) -> bytes:
    if not Path(path).is_file():
        raise TokenizerError(f"{path}: no such file (vocab_file, --vocab-file)")
    if (pointer := lfs_pointer_error(path)) is not None:
        raise TokenizerError(pointer)
    return Path(path).read_bytes()


def no_such_token(where: object, token: str) -> TokenizerError:
    return TokenizerError(f"{where}: holds no token {token}; name one that is there with eod_token (--eod-token)")


def no_end(where: object, also: str) -> TokenizerError:
    return TokenizerError(
        f"{where}: holds no {END_OF_DOCUMENT} token and {also}; "
        "name the token that ends every document with eod_token (--eod-token)"
    )
