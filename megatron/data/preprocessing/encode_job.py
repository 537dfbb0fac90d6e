"""Defines preprocessing jobs, which turn raw inputs into documents of tokens in `.bin/.idx` pairs.

The input is split into shards (`readers.py`); a worker turns each shard into part files. These are appended
in order to the files of the job, in a hidden folder next to the output until all are complete. A killed job
resumes at the last appended shard, and the result is the same byte for byte, for any number of workers.
"""

import functools
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from megatron.data.errors import DataError
from megatron.data.indexed_dataset import best_fitting_dtype
from megatron.data.preprocessing.shards import InputRow, row_texts
from megatron.neox_arguments.optional_packages import import_optional

LONG = 1 << 19  # characters; longer texts are tokenised in pieces
SEAMS = (
    re.compile(r"(?<=\S)[ \n](?=\S)"),
    re.compile(r"(?<=[^\w\s])(?=\w)"),
)  # where to split: before white space; after punctuation
WHITE = "documents of white space only"  # its name among the counts of a job
CONTEXT_CHARS = 256  # characters on each side of a possible split that are tokenised to check it
SEARCH_CHARS = 1 << 13  # characters at the end of a piece that are searched for a split
SEAMS_TRIED = 16  # possible splits tried of each kind
SHIFTS = (0, 1, 3, 7)  # the check moves its start: tokens may depend on it, as in "xxxx"

JoinedDocuments = tuple[np.ndarray, np.ndarray]  # (documents joined, length of each)


class Job(Protocol):
    """Defines how rows become documents, with one output for each of `dtypes`.

    It is pickled with every shard, so it must be small. fields: the columns of a table to read; None: all.
    """

    @property
    def fields(self) -> tuple[str, ...] | None: ...

    def dtypes(self) -> tuple[np.dtype, ...]: ...

    def notes(self, columns: Collection[str]) -> list[str]:
        """Return notes to show the user before the job begins. columns: the columns of the first rows."""

    def prepare(self, row: InputRow) -> Any | None:
        """Return the value that `encode` takes for this row; None drops the row.

        Raises DataError for a bad row, naming it.
        """

    def encode(self, prepared: Sequence[Any]) -> tuple[Sequence[JoinedDocuments], dict[str, int]]:
        """Return (the documents of these rows for each output, {name: count} of events for the report).

        prepared: results of `prepare`.
        """

    def describe(self) -> dict[str, Any]:
        """Return all settings that decide the output, besides the input, as JSON values.

        A killed job resumes only if they are equal.
        """


class Encoder(Protocol):
    """The interface of a tokenizer that preprocessing needs."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eod(self) -> int: ...
    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]: ...
    def fingerprint(self) -> str: ...


@dataclass(frozen=True)
class EncodeJob:
    """A job for plain text: each key is its own output, and all outputs have the same number of documents.

    make_tokenizer: an importable function, called with tokenizer_args once in every process.
    """

    make_tokenizer: Callable[..., Encoder]
    tokenizer_args: tuple[str | None, ...]
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    ftfy: bool = False

    @property
    def fields(self) -> tuple[str, ...]:
        return self.keys

    def tokenizer(self) -> Encoder:
        return _build(self.make_tokenizer, self.tokenizer_args)

    def notes(self, columns: Collection[str]) -> list[str]:
        return []

    def dtypes(self) -> tuple[np.dtype, ...]:
        return (best_fitting_dtype(self.tokenizer().vocab_size),) * len(self.keys)

    def prepare(self, row: InputRow) -> tuple[str, ...] | None:
        texts = row_texts(row, self.keys)
        if self.ftfy:
            texts = tuple(fix_text(text) for text in texts)
        return texts if any(texts) else None  # a row without text is dropped, as in NeoX

    def encode(self, prepared: Sequence[tuple[str, ...]]) -> tuple[list[JoinedDocuments], dict[str, int]]:
        """Tokenise texts. With `append_eod`, an end-of-document token follows each document that has
        tokens."""
        tokenizer, end = self.tokenizer(), [self.tokenizer().eod] if self.append_eod else []
        columns = []
        for dtype, texts in zip(self.dtypes(), zip(*prepared, strict=True), strict=True):
            if any(len(text) > LONG for text in texts):
                rows: Sequence[Any] = [_long(text, tokenizer, dtype) for text in texts]
                rows = [np.append(row, np.array(end, dtype)) if len(row) else row for row in rows]
            else:
                rows = [row + end if end and len(row) else row for row in tokenizer.tokenize_batch(texts)]
            columns.append(join_documents(rows, dtype))
        blank = sum(all(text.isspace() or not text for text in texts) for texts in prepared)
        return columns, {WHITE: blank} if blank else {}

    def describe(self) -> dict[str, Any]:
        kind, *files = self.tokenizer_args
        tokenizer = self.tokenizer()
        tokenizer_facts = {"type": kind, "files": [file for file in files if file], "vocab_size": tokenizer.vocab_size}
        return {
            "tokenizer": tokenizer_facts | {"sha256": tokenizer.fingerprint()},
            "keys": list(self.keys),
            "append_eod": self.append_eod,
            "ftfy": self.ftfy,
        }


def join_documents(rows: Sequence[Sequence[int] | np.ndarray], dtype: np.dtype) -> JoinedDocuments:
    """Join lists of ids into one array of `dtype`; return it with the length of each list.

    Raises DataError for an id that does not fit `dtype`.
    """
    try:
        arrays = [np.array(row, dtype=dtype) for row in rows]
    except OverflowError:
        worst = max(max(row, key=abs) for row in rows if len(row))
        raise DataError(
            f"token id {worst} does not fit {dtype}, the type chosen by the tokenizer's vocabulary size; check that "
            "size"
        ) from None
    return np.concatenate(arrays or [np.empty(0, dtype)]), np.fromiter(map(len, rows), np.int64, len(rows))


def _long(text: str, tokenizer: Encoder, dtype: np.dtype) -> np.ndarray:
    """Return the token ids of a very long text, which is tokenised in pieces if that gives the same ids.

    A tokenizer needs about 120 bytes of memory for each byte of text.
    """
    parts = (tokenizer.tokenize_batch([piece]) for piece in pieces(text, tokenizer))
    return np.concatenate([join_documents(ids, dtype)[0] for ids in parts])


def pieces(text: str, tokenizer: Encoder) -> list[str]:
    """Split a text into pieces of at most LONG characters where no token crosses the split, preferably before
    white space.

    If no such position is found, the full text is returned as one piece.
    """
    parts, start = [], 0
    while len(text) - start > LONG:
        seams = _seams(text, start + LONG - min(LONG // 2, SEARCH_CHARS), start + LONG)
        seam = next((seam for seam in seams if _cuts(text, seam, tokenizer)), 0)
        if not seam:
            return [text]
        parts.append(text[start:seam])
        start = seam
    return [*parts, text[start:]]


def _seams(text: str, start: int, stop: int) -> Iterator[int]:
    """Yield positions in [start, stop] where `text` may be split, the best kind first; within a kind,
    later ones first."""
    for kind in SEAMS:
        last = deque((match.start() for match in kind.finditer(text[start:stop])), SEAMS_TRIED)
        yield from (start + place for place in reversed(last))
    yield from range(stop, stop - SEAMS_TRIED, -1)  # for scripts without spaces: any position


def _cuts(text: str, seam: int, tokenizer: Encoder) -> bool:
    """Return whether the text can be split at `seam`: the text around it gives the same tokens split and
    unsplit."""
    for shift in SHIFTS:
        left, right = text[max(seam - CONTEXT_CHARS + shift, 0) : seam], text[seam : seam + CONTEXT_CHARS - shift]
        left_ids, right_ids, joined_ids = tokenizer.tokenize_batch([left, right, left + right])
        if [*left_ids, *right_ids] != [*joined_ids]:
            return False
    return True


@functools.lru_cache(maxsize=1)
def _build(make_tokenizer: Callable[..., Encoder], tokenizer_args: tuple[str | None, ...]) -> Encoder:
    return make_tokenizer(*tokenizer_args)


def fix_text(text: str) -> str:
    """Return the text with wrongly decoded characters repaired by ftfy."""
    return import_optional("ftfy", DataError("--ftfy needs the ftfy package (pip install ftfy)")).fix_text(text)
