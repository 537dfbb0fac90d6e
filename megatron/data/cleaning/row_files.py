"""Reads and writes files of rows: JSONL, compressed or not, and Parquet. Equal rows always give equal
bytes."""

import base64
import contextlib
import gzip
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.data.errors import DataError
from megatron.data.files import temporary
from megatron.data.preprocessing.compression import decompressed
from megatron.neox_arguments.optional_packages import import_optional
from megatron.process.run_files import to_json

FORMATS = ("jsonl", "jsonl.zst", "jsonl.gz", "parquet")
_ROWS_OF_A_GROUP = 10_000
Write = Callable[[Mapping[str, Any]], None]


@contextlib.contextmanager
def row_writer(path: Path, kind: str, schema: bytes | None = None) -> Iterator[Write]:
    """Context manager that opens the file `path` for writing, and yields a function that writes one row of
    JSON values.

    The file gets its name only when it is complete.
    kind: one of FORMATS. schema: for Parquet, from `unified_schema`.
    Raises DataError if a package is missing or a row does not fit the schema.
    """
    unfinished = temporary(path)
    try:
        with _parquet(unfinished, schema) if kind == "parquet" else _json_lines(unfinished, kind) as write:
            yield write
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a .jsonl.zst file."""
    with open(path, "rb") as raw, decompressed(raw, ".zst", str(path)) as stream:
        for line in io.BufferedReader(stream, 1 << 20):
            yield json.loads(line)


def as_json(row: Mapping[str, Any]) -> bytes:
    """Return a row as a line of JSON, without the line feed.

    Types that JSON lacks become text (dates, decimals; bytes in base64). NaN and infinity become null.
    """
    try:
        return to_json(row, ensure_ascii=False, default=_text).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which UTF-8 cannot hold: written as \uXXXX
        return to_json(row, default=_text).encode()


def _text(value: Any) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def schema_of(rows: list[dict[str, Any]]) -> bytes:
    """Return the serialized Arrow schema of `rows`. A field that only some rows have is null in the other
    rows.

    Raises DataError if the rows do not fit one schema.
    """
    import pyarrow

    names = dict.fromkeys(name for row in rows for name in row)
    with _refused():  # Arrow takes the fields from the first row
        table = pyarrow.Table.from_pylist([{**dict.fromkeys(names), **rows[0]}, *rows[1:]])
        return table.schema.serialize().to_pybytes()


def unified_schema(schemas: list[bytes]) -> bytes:
    """Merge schemas from `schema_of` into one; a column with both integers and floats becomes floats.

    Raises DataError if the schemas do not fit together.
    """
    import pyarrow

    with _refused():
        read = [pyarrow.ipc.read_schema(pyarrow.py_buffer(schema)) for schema in dict.fromkeys(schemas)]
        return pyarrow.unify_schemas(read, promote_options="permissive").serialize().to_pybytes()


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """Context manager that turns Arrow's errors into DataError; errors of the disk pass unchanged."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OverflowError, UnicodeEncodeError, RecursionError, OSError) as problem:
        if isinstance(problem, OSError) and problem.errno is not None:  # an error of the disk
            raise
        reason = str(problem).strip().splitlines()[0]
        raise DataError(f"--format parquet: the rows do not form one table ({reason}); use --format jsonl") from None


@contextlib.contextmanager
def _json_lines(path: Path, kind: str) -> Iterator[Write]:
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(path, "wb"))
        sink: Any = file
        if kind == "jsonl.gz":  # neither time nor file name inside, so equal rows give equal bytes
            sink = stack.enter_context(gzip.GzipFile("", "wb", 6, file, mtime=0))
        elif kind == "jsonl.zst":
            missing = DataError("writing .zst needs the zstandard package: pip install 'neox[clean]'")
            zstandard = import_optional("zstandard", missing)
            sink = stack.enter_context(zstandard.ZstdCompressor(3).stream_writer(file, closefd=False))

        def write(row: Mapping[str, Any]) -> None:
            sink.write(as_json(row) + b"\n")

        yield write


@contextlib.contextmanager
def _parquet(path: Path, schema: bytes | None) -> Iterator[Write]:
    pyarrow = import_optional("pyarrow", DataError("--format parquet needs the pyarrow package: pip install pyarrow"))
    from pyarrow import parquet

    assert schema is not None
    columns = pyarrow.ipc.read_schema(pyarrow.py_buffer(schema))
    rows: list[Mapping[str, Any]] = []
    with _refused(), parquet.ParquetWriter(path, columns, compression="zstd") as file:

        def flush() -> None:
            if rows:
                with _refused():
                    file.write_table(pyarrow.Table.from_pylist(rows, schema=columns))
                rows.clear()

        def write(row: Mapping[str, Any]) -> None:
            rows.append(row)
            if len(rows) == _ROWS_OF_A_GROUP:
                flush()

        yield write
        flush()
