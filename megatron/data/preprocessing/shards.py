"""Raw inputs as shards: pieces that a worker reads by itself, each a sequence of rows."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from megatron.data.errors import DataError

CHUNK_BYTES = 1 << 20  # of raw input in a shard: a fraction of a second of tokenising
DOCUMENT_BYTES = 1 << 30  # of the longest: a line without end, or a bomb, must not take all memory
BOM = b"\xef\xbb\xbf"

Record = tuple[int, Any, str | None]  # a row that was read in order: its number, its content, why it is bad


@dataclass(frozen=True)
class InputRow:
    """One row of an input.

    content: a line of JSON, a whole text, or the columns of a table. number: of the row in its shard, as
    `Shard.name` counts. problem: why the row is bad, None if it is not.
    """

    content: bytes | str | dict[str, Any]
    shard: "Shard"
    number: int
    problem: str | None = None

    def where(self) -> str:
        """The name of the row in messages: file:line."""
        return self.shard.name(self.number)

    @property
    def size(self) -> int:
        """About how many bytes of text the row holds."""
        if isinstance(self.content, dict):
            return sum(len(value) if isinstance(value, str) else 8 for value in self.content.values())
        return len(self.content)

    def value(self) -> Any:
        """The decoded row. Raises DataError, which names the row, for a bad one."""
        if self.problem:
            raise DataError(f"{self.where()}: {self.problem}")
        if not isinstance(self.content, bytes):
            return self.content
        try:
            return json.loads(self.content.decode("utf-8"))
        except UnicodeDecodeError as problem:
            raise DataError(f"{self.where()}: not UTF-8 ({problem.reason} at byte {problem.start})") from None
        except json.JSONDecodeError as problem:
            raise DataError(f"{self.where()}: not valid JSON ({problem.msg} at column {problem.colno})") from None
        except (ValueError, RecursionError) as problem:  # a number of thousands of digits, or nested without end
            raise DataError(f"{self.where()}: not usable JSON ({problem})") from None


@dataclass(frozen=True)
class Shard:
    """A piece of the input that is read by itself. disk_bytes: its share of the file `source`, for
    progress."""

    source: str
    disk_bytes: int

    def rows(self) -> Iterator[InputRow]:
        """The rows in their order."""
        raise NotImplementedError

    def count(self) -> int:
        """How many rows the shard has."""
        return sum(1 for _ in self.rows())

    def name(self, number: int) -> str:
        """The name of row `number` in messages."""
        raise NotImplementedError


def read_line(file: IO[bytes]) -> tuple[bytes, int, str | None]:
    """(the next line, how many bytes it has, why it is bad or None); one that is too long is passed over."""
    line = file.readline(DOCUMENT_BYTES)
    size, end = len(line), line[-1:]
    if size < DOCUMENT_BYTES or end == b"\n":
        return line, size, None
    while end and end != b"\n":
        rest = file.readline(CHUNK_BYTES)
        size, end = size + len(rest), rest[-1:]
    return line[:CHUNK_BYTES], size, too_long(size)


def too_long(size: int) -> str:
    """Why a document of so many bytes is bad."""
    return f"{size} bytes in one document, more than {DOCUMENT_BYTES}; cut it into several"


@dataclass(frozen=True)
class LineRange(Shard):
    """The lines of a plain file that begin within [start, stop) bytes."""

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
        """file:line; the lines before this range are counted only now."""
        if not self.start:
            return f"{self.source}:{number}"
        lines, left, last = 0, self.start, b""
        with open(self.source, "rb") as file:
            while left and (block := file.read(min(left, CHUNK_BYTES))):
                lines, left, last = lines + block.count(b"\n"), left - len(block), block[-1:]
        cut = last != b"\n"  # a line across `start` belongs to the range before
        return f"{self.source}:{lines + cut + number}"


@dataclass(frozen=True)
class RecordShard(Shard):
    """Rows that had to be read in order (a compressed stream, an archive, CSV); each with its number."""

    unit: str  # between the source's name and a row's number
    records: tuple[tuple[int, Any, str | None], ...] = field(repr=False)

    def rows(self) -> Iterator[InputRow]:
        for number, content, problem in self.records:
            yield InputRow(content, self, number, problem)

    def name(self, number: int) -> str:
        return f"{self.source}{self.unit}{number}"


@dataclass(frozen=True)
class TextFile(Shard):
    """A plain file as one document; `data` when it comes out of a stream."""

    data: bytes | None = field(default=None, repr=False)

    def rows(self) -> Iterator[InputRow]:
        if self.data is None and self.disk_bytes > DOCUMENT_BYTES:
            yield InputRow("", self, 0, too_long(self.disk_bytes))
            return
        data = Path(self.source).read_bytes() if self.data is None else self.data
        if len(data) > DOCUMENT_BYTES:
            yield InputRow("", self, 0, too_long(len(data)))
            return
        try:
            yield InputRow(data.decode("utf-8-sig"), self, 0)
        except UnicodeDecodeError as problem:
            reason = f"not UTF-8 ({problem.reason} at byte {problem.start})"
            yield InputRow(data.decode("utf-8", errors="backslashreplace"), self, 0, reason)

    def name(self, number: int) -> str:
        return self.source


def row_texts(row: InputRow, keys: Sequence[str], flag: str = "--jsonl-keys") -> tuple[str, ...]:
    """The text under each key; a list of texts is joined by empty lines (NeoX); a bare text serves a single
    key. flag: by which a user names keys.

    Raises DataError, naming the row, for a key that is missing or holds no text.
    """
    value = row.value()
    if isinstance(value, str) and len(keys) == 1:
        value = {keys[0]: value}
    texts = []
    for key in keys:
        if not isinstance(value, dict) or key not in value:
            present = ", ".join(map(str, value)) if isinstance(value, dict) else type(value).__name__
            raise DataError(f'{row.where()}: no key "{key}" (found: {present}); name the right one with {flag}')
        text = value[key]
        if isinstance(text, list) and text and all(isinstance(part, str) for part in text):
            text = "\n\n".join(text)
        if not isinstance(text, str):
            raise DataError(f'{row.where()}: "{key}" is {type(text).__name__}, not text')
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as problem:
            if isinstance(row.content, dict):  # of a table: bytes that were no UTF-8
                raise DataError(f'{row.where()}: "{key}" is not UTF-8 (at character {problem.start})') from None
            raise DataError(f'{row.where()}: "{key}" holds half of a surrogate pair, which is no character') from None
        texts.append(text)
    return tuple(texts)
