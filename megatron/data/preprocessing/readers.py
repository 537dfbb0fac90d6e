"""Raw inputs as shards: pieces that a worker reads by itself, each a sequence of rows.

Lines of JSON, JSON arrays, CSV, plain text and archives of these, compressed or not; Parquet and Arrow are in
`columnar.py`. Nothing here holds more than a shard in memory, and the same files always give the same shards.
"""

import codecs
import csv
import gzip
import io
import json
import re
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import IO, Any

from megatron.data.errors import DataError
from megatron.neox_arguments.optional_packages import package

CHUNK_BYTES = 1 << 20  # of raw input in a shard: a fraction of a second of tokenising
CSV_FIELD_BYTES = 1 << 30  # a quote that is never closed must not swallow a file without end
BOM = b"\xef\xbb\xbf"
COMPRESSED = (".gz", ".zst")
ZSTD_BYTES = 1 << 15  # packed bytes at once: they may unpack to thousands of times as many
KINDS = {
    ".jsonl": "lines",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
    "": "text",
    ".zip": "zip",
    ".tar": "tar",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
SUFFIXES = tuple(suffix for suffix in KINDS if suffix)
STRUCTURE = re.compile(r'"(?:[^"\\]++|\\.)*+"|["\[\]{},]', re.DOTALL)  # of JSON: strings, and what nests
MAY_BE_COMPRESSED = ("lines", "json", "csv", "text", "tar")


@dataclass(frozen=True)
class Row:
    """One row of an input. content: a line of JSON, a whole text, or a table's columns; problem: why it is bad."""

    content: bytes | str | dict[str, Any]
    shard: "Shard"
    number: int
    problem: str | None = None

    def where(self) -> str:
        """The row's name in messages: file:line."""
        return self.shard.name(self.number)

    @property
    def size(self) -> int:
        """Bytes of text, about."""
        if isinstance(self.content, dict):
            return sum(len(value) if isinstance(value, str) else 8 for value in self.content.values())
        return len(self.content)

    def value(self) -> Any:
        """The decoded row; DataError names the row."""
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
    """A piece of the input. disk_bytes: its share of the file, for progress."""

    source: str
    disk_bytes: int

    def rows(self) -> Iterator[Row]:
        raise NotImplementedError

    def count(self) -> int:
        """Its rows."""
        return sum(1 for _ in self.rows())

    def name(self, number: int) -> str:
        raise NotImplementedError


@dataclass(frozen=True)
class LineRange(Shard):
    """The lines of a plain file that begin within [start, stop) bytes."""

    start: int
    stop: int

    def rows(self) -> Iterator[Row]:
        with open(self.source, "rb") as file:
            position = self.start
            if position:
                file.seek(position - 1)
                position += len(file.readline(self.stop - position + 1)) - 1  # a line may be longer than many ranges
            number = 0
            while position < self.stop and (line := file.readline()):
                row = line if position else line.removeprefix(BOM)
                number, position = number + 1, position + len(line)
                if row.strip():
                    yield Row(row, self, number)

    def name(self, number: int) -> str:
        """The lines before this range are counted only now."""
        if not self.start:
            return f"{self.source}:{number}"
        lines, left, last = 0, self.start, b""
        with open(self.source, "rb") as file:
            while left and (block := file.read(min(left, CHUNK_BYTES))):
                lines, left, last = lines + block.count(b"\n"), left - len(block), block[-1:]
        cut = last != b"\n"  # a line across `start` belongs to the range before
        return f"{self.source}:{lines + cut + number}"


@dataclass(frozen=True)
class Records(Shard):
    """Rows that had to be read in order (a compressed stream, an archive, CSV); each with its number."""

    unit: str  # between the source's name and a row's number
    records: tuple[tuple[int, Any, str | None], ...] = field(repr=False)

    def rows(self) -> Iterator[Row]:
        for number, content, problem in self.records:
            yield Row(content, self, number, problem)

    def name(self, number: int) -> str:
        return f"{self.source}{self.unit}{number}"


@dataclass(frozen=True)
class TextFile(Shard):
    """A plain file as one document; `data` when it comes out of a stream."""

    data: bytes | None = field(default=None, repr=False)

    def rows(self) -> Iterator[Row]:
        data = Path(self.source).read_bytes() if self.data is None else self.data
        try:
            yield Row(data.decode("utf-8-sig"), self, 0)
        except UnicodeDecodeError as problem:
            reason = f"not UTF-8 ({problem.reason} at byte {problem.start})"
            yield Row(data.decode("utf-8", errors="backslashreplace"), self, 0, reason)

    def name(self, number: int) -> str:
        return self.source


def kind_of(name: str | PurePath) -> tuple[str, str]:
    """(kind, compression) by a file's name. Raises DataError for a kind that is not read."""
    path = PurePath(name)
    packing = path.suffix if path.suffix in COMPRESSED else ""
    kind = KINDS.get(PurePath(path.stem).suffix if packing else path.suffix)
    if kind is None or packing and kind not in MAY_BE_COMPRESSED:
        known = f"{', '.join(SUFFIXES)}; {', '.join(COMPRESSED)} after .jsonl, .json, .csv, .tsv, .txt and .tar"
        raise DataError(f"{name}: cannot be read; the kinds known by name are {known}")
    return kind, packing


def file_shards(path: Path) -> Iterator[Shard]:
    """The shards of one file, Parquet and Arrow aside. Raises DataError for a damaged one."""
    kind, packing = kind_of(path)
    size = path.stat().st_size
    try:
        if kind == "text" and not packing:
            yield TextFile(str(path), size)
        elif not packing and (kind == "lines" or kind == "json" and not _is_array(path)):
            for start in range(0, size, CHUNK_BYTES):
                stop = min(start + CHUNK_BYTES, size)
                yield LineRange(str(path), stop - start, start, stop)
        else:
            with open(path, "rb") as raw:
                yield from _stream_shards(kind, packing, raw, str(path), _consumed(raw))
    except UnicodeDecodeError as problem:
        raise DataError(f"{path}: not UTF-8 ({problem.reason})") from None
    except (EOFError, gzip.BadGzipFile, zipfile.BadZipFile, tarfile.ReadError, zlib.error) as problem:
        raise DataError(f"{path}: damaged or cut off ({problem})") from problem


def _consumed(raw: IO[bytes]) -> Callable[[], int]:
    """Bytes read from a file since the last call."""
    last = 0

    def since() -> int:
        nonlocal last
        last, before = raw.tell(), last
        return max(last - before, 0)

    return since


def _stream_shards(
    kind: str, packing: str, raw: IO[bytes], source: str, consumed: Callable[[], int]
) -> Iterator[Shard]:
    with _unpacked(raw, packing, source) as stream:
        if kind == "text":
            data = stream.read()
            yield TextFile(source, consumed(), data)
        elif kind == "csv":
            yield from _grouped(_csv_records(stream, source), source, " line ", consumed)
        elif kind in ("lines", "json"):
            buffered = io.BufferedReader(stream, 1 << 20)  # type: ignore[type-var]
            if kind == "json" and _begins_array(buffered.peek(1)):
                yield from _grouped(_elements(buffered, source), source, ": element ", consumed)
            else:
                yield from _grouped(_lines(buffered), source, ":", consumed)
        elif kind == "zip":
            with zipfile.ZipFile(raw) as archive:
                for name in archive.namelist():
                    if not name.endswith("/"):
                        with archive.open(name) as member:
                            yield from _member(name, member, source, consumed)
        else:
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                for info in archive:
                    if info.isfile() and (opened := archive.extractfile(info)):
                        yield from _member(info.name, opened, source, consumed)


def _member(name: str, stream: IO[bytes], source: str, consumed: Callable[[], int]) -> Iterator[Shard]:
    """A file in an archive; one whose name has an ending that says nothing is a text, as in NeoX."""
    suffixes = [suffix for suffix in PurePath(name).suffixes if suffix in KINDS or suffix in COMPRESSED]
    kind, packing = kind_of("x" + "".join(suffixes[-2:]))
    if kind not in ("lines", "json", "csv", "text"):
        raise DataError(f"{source}: {name} in it is not read from inside an archive; unpack it first")
    yield from _stream_shards(kind, packing, stream, f"{source}/{name}", consumed)


Record = tuple[int, Any, str | None]


def _grouped(records: Iterator[Record], source: str, unit: str, consumed: Callable[[], int]) -> Iterator[Shard]:
    held: list[Record] = []
    size = 0
    for record in records:
        held.append(record)
        size += sum(map(len, record[1].values())) if isinstance(record[1], dict) else len(record[1])
        if size >= CHUNK_BYTES:
            yield Records(source, consumed(), unit, tuple(held))
            held, size = [], 0
    if held:
        yield Records(source, consumed(), unit, tuple(held))


def _lines(stream: IO[bytes]) -> Iterator[Record]:
    for number, line in enumerate(stream, start=1):
        row = line.removeprefix(BOM) if number == 1 else line
        if row.strip():
            yield number, row, None


def _csv_records(stream: IO[bytes], source: str) -> Iterator[Record]:
    """Rows by the names in the first line. Bytes that are no UTF-8 come through, to be refused with the row."""
    csv.field_size_limit(min(CSV_FIELD_BYTES, sys.maxsize))
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    rows = csv.reader(text, delimiter="\t" if ".tsv" in PurePath(source).suffixes else ",", strict=True)
    try:
        names = next(rows, [])
        if len(set(names)) < len(names):
            raise DataError(f"{source}: two columns of the same name in the first line: {', '.join(names)}")
        start = rows.line_num + 1
        for fields in rows:
            if fields:
                problem = None if len(fields) == len(names) else f"{len(fields)} fields for {len(names)} columns"
                yield start, dict(zip(names, fields, strict=False)), problem
            start = rows.line_num + 1
    except csv.Error as problem:
        raise DataError(f"{source} line {rows.line_num}: not CSV ({problem})") from None
    finally:
        text.detach()  # or the stream would be closed with it


def _elements(stream: IO[bytes], source: str) -> Iterator[Record]:
    """The elements of one JSON array, as text, without holding the array."""
    # Where an element ends is all that is wanted of the scanner; Row.value judges its numbers
    decoder, scanner = codecs.getincrementaldecoder("utf-8-sig")(), json.JSONDecoder(parse_int=len, parse_float=len)
    text, ended, number = "", False, 0

    def more() -> None:
        nonlocal text, ended
        block = stream.read(max(len(text), 1 << 20))
        text, ended = text + decoder.decode(block, final=not block), not block

    def skip(position: int, characters: str) -> int:
        while True:
            while position < len(text) and text[position] in characters:
                position += 1
            if position < len(text) or ended:
                return position
            more()

    position = skip(0, " \t\r\n") + 1  # behind the bracket
    while True:
        position = skip(position, " \t\r\n")
        if text[position : position + 1] == "]":
            return
        end, reason = -1, None
        while end < 0:
            try:
                _, end = scanner.raw_decode(text, position)
                reason = None
            except (json.JSONDecodeError, RecursionError) as problem:
                if isinstance(problem, RecursionError):
                    hopeless, reason = True, f"not usable JSON ({problem})"
                else:
                    # Near the end of what was read so far, or inside a string, the rest may mend it
                    hopeless = problem.pos < len(text) - 16 and not problem.msg.startswith("Unterminated string")
                    reason = f"not valid JSON ({problem.msg})"
                if ended or hopeless:  # a bad row, if it has an end
                    end = _element_end(text, position)
                if end < 0 and ended:
                    raise DataError(f"{source}: element {number}: {reason}") from None
                if end < 0:
                    more()
        after = skip(end, " \t\r\n")
        if text[after : after + 1] not in (",", "]"):
            raise DataError(f"{source}: element {number}: neither a comma nor the end of the array after it")
        yield number, text[position:end].encode(), reason
        position, number = after + (text[after] == ","), number + 1
        if position > 1 << 20:
            text, position = text[position:], 0


def _element_end(text: str, position: int) -> int:
    """Where the element of an array that begins at `position` ends, judged by strings and brackets; -1: not in text."""
    depth = 0
    for found in STRUCTURE.finditer(text, position):
        mark = found[0]
        if mark == '"':  # of a string without an end
            return -1
        if depth <= 0 and mark in (",", "]"):
            return found.start()
        depth += (mark in ("[", "{")) - (mark in ("]", "}"))
    return -1


def _is_array(path: Path) -> bool:
    with open(path, "rb") as file:
        return _begins_array(file.read(4096))


def _begins_array(content: bytes) -> bool:
    return content.removeprefix(BOM).lstrip()[:1] == b"["


class _ZstdFrames(io.RawIOBase):
    """All frames of a zstd stream, unpacked. The package's own reader takes a frame without its end as whole."""

    def __init__(self, packed: IO[bytes], new_frame: Callable[[], Any]):
        self.packed, self.new_frame = packed, new_frame
        self.frame: Any = None
        self.block, self.unpacked = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self.unpacked:
            if self.frame is not None and self.frame.eof:
                self.block, self.frame = self.frame.unused_data, None
            self.block = self.block or self.packed.read(ZSTD_BYTES)
            if not self.block:
                if self.frame is not None:
                    raise EOFError("the last frame has no end")
                return 0
            self.frame = self.frame or self.new_frame()
            self.unpacked, self.block = memoryview(self.frame.decompress(self.block)), b""
        size = min(len(buffer), len(self.unpacked))
        buffer[:size], self.unpacked = self.unpacked[:size], self.unpacked[size:]
        return size


@contextmanager
def _unpacked(raw: IO[bytes], packing: str, source: str) -> Iterator[Any]:
    if packing == ".gz":
        with gzip.GzipFile(fileobj=raw) as stream:
            yield stream
    elif packing == ".zst":
        missing = DataError(f"{source}: reading .zst needs the zstandard package (pip install zstandard)")
        zstandard = package("zstandard", missing)
        try:
            yield io.BufferedReader(_ZstdFrames(raw, zstandard.ZstdDecompressor().decompressobj), ZSTD_BYTES)
        except zstandard.ZstdError as problem:
            raise DataError(f"{source}: damaged or cut off ({problem})") from problem
    else:
        yield raw


def texts_of(row: Row, keys: Sequence[str]) -> tuple[str, ...]:
    """The text under each key; a list of texts is joined by empty lines (NeoX); a bare text serves a single key."""
    value = row.value()
    if isinstance(value, str) and len(keys) == 1:
        value = {keys[0]: value}
    texts = []
    for key in keys:
        if not isinstance(value, dict) or key not in value:
            found = ", ".join(map(str, value)) if isinstance(value, dict) else type(value).__name__
            raise DataError(f'{row.where()}: no key "{key}" (found: {found}); name the right one with --jsonl-keys')
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
