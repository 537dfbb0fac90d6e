"""Reads files as shards: lines of JSON, JSON arrays, CSV, plain text, and archives of these, compressed or
not.

Parquet and Arrow are read by `columnar.py`. No reader holds more than a shard in memory, and the same files
always give the same shards.
"""

import csv
import io
import itertools
import lzma
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import IO

from megatron.data.errors import DataError
from megatron.data.preprocessing import shards
from megatron.data.preprocessing.compression import COMPRESSED, decompressed
from megatron.data.preprocessing.json_arrays import array_elements, begins_array
from megatron.data.preprocessing.shards import BOM, LineRange, Record, RecordShard, Shard, TextFile, read_line

CSV_FIELD_BYTES = 1 << 30  # longest CSV field, so that an unclosed quote cannot fill the memory
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
MAY_BE_COMPRESSED = ("lines", "json", "csv", "text", "tar")
IN_ARCHIVES = ("lines", "json", "csv", "text")

# Errors of the standard library for damaged archives; RuntimeError: encrypted or of an unknown method
_DAMAGE = (
    EOFError,
    OSError,
    RuntimeError,
    OverflowError,
    zipfile.BadZipFile,
    tarfile.TarError,
    zlib.error,
    lzma.LZMAError,
)


def file_kind(name: str | PurePath) -> tuple[str, str]:
    """Return (kind, compression suffix or "") of a file, judged by its name. Raises DataError for an
    unsupported kind."""
    path = PurePath(name)
    compression = path.suffix if path.suffix in COMPRESSED else ""
    kind = KINDS.get(PurePath(path.stem).suffix if compression else path.suffix)
    if kind is None or compression and kind not in MAY_BE_COMPRESSED:
        supported = f"{', '.join(SUFFIXES)}; {', '.join(COMPRESSED)} after .jsonl, .json, .csv, .tsv, .txt and .tar"
        raise DataError(f"{name}: unsupported kind of file; supported suffixes are {supported}")
    return kind, compression


def file_shards(path: Path) -> Iterator[Shard]:
    """Yield the shards of one file of any kind but Parquet and Arrow. Raises DataError for a damaged file."""
    kind, compression = file_kind(path)
    size = path.stat().st_size
    try:
        if kind == "text" and not compression:
            yield TextFile(str(path), size)
        elif not compression and (kind == "lines" or kind == "json" and not _holds_array(path)):
            for start in range(0, size, shards.CHUNK_BYTES):
                stop = min(start + shards.CHUNK_BYTES, size)
                yield LineRange(str(path), stop - start, start, stop)
        else:
            with open(path, "rb") as raw:
                yield from _stream_shards(kind, compression, raw, str(path), _bytes_consumed(raw))
    except UnicodeDecodeError as problem:
        raise DataError(f"{path}: not UTF-8 ({problem.reason}); convert it to UTF-8") from None
    except _DAMAGE as problem:
        raise DataError(f"{path}: damaged or truncated ({problem}); make or copy it again") from problem


def _holds_array(path: Path) -> bool:
    with open(path, "rb") as file:
        return begins_array(file.read(4096))


def _bytes_consumed(raw: IO[bytes]) -> Callable[[], int]:
    """Return a function that returns how many bytes of the file `raw` were read since its last call."""
    last = 0

    def bytes_since_last_call() -> int:
        nonlocal last
        last, previous = raw.tell(), last
        return max(last - previous, 0)

    return bytes_since_last_call


def _stream_shards(
    kind: str, compression: str, raw: IO[bytes], source: str, consumed: Callable[[], int]
) -> Iterator[Shard]:
    """Yield the shards of an open file that must be read in order. consumed: see `_bytes_consumed`."""
    with decompressed(raw, compression, source) as stream:
        match kind:
            case "text":
                data = stream.read(shards.DOCUMENT_BYTES + 1)
                yield TextFile(source, consumed(), data)
            case "csv":
                yield from _record_shards(_csv_records(stream, source), source, " line ", consumed)
            case "lines" | "json":
                yield from _json_shards(kind, stream, source, consumed)
            case "zip":
                yield from _zip_shards(raw, source, consumed)
            case _:
                yield from _tar_shards(stream, source, consumed)


def _json_shards(kind: str, stream: IO[bytes], source: str, consumed: Callable[[], int]) -> Iterator[Shard]:
    buffered = io.BufferedReader(stream, 1 << 20)  # type: ignore[type-var]
    # A generator keeps `buffered` alive until all is read; its end would close the file
    if kind == "json" and begins_array(buffered.peek(1)):
        yield from _record_shards(array_elements(buffered, source), source, ": element ", consumed)
    else:
        yield from _record_shards(_lines(buffered), source, ":", consumed)


def _zip_shards(raw: IO[bytes], source: str, consumed: Callable[[], int]) -> Iterator[Shard]:
    with zipfile.ZipFile(raw) as archive:
        for name in archive.namelist():
            if name.endswith("/"):
                continue
            with archive.open(name) as member:
                yield from _member_shards(name, member, source, consumed)


def _tar_shards(stream: IO[bytes], source: str, consumed: Callable[[], int]) -> Iterator[Shard]:
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for info in archive:
            member = archive.extractfile(info) if info.isfile() else None
            if member is not None:
                yield from _member_shards(info.name, member, source, consumed)


def _member_shards(name: str, stream: IO[bytes], source: str, consumed: Callable[[], int]) -> Iterator[Shard]:
    """Yield the shards of a file in an archive. A file with an unknown suffix is read as text, as in NeoX."""
    suffixes = [suffix for suffix in PurePath(name).suffixes if suffix in KINDS or suffix in COMPRESSED]
    kind, compression = file_kind("x" + "".join(suffixes[-2:]))
    if kind not in IN_ARCHIVES:
        raise DataError(f"{source}: {name} cannot be read inside an archive; unpack the archive first")
    yield from _stream_shards(kind, compression, stream, f"{source}/{name}", consumed)


def _record_shards(records: Iterator[Record], source: str, unit: str, consumed: Callable[[], int]) -> Iterator[Shard]:
    """Yield shards of about CHUNK_BYTES of records. unit: see `RecordShard`. consumed: see
    `_bytes_consumed`."""
    records_held: list[Record] = []
    size = 0
    for record in records:
        records_held.append(record)
        size += sum(map(len, record[1].values())) if isinstance(record[1], dict) else len(record[1])
        if size >= shards.CHUNK_BYTES:
            yield RecordShard(source, consumed(), unit, tuple(records_held))
            records_held, size = [], 0
    if records_held:
        yield RecordShard(source, consumed(), unit, tuple(records_held))


def _lines(stream: IO[bytes]) -> Iterator[Record]:
    for number in itertools.count(1):
        line, size, problem = read_line(stream)
        if not size:
            return
        row = line.removeprefix(BOM) if number == 1 else line
        if row.strip():
            yield number, row, problem


def _csv_records(stream: IO[bytes], source: str) -> Iterator[Record]:
    """Yield the rows of a CSV or TSV file as {column name: value}; the first line holds the names.

    Bytes that are not UTF-8 are kept here, so that only their row is refused later.
    """
    csv.field_size_limit(min(CSV_FIELD_BYTES, sys.maxsize))
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    rows = csv.reader(text, delimiter="\t" if ".tsv" in PurePath(source).suffixes else ",", strict=True)
    try:
        names = next(rows, [])
        if len(set(names)) < len(names):
            raise DataError(
                f"{source}: two columns have the same name in the first line: {', '.join(names)}; rename one"
            )
        start = rows.line_num + 1
        for fields in rows:
            if fields:
                problem = (
                    None
                    if len(fields) == len(names)
                    else f"{len(fields)} fields, but the first line names {len(names)} columns"
                )
                yield start, dict(zip(names, fields, strict=False)), problem
            start = rows.line_num + 1
    except csv.Error as problem:
        raise DataError(f"{source} line {rows.line_num}: not CSV ({problem})") from None
    finally:
        text.detach()  # else the stream would be closed too
