"""Finds a text in the documents of a dataset by what their tokens decode to, fast and in bounded memory.

Neighbouring text decides how a text is tokenised. So each token of the vocabulary is checked once: can it be
a part of the text? numpy marks these tokens in the data. Only runs of them that are long enough are decoded
and searched.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from megatron.data.indexed_dataset import IndexedDataset
from megatron.experiments.errors import RunError
from megatron.process import look_for_stop
from megatron.tokenizer import Tokenizer

_CHUNK = 1 << 22  # tokens marked at once
_SPAN = 1 << 16  # most documents read at once
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # what a token decodes to that is a part of a character


@dataclass(frozen=True)
class Occurrence:
    """A place where a text stands: `count` tokens of a document (sequence) from token `offset` on.

    The first and the last token may have more characters than the text.
    """

    document: int
    offset: int
    count: int


class TextSearch:
    """Searches for a text that lies within one document, with no special token in it.

    ids, spaced_ids: its tokens as a text of its own, and after a space; the search does not need them.
    """

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        """Raises RunError for an empty text."""
        if not text:
            raise RunError('--find "": expected a text; give one')
        self.text, self._tokenizer = text, tokenizer
        self.ids, self.spaced_ids = tokenizer.tokenize_bare(text), tokenizer.tokenize_bare(f" {text}")
        self._reach = len(text.encode())  # the most tokens with a part of the text
        self._may, self._lengths = self._marks()

    def _marks(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns for each token whether it can be a part of the text, and its number of characters."""
        context = self._tokenizer.tokenize_bare("a")[-1:]  # some decoders drop the space of a first token
        start = len(self._tokenizer.detokenize(context))
        may, lengths = np.zeros(self._tokenizer.vocab_size, bool), np.zeros(self._tokenizer.vocab_size, np.int64)
        for token in range(self._tokenizer.vocab_size):
            if token in self._tokenizer.special_tokens:
                continue
            part = self._tokenizer.detokenize([*context, token])[start:]
            lengths[token] = len(part)
            may[token] = _can_be_part(part, self.text)
        return may, lengths

    def occurrences(
        self, indexed: IndexedDataset, on_progress: Callable[[int], None] = lambda tokens: None
    ) -> Iterator[Occurrence]:
        """Yields the places of the text in a dataset, in order.

        on_progress: called with the number of tokens that are searched.
        """
        done, documents, size = 0, len(indexed), indexed.dtype.itemsize
        begin = 0
        while begin < documents:
            limit = int(indexed.pointers[begin]) + _CHUNK * size
            stop = bisect_right(indexed.pointers, limit, begin + 1, min(documents, begin + _SPAN))
            stop = max(begin + 1, stop - 1) if stop < documents else stop
            tokens = indexed.span(begin, stop)
            starts = np.concatenate([[0], np.cumsum(indexed.sizes[begin:stop], dtype=np.int64)])
            for chunk_start in range(0, len(tokens), _CHUNK):
                look_for_stop()
                yield from self._in_chunk(tokens, starts, begin, chunk_start)
                on_progress(done + min(chunk_start + _CHUNK, len(tokens)))
            done, begin = done + len(tokens), stop

    def _in_chunk(self, tokens: np.ndarray, starts: np.ndarray, begin: int, chunk_start: int) -> Iterator[Occurrence]:
        """Yields the occurrences that begin in the chunk of tokens from `chunk_start` on.

        starts: where each document begins in `tokens`, and their end. begin: number of the first document.
        """
        stop = min(len(tokens), chunk_start + _CHUNK + self._reach)
        chunk = np.asarray(tokens[chunk_start:stop]).astype(np.int64)
        is_id = (chunk >= 0) & (chunk < len(self._may))
        chunk[~is_id] = 0
        may = self._may[chunk] & is_id
        if not may.any():
            return
        bounds = starts[(starts > chunk_start) & (starts < stop)] - chunk_start
        begins = np.zeros(len(chunk) + 1, bool)  # True where a document begins
        begins[bounds] = True
        opens = np.flatnonzero(may & (begins[:-1] | ~np.concatenate([[False], may[:-1]])))
        closes = np.flatnonzero(may & (begins[1:] | ~np.concatenate([may[1:], [False]]))) + 1
        characters = np.concatenate([[0], np.cumsum(self._lengths[chunk])])
        is_long = characters[closes] - characters[opens] >= len(self.text)
        for low, high in zip(opens[is_long].tolist(), closes[is_long].tolist(), strict=True):
            document = int(np.searchsorted(starts, chunk_start + low, side="right")) - 1
            for start, count in self._in_run(tokens, chunk_start + low, chunk_start + high, int(starts[document])):
                if start < chunk_start + _CHUNK:
                    yield Occurrence(begin + document, start - int(starts[document]), count)

    def _in_run(self, tokens: np.ndarray, low: int, high: int, document: int) -> Iterator[tuple[int, int]]:
        """Yields (first token, number of tokens) of each occurrence in tokens [low, high).

        Windows of the run are decoded with the token before it, if that is of the same document.
        """
        width, last = 4 * self._reach + 64, -1
        for window in range(low, high, width):
            end = min(high, window + width + self._reach)
            ids = tokens[max(document, window - 1) : end].tolist()
            num_context = window - max(document, window - 1)
            text = self._tokenizer.detokenize(ids)
            if self.text not in text:
                continue
            ends = [0, *(self._characters(ids[: n + 1]) for n in range(len(ids)))]
            place = text.find(self.text)
            while place >= 0:
                index = bisect_left(ends, place)  # of the token before which so many characters are complete
                index = index if ends[index] == place else index - 1
                final = next(n for n in range(index + 1, len(ends)) if ends[n] >= place + len(self.text))
                start = window - num_context + index
                if start >= low and start > last and start < window + width:
                    yield start, final - index
                    last = start
                place = text.find(self.text, place + 1)

    def _characters(self, ids: list[int]) -> int:
        """Returns how many characters of a text are complete after these tokens of it."""
        text = self._tokenizer.detokenize(ids)
        return len(text.rstrip(_UNKNOWN)) if text.endswith(_UNKNOWN) else len(text)


def _can_be_part(part: str, text: str) -> bool:
    """Returns whether a token with the text `part` can stand in `text`, or overlap one of its ends."""
    if not part:
        return False
    if _UNKNOWN in part and not text.isascii():
        return True  # a part of a character, which may be any
    if part in text or text in part:
        return True
    return any(part.endswith(text[:n]) or part.startswith(text[-n:]) for n in range(1, min(len(part), len(text))))
