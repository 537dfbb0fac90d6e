"""Implements the quality and repetition rules of Gopher, with datatrove's thresholds, word lists and reason
names.

Rae et al. 2021, https://arxiv.org/abs/2112.11446, appendix A.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from megatron.data.cleaning.shingles import mixed
from megatron.data.cleaning.words import Document

_PARAGRAPHS, _LINES = re.compile(r"\n{2,}"), re.compile(r"\n+")
_BASE = np.uint64(0x9E3779B97F4A7C15)  # base of the hashes of character runs; odd, so that its powers differ


@dataclass(frozen=True)
class GopherQuality:
    """The Gopher quality rule: drops documents by number and length of words, symbols, lists and missing stop
    words.

    0 turns a threshold off.
    """

    min_doc_words: int = 50
    max_doc_words: int = 100_000
    min_avg_word_length: float = 3
    max_avg_word_length: float = 10
    max_symbol_word_ratio: float = 0.1
    max_bullet_lines_ratio: float = 0.9
    max_ellipsis_lines_ratio: float = 0.3
    min_alpha_words_ratio: float = 0.8
    min_stop_words: int = 2
    stop_words: tuple[str, ...] = ("the", "be", "to", "of", "and", "that", "have", "with")

    def check(self, document: Document) -> str | None:
        """Return the reason to drop a document; None to keep it."""
        text, chunks = document.text, document.chunks
        count = sum(len(chunk.words) for chunk in chunks)
        num_plain_words = sum(chunk.num_plain_words for chunk in chunks)
        if self.min_doc_words and num_plain_words < self.min_doc_words:
            return "gopher_short_doc"
        if self.max_doc_words and num_plain_words > self.max_doc_words:
            return "gopher_long_doc"
        if num_plain_words:
            length = sum(chunk.plain_chars for chunk in chunks) / num_plain_words
            if self.min_avg_word_length and length < self.min_avg_word_length:
                return "gopher_below_avg_threshold"
            if self.max_avg_word_length and length > self.max_avg_word_length:
                return "gopher_above_avg_threshold"
        if not count:
            return None
        if self.max_symbol_word_ratio and text.count("#") / count > self.max_symbol_word_ratio:
            return "gopher_too_many_hashes"
        if self.max_symbol_word_ratio and (text.count("...") + text.count("…")) / count > self.max_symbol_word_ratio:
            return "gopher_too_many_ellipsis"
        lines = text.splitlines()
        if self.max_bullet_lines_ratio:
            bullets = sum(line.lstrip().startswith(("•", "-")) for line in lines)
            if bullets / len(lines) > self.max_bullet_lines_ratio:
                return "gopher_too_many_bullets"
        if self.max_ellipsis_lines_ratio:
            open_ends = sum(line.rstrip().endswith(("...", "…")) for line in lines)
            if open_ends / len(lines) > self.max_ellipsis_lines_ratio:
                return "gopher_too_many_end_ellipsis"
        if self.min_alpha_words_ratio and sum(chunk.alpha for chunk in chunks) / count < self.min_alpha_words_ratio:
            return "gopher_below_alpha_threshold"
        if self.min_stop_words and len(set(self.stop_words).intersection(document.words)) < self.min_stop_words:
            return "gopher_enough_stop_words"
        return None


@dataclass(frozen=True)
class GopherRepetition:
    """The Gopher repetition rule: drops documents that repeat paragraphs, lines or n-grams too much.

    top_n_grams: (n, highest share of characters in the most frequent n-gram).
    dup_n_grams: (n, highest share of characters in repeated n-grams).
    """

    dup_line_frac: float = 0.3
    dup_para_frac: float = 0.3
    dup_line_char_frac: float = 0.2
    dup_para_char_frac: float = 0.2
    top_n_grams: tuple[tuple[int, float], ...] = ((2, 0.2), (3, 0.18), (4, 0.16))
    dup_n_grams: tuple[tuple[int, float], ...] = ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.1))

    def check(self, document: Document) -> str | None:
        """Return the reason to drop a document; None to keep it."""
        text = document.text
        if not text:
            return "empty"
        for name, parts, frac, char_frac in (
            ("para", _PARAGRAPHS.split(text.strip()), self.dup_para_frac, self.dup_para_char_frac),
            ("line", _LINES.split(text), self.dup_line_frac, self.dup_line_char_frac),
        ):
            count, chars = duplicates(parts)
            if frac and count / len(parts) > frac:
                return f"dup_{name}_frac"
            if char_frac and chars / len(text) > char_frac:
                return f"dup_{name}_char_frac"
        runs = _Runs(document.words)
        for n, frac in self.top_n_grams:
            if runs.top_chars(n) / len(text) > frac:
                return f"top_{n}_gram"
        for n, frac in self.dup_n_grams:
            if runs.repeated_chars(n) / len(text) > frac:
                return f"duplicated_{n}_n_grams"
        return None


def duplicates(parts: Sequence[str]) -> tuple[int, int]:
    """Return (how many parts repeat an earlier part of the list, the total length of these repeats in
    characters)."""
    if len(set(parts)) == len(parts):
        return 0, 0
    distinct: set[str] = set()
    repeats = [part for part in parts if part in distinct or distinct.add(part)]  # type: ignore[func-returns-value]
    return len(repeats), sum(map(len, repeats))


class _Runs:
    """Measures how much of a document's text is in repeated n-grams; words are stored as integer ids."""

    def __init__(self, words: Sequence[str]) -> None:
        numbers: dict[str, int] = {}
        self._numbers = np.array([numbers.setdefault(word, len(numbers)) for word in words], np.uint64)
        self._ends = np.array([0, *accumulate(map(len, words))], np.int64)  # of words, counted without spaces
        self._joined = "".join(words)
        self._hashes: tuple[np.ndarray, np.ndarray] | None = None

    def top_chars(self, n: int) -> int:
        """Return the number of characters in all occurrences of the most frequent n-gram: its length, with
        spaces, times its count.

        If several n-grams are equally frequent, the first one is used. Returns 0 if there is no n-gram.
        """
        count = len(self._numbers) - n + 1
        if count < 1:
            return 0
        keys = self._numbers[:count].copy()
        for i in range(1, n):
            keys = mixed(keys * _BASE + self._numbers[i : count + i])
        _, first_starts, times = np.unique(keys, return_index=True, return_counts=True)
        start = int(first_starts[times == times.max()].min())
        return int(self._ends[start + n] - self._ends[start] + n - 1) * int(times.max())

    def repeated_chars(self, n: int) -> int:
        """Return the number of characters, without spaces, in n-grams that repeat an earlier n-gram.

        N-grams that overlap a counted repeat are not counted.
        """
        count = len(self._numbers) - n + 1
        if count < 2:
            return 0
        keys = self._substrings(n, count)
        if len(np.unique(keys)) == count:
            return 0
        key_list, seen_keys, repeated, start = keys.tolist(), set[int](), 0, 0
        lengths = (self._ends[n : count + n] - self._ends[:count]).tolist()
        while start < count:
            if key_list[start] in seen_keys:
                repeated += lengths[start]
                start += n
            else:
                seen_keys.add(key_list[start])
                start += 1
        return repeated

    def _substrings(self, n: int, count: int) -> np.ndarray:
        """Return a hash of the characters of each n-gram, without spaces: `ab c` and `a bc` have equal
        hashes."""
        if self._hashes is None:
            codes = np.frombuffer(self._joined.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint64)
            powers = np.cumprod(np.full(len(codes) + 1, _BASE, np.uint64))
            # Characters are hashed first: sums of plain codes times powers would collide for similar strings.
            sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed(codes) * powers[:-1])])
            inverse = np.uint64(pow(int(_BASE), -1, 1 << 64))
            self._hashes = sums, np.cumprod(np.full(len(codes) + 1, inverse, np.uint64))
        sums, inverses = self._hashes
        starts, ends = self._ends[:count], self._ends[n : count + n]
        return (sums[ends] - sums[starts]) * inverses[starts]
