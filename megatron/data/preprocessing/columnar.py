"""Reads Parquet and Arrow tables as shards of rows."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.data.errors import DataError
from megatron.data.preprocessing import shards
from megatron.data.preprocessing.shards import InputRow, Shard
from megatron.neox_arguments.optional_packages import import_optional

ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class Table(Shard):
    """The rows [first_row, first_row + length) of a table. columns: the columns to read; None: all."""

    first_row: int
    length: int
    columns: tuple[str, ...] | None

    def count(self) -> int:
        return self.length

    def name(self, number: int) -> str:
        return f"{self.source}: row {self.first_row + number} (from 0)"

    def _rows(self, batches: Iterator[Any]) -> Iterator[InputRow]:
        values = (value for batch in batches for value in batch.to_pylist())
        yield from (InputRow(value, self, number) for number, value in enumerate(values))


@dataclass(frozen=True)
class ParquetGroup(Table):
    """One row group of a Parquet file."""

    group: int

    def rows(self) -> Iterator[InputRow]:
        from pyarrow import parquet

        with (
            _damage_named(self.source, "Parquet"),
            parquet.ParquetFile(self.source, memory_map=True, pre_buffer=False) as file,
        ):
            batches = file.iter_batches(
                ROWS_AT_ONCE, row_groups=[self.group], columns=None if self.columns is None else list(self.columns)
            )
            yield from self._rows(batches)


@dataclass(frozen=True)
class ArrowBatches(Table):
    """The record batches [batch, batch + batches) of an Arrow file."""

    batch: int
    batches: int

    def rows(self) -> Iterator[InputRow]:
        batches = (batch for i, batch in enumerate(_batches(Path(self.source))) if i >= self.batch)
        selected = (next(batches) for _ in range(self.batches))
        small = (
            (batch.select(list(self.columns)) if self.columns else batch).slice(start, ROWS_AT_ONCE)
            for batch in selected
            for start in range(0, batch.num_rows, ROWS_AT_ONCE)
        )
        with _damage_named(self.source, "Arrow"):
            yield from self._rows(small)


def parquet_shards(path: Path, columns: Sequence[str] | None) -> Iterator[Shard]:
    parquet = _pyarrow(path).parquet
    with _damage_named(path, "Parquet"), parquet.ParquetFile(path) as file:
        names, metadata = file.schema_arrow.names, file.metadata
    read_columns = _checked(columns, names, path)
    first_row = 0
    for group in range(metadata.num_row_groups):
        rows = metadata.row_group(group).num_rows
        yield ParquetGroup(
            str(path), path.stat().st_size // metadata.num_row_groups, first_row, rows, read_columns, group
        )
        first_row += rows


def arrow_shards(path: Path, columns: Sequence[str] | None) -> Iterator[Shard]:
    _pyarrow(path)
    read_columns: tuple[str, ...] | None = None
    first_row = rows = size = start = count = 0
    with _damage_named(path, "Arrow"):
        for index, batch in enumerate(_batches(path)):
            read_columns = _checked(columns, batch.schema.names, path)
            rows, size, count = rows + batch.num_rows, size + batch.nbytes, count + 1
            if size >= shards.CHUNK_BYTES:
                yield ArrowBatches(str(path), size, first_row, rows, read_columns, start, count)
                first_row, start, rows, size, count = first_row + rows, index + 1, 0, 0, 0
    if count:
        yield ArrowBatches(str(path), size, first_row, rows, read_columns, start, count)


def _batches(path: Path) -> Iterator[Any]:
    """Yield the record batches of an Arrow file, memory-mapped.

    The file may have either of Arrow's formats: stream, as `datasets` writes, or file.
    """
    pyarrow = _pyarrow(path)
    with pyarrow.memory_map(str(path)) as source:
        if bytes(source.read(6)) == b"ARROW1":
            with pyarrow.ipc.open_file(source) as file:
                yield from (file.get_batch(i) for i in range(file.num_record_batches))
        else:
            source.seek(0)
            with pyarrow.ipc.open_stream(source) as stream:
                yield from stream


def _checked(columns: Sequence[str] | None, names: Sequence[str], path: Path) -> tuple[str, ...] | None:
    if columns is None:
        return None
    for column in columns:
        if column not in names:
            raise DataError(
                f'{path}: no column "{column}" (found: {", ".join(names)}); name the right one with --jsonl-keys'
            )
    return tuple(columns)


@contextmanager
def _damage_named(path: str | Path, kind: str) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except DataError:
        raise
    except (OSError, ValueError, pyarrow.ArrowException) as problem:
        reason = str(problem).strip().split("\n")[0]
        raise DataError(f"{path}: damaged, or not in {kind} format ({reason}); make or copy it again") from None


def _pyarrow(path: Path) -> Any:
    missing = DataError(f"{path}: reading Parquet and Arrow needs the pyarrow package (pip install pyarrow)")
    for part in ("pyarrow.ipc", "pyarrow.parquet"):
        import_optional(part, missing)
    return import_optional("pyarrow", missing)
