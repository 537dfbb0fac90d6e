"""Raw text files as chunks of lines, and the documents in a chunk."""

import gzip
import io
import json
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from megatron.data.errors import DataError

CHUNK_BYTES = 1 << 20
SUFFIXES = (".jsonl", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".txt", ".zip")


@dataclass(frozen=True)
class Chunk:
    """Raw lines of one file; `whole` when they are one plain-text document instead of one JSON object each."""

    source: str
    first_line: int
    lines: tuple[bytes, ...]
    whole: bool = False

    @property
    def size(self) -> int:
        return sum(map(len, self.lines))


def read_chunks(paths: Sequence[str | Path]) -> Iterator[Chunk]:
    """The files in order, about 1 MiB a chunk.

    One document each: `.txt`, a file whose name has no ending, and every member of a `.zip`.
    """
    for path in map(Path, paths):
        if not path.is_file():
            raise DataError(f"{path}: no such file")
        if path.suffix and not str(path).endswith(SUFFIXES):
            raise DataError(f"{path}: cannot be read as text; the kinds known by name are {', '.join(SUFFIXES)}")
        try:
            yield from _read(path)
        except (EOFError, gzip.BadGzipFile, zipfile.BadZipFile) as problem:
            raise DataError(f"{path}: damaged or cut off ({problem})") from problem


def documents(chunk: Chunk, key: str) -> list[str]:
    """The texts under `key`, empty ones left out as in NeoX; a list of texts is joined by empty lines."""
    if chunk.whole:
        return [text for text in [_decode(b"".join(chunk.lines), chunk.source)] if text]
    texts = []
    for number, line in enumerate(chunk.lines, start=chunk.first_line):
        if line.strip():
            text = _text_of(line, key, f"{chunk.source}:{number}")
            if text:
                texts.append(text)
    return texts


def _read(path: Path) -> Iterator[Chunk]:
    if path.suffix in ("", ".txt"):
        yield Chunk(str(path), 1, (path.read_bytes(),), whole=True)
    elif path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if not name.endswith("/"):
                    yield Chunk(f"{path}/{name}", 1, (archive.read(name),), whole=True)
    else:
        with _open(path) as file:
            first, lines, size = 1, [], 0
            for line in file:
                lines.append(line)
                size += len(line)
                if size >= CHUNK_BYTES:
                    yield Chunk(str(path), first, tuple(lines))
                    first, lines, size = first + len(lines), [], 0
            if lines:
                yield Chunk(str(path), first, tuple(lines))


@contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    if path.suffix == ".gz":
        with gzip.open(path, "rb") as file:
            yield file  # type: ignore[misc]
    elif path.suffix == ".zst":
        try:
            import zstandard
        except ModuleNotFoundError:
            raise DataError(f"{path}: reading .zst needs the zstandard package (pip install zstandard)") from None
        with open(path, "rb") as raw:
            stream = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
            try:
                yield io.BufferedReader(stream, CHUNK_BYTES)  # type: ignore[type-var]
            except zstandard.ZstdError as problem:
                raise DataError(f"{path}: damaged or cut off ({problem})") from problem
    else:
        with open(path, "rb") as file:
            yield file


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise DataError(f"{where}: not UTF-8 ({problem.reason} at byte {problem.start})") from None


def _text_of(line: bytes, key: str, where: str) -> str:
    try:
        row = json.loads(_decode(line, where))
    except json.JSONDecodeError as problem:
        raise DataError(f"{where}: not valid JSON ({problem.msg} at column {problem.colno})") from None
    if isinstance(row, str):  # a line may be the bare text
        return row
    if not isinstance(row, dict) or key not in row:
        found = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise DataError(f'{where}: no key "{key}" (found: {found}); name the right one with --jsonl-keys')
    text = row[key]
    if isinstance(text, list) and all(isinstance(part, str) for part in text):
        text = "\n\n".join(text)
    if not isinstance(text, str):
        raise DataError(f'{where}: "{key}" is {type(text).__name__}, not text')
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f'{where}: "{key}" holds half of a surrogate pair, which is no character') from None
    return text
