"""Hashes shingles (runs of n consecutive normalised words), to find near-duplicates and contamination.

Words are normalised as in CCNet and datatrove: lower case, no punctuation or accents, numbers as 0, split at
  whitespace.
"""

import re
import unicodedata
from collections.abc import Sequence

import numpy as np

from megatron.data.cleaning.words import PUNCTUATION
from megatron.data.errors import DataError
from megatron.neox_arguments.optional_packages import import_optional

_BLOCK = 1 << 16  # bytes of text hashed at once: they and their powers fit a core's cache
_NUMBER = re.compile(rb"[0-9]+(?:[.,][0-9]+)?")  # a number in ASCII text
_BASE = 0x9E3779B97F4A7C15  # odd
_HALF, _FACTOR_1, _FACTOR_2 = np.uint64(33), np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)


def mixed(values: np.ndarray) -> np.ndarray:
    """Return the values hashed by MurmurHash3's 64-bit finalizer: each bit of a hash depends on all bits
    of the value."""
    values = (values ^ (values >> _HALF)) * _FACTOR_1
    values = (values ^ (values >> _HALF)) * _FACTOR_2
    return values ^ (values >> _HALF)


class WordHashes:
    """Hashes normalised words with a polynomial hash modulo 2^64.

    Each byte is mapped to a random number, and a word's hash is a polynomial of these numbers. One cumulative
    sum over a text gives the hashes of all its words.
    """

    def __init__(self) -> None:
        missing = DataError("--minhash and --decontaminate need the regex package: pip install 'neox[clean]'")
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

    def hash_words(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return (hashes of the words of all texts [words], number of words of each text [texts])."""
        hashes, counts, held, size = list[np.ndarray](), list[np.ndarray](), list[bytes](), 0
        for text in texts:
            data = self._bytes(text)
            if held and size + len(data) > _BLOCK:
                hashes.append(self._hash(held, counts))
                held, size = [], 0
            held.append(data)
            size += len(data) + 1
        if held:
            hashes.append(self._hash(held, counts))
        return np.concatenate([np.empty(0, np.uint64), *hashes]), np.concatenate([np.empty(0, np.int64), *counts])

    def words(self, text: str) -> list[str]:
        """Return the normalised words of a text."""
        text = self._number.sub("0", text.lower()).translate(self._signs)
        if not text.isascii():
            decomposed = unicodedata.normalize("NFD", text)
            text = "".join(char for char in decomposed if unicodedata.category(char) != "Mn")
        return text.split()

    def _bytes(self, text: str) -> bytes:
        """Return the normalised words of a text as bytes, separated by spaces.

        In an ASCII text several spaces may separate two words, because punctuation became spaces.
        """
        if not text.isascii():
            return " ".join(self.words(text)).encode("utf-8", "surrogatepass")
        data = text.encode()
        if len(data.translate(None, b"0123456789")) < len(data):
            data = _NUMBER.sub(b"0", data)
        return data.translate(self._table)

    def _hash(self, texts: Sequence[bytes], counts: list[np.ndarray]) -> np.ndarray:
        """Return the hashes of all words in `texts` (from `_bytes`), and append the number of words of
        each to `counts`."""
        codes = np.frombuffer(b" " + b" ".join(texts) + b" ", np.uint8)
        powers, inverses = self._powers, self._inverses
        if len(codes) > len(powers):  # a single text is longer than a block
            powers, inverses = _powers(_BASE, len(codes)), _powers(pow(_BASE, -1, 1 << 64), len(codes))
        is_space = codes == 32
        edges = np.flatnonzero(is_space[1:] != is_space[:-1])  # the byte before each word, and the word's last byte
        before_word, word_end = edges[::2], edges[1::2]
        sums = np.cumsum(self._values[codes] * powers[: len(codes)])
        lengths = np.fromiter(map(len, texts), np.int64, len(texts)) + 1
        ends = np.cumsum(lengths)
        counts.append(np.diff(np.searchsorted(before_word, ends), prepend=0))
        return mixed((sums[word_end] - sums[before_word]) * inverses[before_word])


def _powers(base: int, count: int) -> np.ndarray:
    factors = np.full(count, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors)


def shingles(words: np.ndarray, counts: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (hashes of all shingles [shingles], number of shingles of each text [texts]).

    A shingle is n consecutive words of one text; a text of fewer than n words has none.
    words, counts: the result of `WordHashes.hash_words`.
    """
    total = len(words) - n + 1
    if total < 1:
        return np.empty(0, np.uint64), np.zeros_like(counts)
    values = words[:total].copy()
    for i in range(1, n):
        values = mixed(values) + words[i : total + i]
    is_within_text = np.ones(len(words), bool)
    ends = np.cumsum(counts)
    for back in range(1, n):  # no run may begin in the last n - 1 words of a text
        is_within_text[np.maximum(ends - back, 0)[ends >= back]] = False
    return mixed(values[is_within_text[:total]]), np.maximum(counts - (n - 1), 0)
