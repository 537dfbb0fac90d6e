"""Text <-> token ids."""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron.neox_arguments import ConfigError, NeoXArgs

END_OF_DOCUMENT = "<|endoftext|>"
PADDING = "<|padding|>"


class TokenizerError(ValueError):
    """A tokenizer that cannot be had: the message names the file or key and what to do."""


class Tokenizer(ABC):
    """vocab_size: ids are 0..vocab_size-1, before padding; eod: end-of-document id; pad: id, or None without one."""

    vocab_size: int
    eod: int
    pad: int | None = None

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

    def fingerprint(self) -> str:
        """Hex SHA-256 over kind and files."""
        digest = hashlib.sha256(type(self).__name__.encode())
        for name, content in sorted(self.files().items()):
            digest.update(f"\0{name}\0{len(content)}\0".encode() + content)
        return digest.hexdigest()


class HFTokenizer(Tokenizer):
    """A `tokenizer.json` of the HuggingFace tokenizers library. eod `<|endoftext|>`, pad `<|padding|>`."""

    def __init__(self, vocab_file: str | Path):
        self._content = _read(vocab_file)
        tokenizers = _tokenizers()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(self._content)
        except Exception as problem:  # the library raises bare Exception (ValueError in newer releases)
            raise TokenizerError(f"{vocab_file}: not a tokenizer.json of the tokenizers library ({problem})") from None
        # A file saved with these would cut documents off, or fill them up, without a word
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Not get_vocab_size(): ids may have holes
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        eod = self._tokenizer.token_to_id(END_OF_DOCUMENT)
        if eod is None:
            raise TokenizerError(f"{vocab_file}: holds no {END_OF_DOCUMENT} token, which ends every document; add one")
        self.eod = eod
        self.pad = self._tokenizer.token_to_id(PADDING)

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts))]

    def detokenize(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def files(self) -> dict[str, bytes]:
        return {"tokenizer.json": self._content}


class GPT2BPETokenizer(HFTokenizer):
    """GPT-2's byte-level BPE from `vocab.json` and `merges.txt`. In the text `<|endoftext|>` is nothing special."""

    def __init__(self, vocab_file: str | Path, merge_file: str | Path):
        self._vocab, self._merges = _read(vocab_file), _read(merge_file)
        tokenizers = _tokenizers()
        try:
            model = tokenizers.models.BPE.from_file(str(vocab_file), str(merge_file))
        except Exception as problem:  # as above
            raise TokenizerError(f"{vocab_file}, {merge_file}: not GPT-2 vocabulary and merges ({problem})") from None
        self._tokenizer = tokenizers.Tokenizer(model)
        self._tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = tokenizers.decoders.ByteLevel()
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        eod = self._tokenizer.token_to_id(END_OF_DOCUMENT)
        if eod is None:
            raise TokenizerError(f"{vocab_file}: holds no {END_OF_DOCUMENT} token, which ends every document; add one")
        self.eod = eod

    def files(self) -> dict[str, bytes]:
        return {"vocab.json": self._vocab, "merges.txt": self._merges}


class CharLevelTokenizer(Tokenizer):
    """UTF-8 bytes as ids; vocabulary 512, eod 0, pad 1 (NeoX)."""

    vocab_size = 512
    eod = 0
    pad = 1

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode("utf-8")) for text in texts]

    def detokenize(self, ids: Iterable[int]) -> str:
        """Ids that are no byte, and bytes that form no character, come out as U+FFFD."""
        return bytes(i if i < 256 else 0xFF for i in ids).decode("utf-8", errors="replace")

    def files(self) -> dict[str, bytes]:
        return {}


def make_tokenizer(kind: str, vocab_file: str | None = None, merge_file: str | None = None) -> Tokenizer:
    """A tokenizer of one of NeoX's kinds. Raises TokenizerError for a missing file or a kind that is not built."""
    if kind == "CharLevelTokenizer":
        return CharLevelTokenizer()
    if kind not in ("HFTokenizer", "GPT2BPETokenizer"):
        raise TokenizerError(
            f"tokenizer_type {kind}: not built yet; there are HFTokenizer, GPT2BPETokenizer and CharLevelTokenizer"
        )
    if not vocab_file:
        raise TokenizerError(f"{kind} needs vocab_file (--vocab-file): the path of its vocabulary file")
    if kind == "HFTokenizer":
        return HFTokenizer(vocab_file)
    if not merge_file:
        raise TokenizerError(f"{kind} needs merge_file (--merge-file): the path of its merges.txt")
    return GPT2BPETokenizer(vocab_file, merge_file)


def build_tokenizer(args: NeoXArgs) -> Tokenizer:
    """The run's tokenizer, from tokenizer_type, vocab_file and merge_file."""
    return make_tokenizer(args.tokenizer_type, args.vocab_file, args.merge_file)


def padded_vocab_size(vocab_size: int, divisible_by: int, tp: int) -> int:
    """vocab_size rounded up to a multiple of `divisible_by` that tensor-parallel ranks can share out equally.

    Rows of padding take part in the softmax, so their number must not hang on the layout: GPT-NeoX, which rounds to
    divisible_by * tp, gives another loss for another tp. Its checkpoints say their size, which is then taken.
    """
    multiple = math.lcm(divisible_by, tp)
    return -(-vocab_size // multiple) * multiple


def with_vocabulary(args: NeoXArgs, tokenizer: Tokenizer) -> NeoXArgs:
    """The configuration with `padded_vocab_size` known. Raises ConfigError when a given one is too small."""
    if args.padded_vocab_size is None:
        padded = padded_vocab_size(tokenizer.vocab_size, args.make_vocab_size_divisible_by, args.tp)
        return args.replace(padded_vocab_size=padded)
    if args.padded_vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            [
                f"{args.origin('padded_vocab_size')}: padded_vocab_size: {args.padded_vocab_size} is smaller than the "
                f"tokenizer's vocabulary of {tokenizer.vocab_size}"
            ]
        )
    return args


def _read(path: str | Path) -> bytes:
    if not Path(path).is_file():
        raise TokenizerError(f"{path}: no such file (vocab_file, --vocab-file)")
    return Path(path).read_bytes()


def _tokenizers():
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise TokenizerError("this tokenizer needs the tokenizers package (pip install tokenizers)") from None
    return tokenizers
