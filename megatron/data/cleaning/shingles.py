"""Runs of n words of a text as numbers, for near-duplicates and contamination: words in small letters,
without signs and accents, numbers as 0 (the normalisation of CCNet and datatrove), split at whitespace."""

import re
import unicodedata
from collections.abc import Sequence

import numpy as np

from megatron.data.cleaning.words import PUNCTUATION
from megatron.data.errors import DataError
from megatron.neox_arguments.optional_packages import import_optional

_BLOCK = 1 << 16  # bytes of text that are hashed at once: with their powers they fit a core's cache
_NUMBER = re.compile(rb"[0-9]+(?:[.,][0-9]+)?")  # that of ASCII
_BASE = 0x9E3779B97F4A7C15  # odd
_HALF, _FIRST, _SECOND = np.uint64(33), np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)


def mixed(values: np.ndarray) -> np.ndarray:
    """The last steps of MurmurHash3 for 64 bits: every bit of the result depends on every bit of a value."""
    values = (values ^ (values >> _HALF)) * _FIRST
    values = (values ^ (values >> _HALF)) * _SECOND
    return values ^ (values >> _HALF)


class WordHashes:
    """Words as numbers: a polynomial modulo 2^64 over their bytes, each of which stands for a random number,
    so that sums over the whole text give those of all its words."""

    def __init__(self) -> None:
        missing = DataError("numbers of any script are found by the regex package: pip install 'neox[clean]'")
        # One or more digits of any script, and a decimal part.
        self._number = import_optional("regex", missing).compile(r"\p{Nd}+(?:[.,،٫⎖⎗⎘]\p{Nd}+)?")
        self._signs = str.maketrans(dict.fromkeys(PUNCTUATION, " "))
        ascii_chars = map(chr, range(128))
        separate = [char.isspace() or char in PUNCTUATION for char in ascii_chars]
        low = bytes(32 if separate[code] else ord(chr(code).lower()) for code in range(128))
        self._table = low + bytes(range(128, 256))
        self._values = mixed(np.arange(1, 257, dtype=np.uint64) * np.uint64(_BASE))
        self._values[32] = 0
        self._powers, self._inverses = _powers(_BASE, _BLOCK), _powers(pow(_BASE, -1, 1 << 64), _BLOCK)

    def of(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The hashes of the words of all texts [words], and how many words each text has [texts]."""
        found, counts, held, size = list[np.ndarray](), list[np.ndarray](), list[bytes](), 0
        for text in texts:
            data = self._bytes(text)
            if held and size + len(data) > _BLOCK:
                found.append(self._hash(held, counts))
                held, size = [], 0
            held.append(data)
            size += len(data) + 1
        if held:
            found.append(self._hash(held, counts))
        return np.concatenate([np.empty(0, np.uint64), *found]), np.concatenate([np.empty(0, np.int64), *counts])

    def words(self, text: str) -> list[str]:
        """The normalised words of a text."""
        text = self._number.sub("0", text.lower()).translate(self._signs)
        if not text.isascii():
            decomposed = unicodedata.normalize("NFD", text)
            text = "".join(char for char in decomposed if unicodedata.category(char) != "Mn")
        return text.split()

    def _bytes(self, text: str) -> bytes:
        """The words of a text with spaces between them, maybe several."""
        if not text.isascii():
            return " ".join(self.words(text)).encode("utf-8", "surrogatepass")
        data = text.encode()
        if len(data.translate(None, b"0123456789")) < len(data):
            data = _NUMBER.sub(b"0", data)
        return data.translate(self._table)

    def _hash(self, texts: Sequence[bytes], counts: list[np.ndarray]) -> np.ndarray:
        """The hashes of the words of texts; counts: gets how many each has."""
        codes = np.frombuffer(b" " + b" ".join(texts) + b" ", np.uint8)
        powers, inverses = self._powers, self._inverses
        if len(codes) > len(powers):  # of a text that is longer than a block
            powers, inverses = _powers(_BASE, len(codes)), _powers(pow(_BASE, -1, 1 << 64), len(codes))
        is_space = codes == 32
        edges = np.flatnonzero(is_space[1:] != is_space[:-1])  # the last byte before a word, and the last of it
        before, last = edges[::2], edges[1::2]
        sums = np.cumsum(self._values[codes] * powers[: len(codes)])
        lengths = np.fromiter(map(len, texts), np.int64, len(texts)) + 1
        ends = np.cumsum(lengths)
        counts.append(np.diff(np.searchsorted(before, ends), prepend=0))
        return mixed((sums[last] - sums[before]) * inverses[before])


def _powers(base: int, count: int) -> np.ndarray:
    factors = np.full(count, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors)


def shingles(words: np.ndarray, counts: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of all runs of n words of each text [shingles], and how many each text has [texts].

    words, counts: of `WordHashes.of`. A text of fewer than n words has none.
    """
    total = len(words) - n + 1
    if total < 1:
        return np.empty(0, np.uint64), np.zeros_like(counts)
    values = words[:total].copy()
    for i in range(1, n):
        values = mixed(values) + words[i : total + i]
    whole = np.ones(len(words), bool)
    ends = np.cumsum(counts)
    for back in range(1, n):  # runs that begin in the last words of a text end in the next one
        whole[np.maximum(ends - back, 0)[ends >= back]] = False
    return mixed(values[whole[:total]]), np.maximum(counts - (n - 1), 0)
