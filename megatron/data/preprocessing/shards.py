"""Defines shards: pieces of raw input that a worker reads by itself, each a sequence of rows."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from megatron.data.errors import DataError

CHUNK_BYTES = 1 << 20  # bytes of raw input in a shard, a fraction of a second of tokenising
DOCUMENT_BYTES = 1 << 30  # bytes of the longest document, so that an endless line or a zip bomb cannot fill the memory
BOM = b"\xef\xbb\xbf"

Record = tuple[int, Any, str | None]  # a row of a stream: (number, content, why it is bad or None)


@dataclass(frozen=True)
class InputRow:
    """One row of an input.

    content: a line of JSON, a full text, or the columns of a table.
    number: the row's number in its shard, as `Shard.name` takes it.
    problem: why the row is bad; None if it is good.
    """

    content: bytes | str | dict[str, Any]
    shard: "Shard"
    number: int
    problem: str | None = None

    def location(self) -> str:
        """Return the name of the row for messages, such as file:line."""
        return self.shard.name(self.number)

    @property
    def size(self) -> int:
        """The approximate number of bytes of text in the row."""
        if isinstance(self.content, dict):
            return sum(len(value) if isinstance(value, str) else 8 for value in self.content.values())
        return len(self.content)

    def value(self) -> Any:
        """Return the decoded content of the row. Raises DataError, naming the row, for a bad row."""
        if self.problem:
            raise DataError(f"{self.location()}: {self.problem}")
        if not isinstance(self.content, bytes):
            return self.content
        try:
            return json.loads(self.content.decode("utf-8").rstrip())
        except UnicodeDecodeError as problem:
            raise DataError(f"{self.location()}: not UTF-8 ({problem.reason} at byte {problem.start})") from None
        except json.JSONDecodeError as problem:
            raise DataError(f"{self.location()}: not valid JSON ({problem.msg} at column {problem.colno})") from None
        except (ValueError, RecursionError) as problem:  # a number with thousands of digits, or too deep nesting
            raise DataError(f"{self.location()}: not usable JSON ({problem})") from None


@dataclass(frozen=True)
class Shard:
    """A piece of the input that a worker reads by itself.

    source: the file. disk_bytes: how many bytes of the file count for this shard in the progress.
    """

    source: str
    disk_bytes: int

    def rows(self) -> Iterator[InputRow]:
        """Yield the rows of the shard in order."""
        raise NotImplementedError

    def count(self) -> int:
        """Return the number of rows in the shard."""
        return sum(1 for _ in self.rows())

    def name(self, number: int) -> str:
        """Return the name of row `number` of the shard for messages, such as file:line."""
        raise NotImplementedError


def read_line(file: IO[bytes]) -> tuple[bytes, int, str | None]:
    """Return (next line, its number of bytes, None or the reason why it is bad).

    If a line is too long, only its beginning is returned.
    """
    line = file.readline(DOCUMENT_BYTES)
    size, end = len(line), line[-1:]
    if size < DOCUMENT_BYTES or end == b"\n":
        return line, size, None
    while end and end != b"\n":
        block = file.readline(CHUNK_BYTES)
        size, end = size + len(block), block[-1:]
    return line[:CHUNK_BYTES], size, too_long(size)


def too_long(size: int) -> str:
    """Return the error message for a document of `size` bytes, which is above the limit."""
    return f"{size} bytes in one document, more than {DOCUMENT_BYTES}; split it into several documents"


@dataclass(frozen=True)
class LineRange(Shard):
    """The lines of an uncompressed file that begin at bytes [start, stop)."""

    start: int
    stop: int

    def rows(self) -> Iterator[InputRow]:
        with open(self.source, "rb") as file:
            position = self.start
            if position:
                file.seek(position - 1)
                position += len(file.readline(self.stop - position + 1)) - 1  # a line may be longer than many ranges
            number = 0
            while position < self.stop:
                line, size, problem = read_line(file)
                if not size:
                    return
                row = line if position else line.removeprefix(BOM)
                number, position = number + 1, position + size
                if row.strip():
                    yield InputRow(row, self, number, problem)

    def name(self, number: int) -> str:
        """Return file:line for a row of this range.

        Every call counts the lines before the range, so it is slow.
        """
        if not self.start:
            return f"{self.source}:{number}"
        lines, left, last = 0, self.start, b""
        with open(self.source, "rb") as file:
            while left and (block := file.read(min(left, CHUNK_BYTES))):
                lines, left, last = lines + block.count(b"\n"), left - len(block), block[-1:]
        is_mid_line = last != b"\n"  # a line across `start` belongs to the range before
        return f"{self.source}:{lines + is_mid_line + number}"


@dataclass(frozen=True)
class RecordShard(Shard):
    """Rows that had to be read in order (from a compressed stream, an archive or CSV), each with its
    number."""

    unit: str  # text between the source's name and a row's number in messages
    records: tuple[Record, ...] = field(repr=False)

    def rows(self) -> Iterator[InputRow]:
        for number, content, problem in self.records:
            yield InputRow(content, self, number, problem)

    def name(self, number: int) -> str:
        return f"{self.source}{self.unit}{number}"


@dataclass(frozen=True)
class TextFile(Shard):
    """A text file that is one document. data: its content if it was read from a stream; None: read
    `source`."""

    data: bytes | None = field(default=None, repr=False)

    def rows(self) -> Iterator[InputRow]:
        size = self.disk_bytes if self.data is None else len(self.data)
        if size > DOCUMENT_BYTES:
            yield InputRow("", self, 0, too_long(size))
            return
        data = Path(self.source).read_bytes() if self.data is None else self.data
        try:
            yield InputRow(data.decode("utf-8-sig"), self, 0)
        except UnicodeDecodeError as problem:
            reason = f"not UTF-8 ({problem.reason} at byte {problem.start})"
            yield InputRow(data.decode("utf-8", errors="backslashreplace"), self, 0, reason)

    def name(self, number: int) -> str:
        return self.source


def row_texts(row: InputRow, keys: Sequence[str], flag: str = "--jsonl-keys") -> tuple[str, ...]:
    """Return the text under each key of a row. flag: the option that names the keys, for errors.

    A list of texts is joined with empty lines between them (NeoX). A row that is only a text counts as the
    text of the single key. Raises DataError, naming the row, for a key that is missing or holds no text.
    """
    value = row.value()
    if isinstance(value, str) and len(keys) == 1:
        value = {keys[0]: value}
    texts = []
    for key in keys:
        if not isinstance(value, dict) or key not in value:
            present = ", ".join(map(str, value)) if isinstance(value, dict) else type(value).__name__
            raise DataError(f'{row.location()}: no key "{key}" (found: {present}); name the right one with {flag}')
        text = value[key]
        if isinstance(text, list) and text and all(isinstance(part, str) for part in text):
            text = "\n\n".join(text)
        if not isinstance(text, str):
            raise DataError(f'{row.location()}: "{key}" is {type(text).__name__}, not text')
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as problem:
            if isinstance(row.content, dict):  # a table's bytes that are not UTF-8
                raise DataError(f'{row.location()}: "{key}" is not UTF-8 (at character {problem.start})') from None
            raise DataError(
                f'{row.location()}: "{key}" holds half of a surrogate pair, which is not a character; remove it'
            ) from None
        texts.append(text)
    return tuple(texts)
