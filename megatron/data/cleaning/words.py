"""Splits texts into words and sentences as datatrove does: by spaCy's rules for a language, without a
model."""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from megatron.data.errors import DataError
from megatron.neox_arguments.optional_packages import import_optional

_MOST_CHUNKS = 500_000  # in the cache; a chunk with its words takes about 400 bytes
_LONGEST_CACHED = 64  # characters
# spaCy's time grows with the square of the length of a chunk of symbols. Chunks longer than people write are
# split before spaCy reads them; their words then differ from datatrove's.
_LONGEST, _PIECE = 10_000, 1000
_RUN = re.compile(r"(\W)\1{199,}")
_RUN_PIECE = 100

# The punctuation that CCNet's text normalisation removes, and the control characters that datatrove adds. A
# token of these and of sentence ends alone (_NO_WORD) is not a word.
_SIGNS = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~«´»–—’“”„…∶━►、。〈〉《》「」【】！％（），．１：；？～"
PUNCTUATION = frozenset(_SIGNS) | {chr(code) for code in (*range(9), *range(11, 32), *range(127, 160))}
# Unicode's Sentence_Terminal and three Khmer characters, as hexadecimal codes and ranges.
_TERMINAL = """
21 2e 3f 589 61d-61f 6d4 700-702 7f9 837 839 83d-83e 964-965 104a-104b 1362 1367-1368 166e 1735-1736 17d4-17d6
17d9-17da 1803 1809 1944-1945 1aa8-1aab 1b5a-1b5b 1b5e-1b5f 1b7d-1b7e 1c3b-1c3c 1c7e-1c7f 203c-203d 2047-2049 2e2e
2e3c 2e53-2e54 3002 a4ff a60e-a60f a6f3 a6f7 a876-a877 a8ce-a8cf a92f a9c8-a9c9 aa5d-aa5f aaf0-aaf1 abeb fe52
fe56-fe57 ff01 ff0e ff1f ff61 10a56-10a57 10f55-10f59 10f86-10f89 11047-11048 110be-110c1 11141-11143 111c5-111c6
111cd 111de-111df 11238-11239 1123b-1123c 112a9 1144b-1144c 115c2-115c3 115c9-115d7 11641-11642 1173c-1173e 11944
11946 11a42-11a43 11a9b-11a9c 11c41-11c42 11ef7-11ef8 11f43-11f44 16a6e-16a6f 16af5 16b37-16b38 16b44 16e98 1bc9f
1da88
"""


def _codes(ranges: str) -> frozenset[str]:
    ends = [[int(end, 16) for end in part.split("-")] for part in ranges.split()]
    return frozenset(chr(code) for low, *high in ends for code in range(low, (high or [low])[0] + 1))


TERMINAL_PUNCTUATION = _codes(_TERMINAL)
_NO_WORD = PUNCTUATION | TERMINAL_PUNCTUATION
# Kinds of tokens: E may end a sentence, P is other punctuation, W is a word; a W after E begins a sentence.
_SENTENCE = re.compile(b"E[EP]*W")
_RUNS = re.compile(r"\s+|\S+")


class _Chunk(NamedTuple):
    """The words of a chunk, a stretch of text between whitespace.

    kinds: a letter for each word: E if it may end a sentence, P for other punctuation, W for any other word.
    num_plain_words: number of words that are not only punctuation.
    plain_chars: characters of the words counted in `num_plain_words`.
    alpha: number of words with a letter.
    """

    words: list[str]
    kinds: bytes
    num_plain_words: int
    plain_chars: int
    alpha: int


class Splitter(dict[str, _Chunk]):
    """Splits texts into words by spaCy's rules, and caches the words of each chunk (text between whitespace).

    Raises DataError if spaCy or its rules for the language are missing.
    """

    def __init__(self, language: str = "en") -> None:
        super().__init__()
        self._language = language
        self._begin()

    def _begin(self) -> None:
        """Load the language's rules from spaCy and clear the cache.

        Called again when the caches, including spaCy's own, have grown large.
        """
        missing = DataError("the rules of --recipe need the spaCy package to count words: pip install 'neox[clean]'")
        spacy = import_optional("spacy", missing)
        self.clear()
        self._num_split = 0
        try:
            nlp: Any = spacy.blank(self._language)
        except (ImportError, ValueError, OSError) as problem:
            reason = str(problem).strip().splitlines()[0]
            raise DataError(
                f"--word-language {self._language}: spaCy cannot split this language ({reason}); use another code"
            ) from None
        self._ends = frozenset(nlp.add_pipe("sentencizer").punct_chars)
        self._tokenizer, self._special = nlp.tokenizer, frozenset(nlp.tokenizer.rules)

    def chunks(self, text: str) -> list[_Chunk]:
        """Return the chunks of a text (stretches between whitespace) in order, each with its words."""
        if self._num_split > _MOST_CHUNKS:
            self._begin()
        return list(map(self.__getitem__, text.split()))

    def sentences(self, line: str) -> int:
        """Return the number of sentences in a non-empty line, by spaCy's rules."""
        words = line.split()
        if " ".join(words) == line:
            kinds = b"".join([self[word].kinds for word in words])
        else:  # runs of whitespace other than one space are tokens of their own
            runs = [run[0] for run in _RUNS.finditer(line)]
            kinds = b"".join(self[run].kinds if not run[0].isspace() else b"W" * (run != " ") for run in runs)
            if line[0] == " " and len(runs[0]) == 1:
                kinds = b"W" + kinds
        return 1 + len(_SENTENCE.findall(kinds))

    def __missing__(self, chunk: str) -> _Chunk:
        words, kinds = [], bytearray()
        for piece in _pieces(chunk):
            for word, is_punctuation in self._tokens(piece):
                words.append(word)
                kinds += b"E" if word in self._ends else b"P" if is_punctuation else b"W"
        plain_words = [word for word in words if not _NO_WORD.issuperset(word)]
        alpha = sum(any(map(str.isalpha, word)) for word in words)
        result = _Chunk(words, bytes(kinds), len(plain_words), sum(map(len, plain_words)), alpha)
        if len(chunk) <= _LONGEST_CACHED:
            self[chunk] = result
        return result

    def _tokens(self, chunk: str) -> list[tuple[str, bool]]:
        """Return (word, whether it is punctuation) for each word of a chunk."""
        self._num_split += 1
        # For English, spaCy splits a run of ASCII letters only if a rule lists it; most chunks are such runs.
        if self._language == "en" and chunk.isascii() and chunk.isalpha() and chunk not in self._special:
            return [(chunk, False)]
        try:
            tokens: Any = self._tokenizer(chunk)
        except ValueError:  # spaCy does not accept the name of its attribute as text
            tokens = self._tokenizer(chunk.replace("IS_ALPHA", ""))
        return [(token.text, token.is_punct) for token in tokens if token.text.strip()]


def _pieces(chunk: str) -> list[str]:
    """Split a very long chunk, or a long run of one repeated symbol, into the pieces that are passed to
    spaCy."""
    if len(chunk) < 200:
        return [chunk]
    if len(chunk) > _LONGEST:
        parts = [chunk[start : start + _PIECE] for start in range(0, len(chunk), _PIECE)]
        return [piece for part in parts for piece in _pieces(part)]
    pieces, end = [], 0
    for run in _RUN.finditer(chunk):
        pieces += [chunk[end : run.start()]]
        pieces += [run[0][start : start + _RUN_PIECE] for start in range(0, len(run[0]), _RUN_PIECE)]
        end = run.end()
    return [piece for piece in [*pieces, chunk[end:]] if piece]


@dataclass
class Document:
    """A text whose words are computed once for all rules."""

    text: str
    splitter: Splitter

    @cached_property
    def chunks(self) -> list[_Chunk]:
        """The stretches of the text between whitespace, each with its words."""
        return self.splitter.chunks(self.text)

    @cached_property
    def words(self) -> list[str]:
        """The words of the text in order; most punctuation marks are words of their own."""
        return [word for chunk in self.chunks for word in chunk.words]
