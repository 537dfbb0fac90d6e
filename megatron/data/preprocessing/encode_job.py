"""Raw inputs -> documents of tokens -> `.bin/.idx`, in processes that each write their own shards.

The input is cut into shards (`readers.py`); a worker turns one into part files; in their order these are
appended by copy to the files of the job, kept in a hidden folder beside the output until all is there. A job
that was killed goes on from the last appended shard, and the result is the same byte for byte, for any number
of workers.
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
SEAMS = (re.compile(r"(?<=\S)[ \n](?=\S)"), re.compile(r"(?<=[^\w\s])(?=\w)"))  # before blanks; after punctuation
WHITE = "documents of white space only"  # how this is called among the counts of a job
AROUND = 256  # characters on either side of a place to cut that are tokenised to see whether it is one
NEAR = 1 << 13  # characters at the end of a piece that are searched for such places
SEAMS_TRIED = 16  # of each kind
SHIFTS = (0, 1, 3, 7)  # what hangs on where a text begins, as pairs in "xxxx", shows when it begins elsewhere

JoinedDocuments = tuple[np.ndarray, np.ndarray]  # documents joined, and the length of each


class Job(Protocol):
    """How rows become documents: one output for each of `dtypes`. Pickled with every shard, so it is small.

    fields: the columns that are read of a table, None for all.
    """

    @property
    def fields(self) -> tuple[str, ...] | None: ...

    def dtypes(self) -> tuple[np.dtype, ...]: ...

    def notes(self, columns: Collection[str]) -> list[str]:
        """What a person should know before the job begins. columns: of the first rows."""

    def prepare(self, row: InputRow) -> Any | None:
        """What `encode` needs of one row, None for a row to leave out. Raises DataError, naming the row."""

    def encode(self, prepared: Sequence[Any]) -> tuple[Sequence[JoinedDocuments], dict[str, int]]:
        """The documents of some rows, for each output; and things to count in the report, by name."""

    def describe(self) -> dict[str, Any]:
        """All that decides the output besides the input, as JSON: another description is another job."""


class Encoder(Protocol):
    """What preprocessing needs of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eod(self) -> int: ...
    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]: ...
    def fingerprint(self) -> str: ...


@dataclass(frozen=True)
class EncodeJob:
    """Plain text: each key its own output, all with the same number of documents.

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
        return texts if any(texts) else None  # a row without text is left out, as in NeoX

    def encode(self, prepared: Sequence[tuple[str, ...]]) -> tuple[list[JoinedDocuments], dict[str, int]]:
        """An EOD follows every document that has tokens."""
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
        named = {"type": kind, "files": [file for file in files if file], "vocab_size": tokenizer.vocab_size}
        return {
            "tokenizer": named | {"sha256": tokenizer.fingerprint()},
            "keys": list(self.keys),
            "append_eod": self.append_eod,
            "ftfy": self.ftfy,
        }


def join_documents(rows: Sequence[Sequence[int] | np.ndarray], dtype: np.dtype) -> JoinedDocuments:
    """Lists of ids as one array and their lengths. Raises DataError for an id that does not fit."""
    try:
        arrays = [np.array(row, dtype=dtype) for row in rows]
    except OverflowError:
        worst = max(max(row, key=abs) for row in rows if len(row))
        raise DataError(f"token id {worst} does not fit {dtype}, the type for the tokenizer's vocabulary") from None
    return np.concatenate(arrays or [np.empty(0, dtype)]), np.fromiter(map(len, rows), np.int64, len(rows))


def _long(text: str, tokenizer: Encoder, dtype: np.dtype) -> np.ndarray:
    """The ids of a text of any length, tokenised in pieces where that gives the same ids: a tokenizer holds
    some 120 bytes for each byte of a text."""
    return np.concatenate(
        [join_documents(tokenizer.tokenize_batch([piece]), dtype)[0] for piece in pieces(text, tokenizer)]
    )


def pieces(text: str, tokenizer: Encoder) -> list[str]:
    """The text cut where the tokenizer cuts as well, best before blanks; whole where it never does."""
    parts, start = [], 0
    while len(text) - start > LONG:
        seams = _seams(text, start + LONG - min(LONG // 2, NEAR), start + LONG)
        seam = next((seam for seam in seams if _cuts(text, seam, tokenizer)), 0)
        if not seam:
            return [text]
        parts.append(text[start:seam])
        start = seam
    return [*parts, text[start:]]


def _seams(text: str, start: int, stop: int) -> Iterator[int]:
    """Places to cut text[start:stop], the best first, each kind from behind."""
    for kind in SEAMS:
        last = deque((match.start() for match in kind.finditer(text[start:stop])), SEAMS_TRIED)
        yield from (start + place for place in reversed(last))
    yield from range(stop, stop - SEAMS_TRIED, -1)  # writing without blanks: anywhere


def _cuts(text: str, seam: int, tokenizer: Encoder) -> bool:
    """Whether the tokens before and after `seam` are those of both together; how words are parted is a local
    matter."""
    for shift in SHIFTS:
        left, right = text[max(seam - AROUND + shift, 0) : seam], text[seam : seam + AROUND - shift]
        before, after, both = tokenizer.tokenize_batch([left, right, left + right])
        if [*before, *after] != [*both]:
            return False
    return True


@functools.lru_cache(maxsize=1)
def _build(make_tokenizer: Callable[..., Encoder], tokenizer_args: tuple[str | None, ...]) -> Encoder:
    return make_tokenizer(*tokenizer_args)


def fix_text(text: str) -> str:
    """Text with broken encodings repaired."""
    return import_optional("ftfy", DataError("--ftfy needs the ftfy package (pip install ftfy)")).fix_text(text)
