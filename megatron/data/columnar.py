"""Parquet and Arrow tables, `save_to_disk` folders and datasets of the HuggingFace hub as shards of rows."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.data import readers
from megatron.data.errors import DataError
from megatron.data.readers import SUFFIXES, Row, Shard, file_shards, kind_of

ROWS_AT_ONCE = 64
HUB = "hf://"


@dataclass(frozen=True)
class InputFile:
    """One file that is read, and what tells it from another version of itself."""

    path: Path
    size: int
    modified: int

    @classmethod
    def of(cls, path: Path) -> "InputFile":
        state = path.stat()
        return cls(path, state.st_size, state.st_mtime_ns)

    def shards(self, columns: Sequence[str] | None) -> Iterator[Shard]:
        """columns: those that are needed of a table; None for all."""
        match kind_of(self.path)[0]:
            case "parquet":
                yield from _parquet_shards(self.path, columns)
            case "arrow":
                yield from _arrow_shards(self.path, columns)
            case _:
                yield from file_shards(self.path)


def resolve(
    inputs: Sequence[str | Path], split: str = "train", subset: str | None = None, **hub: Any
) -> list[InputFile]:
    """The files behind paths, folders and hub names, split: of a hub dataset or a folder with splits.

    subset and `hub`: arguments of `datasets.load_dataset`, for hub names.
    """
    files: list[Path] = []
    for item in map(str, inputs):
        path = Path(item)
        if item.startswith(HUB) or not path.exists() and _looks_like_hub(item):
            files += _from_hub(item.removeprefix(HUB), split, subset, hub)
        elif path.is_dir():
            files += _folder(path, split)
        elif not path.is_file():
            raise DataError(f"{path}: no such file")
        else:
            kind_of(path)
            files.append(path)
    return [InputFile.of(path) for path in files]


def _looks_like_hub(name: str) -> bool:
    """`organisation/name`, where no folder of the first part's name lies here."""
    return bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name)) and not Path(name).parent.exists()


def _folder(folder: Path, split: str) -> list[Path]:
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
        if split not in splits:
            raise DataError(f"{folder}: no split {split}; there are {', '.join(splits)} (--split)")
        folder /= split
    if (folder / "state.json").is_file():
        state = json.loads((folder / "state.json").read_text())
        if state.get("_indices_data_files") or state.get("_indices_files"):
            raise DataError(f"{folder}: rows are chosen by an index file; call flatten_indices() and save it again")
        return [folder / part["filename"] for part in state["_data_files"]]
    names = tuple(f"{suffix}{packing}" for suffix in SUFFIXES for packing in ("", *readers.COMPRESSED))
    found = sorted(path for path in folder.iterdir() if path.is_file() and path.name.endswith(names))
    if not found:
        raise DataError(f"{folder}: neither a save_to_disk folder nor a folder with {', '.join(SUFFIXES)} files")
    return found


def _from_hub(name: str, split: str, subset: str | None, hub: dict[str, Any]) -> list[Path]:
    try:
        import datasets
    except ModuleNotFoundError:
        raise DataError(f"{name}: no such file; reading the HuggingFace hub needs the datasets package") from None
    try:
        loaded = datasets.load_dataset(name, subset, split=split, **hub)
    except Exception as problem:  # offline, unknown, private, needs a script: each has its own kind of exception
        reason = str(problem).strip().split("\n")[0] or type(problem).__name__
        raise DataError(
            f"{name}: no such file here, and https://huggingface.co/datasets/{name} cannot be had ({reason}). "
            "Offline, fetch it where there is a network and give the folder"
        ) from None
    return [Path(part["filename"]) for part in loaded.cache_files]


@dataclass(frozen=True)
class Table(Shard):
    """Rows of a table, from row `first` on."""

    first: int
    columns: tuple[str, ...] | None

    def name(self, number: int) -> str:
        return f"{self.source}: row {self.first + number} (from 0)"

    def _rows(self, batches: Iterator[Any]) -> Iterator[Row]:
        values = (value for batch in batches for value in batch.to_pylist())
        yield from (Row(value, self, number) for number, value in enumerate(values))


@dataclass(frozen=True)
class ParquetGroup(Table):
    """One row group of a Parquet file."""

    group: int

    def rows(self) -> Iterator[Row]:
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
    """Record batches [batch, batch + count) of an Arrow file."""

    batch: int
    count: int

    def rows(self) -> Iterator[Row]:
        batches = (batch for i, batch in enumerate(_batches(Path(self.source))) if i >= self.batch)
        wanted = (next(batches) for _ in range(self.count))
        small = (
            (batch.select(list(self.columns)) if self.columns else batch).slice(start, ROWS_AT_ONCE)
            for batch in wanted
            for start in range(0, batch.num_rows, ROWS_AT_ONCE)
        )
        with _damage_named(self.source, "Arrow"):
            yield from self._rows(small)


def _parquet_shards(path: Path, columns: Sequence[str] | None) -> Iterator[Shard]:
    parquet = _pyarrow(path).parquet
    with _damage_named(path, "Parquet"), parquet.ParquetFile(path) as file:
        names, metadata = file.schema_arrow.names, file.metadata
    wanted = _checked(columns, names, path)
    first = 0
    for group in range(metadata.num_row_groups):
        rows = metadata.row_group(group).num_rows
        yield ParquetGroup(str(path), path.stat().st_size // metadata.num_row_groups, first, wanted, group)
        first += rows


def _arrow_shards(path: Path, columns: Sequence[str] | None) -> Iterator[Shard]:
    _pyarrow(path)
    wanted: tuple[str, ...] | None = None
    first = rows = size = start = count = 0
    with _damage_named(path, "Arrow"):
        for index, batch in enumerate(_batches(path)):
            wanted = _checked(columns, batch.schema.names, path)
            rows, size, count = rows + batch.num_rows, size + batch.nbytes, count + 1
            if size >= readers.CHUNK_BYTES:
                yield ArrowBatches(str(path), size, first, wanted, start, count)
                first, start, rows, size, count = first + rows, index + 1, 0, 0, 0
    if count:
        yield ArrowBatches(str(path), size, first, wanted, start, count)


def _batches(path: Path) -> Iterator[Any]:
    """Record batches, mapped and not read; both of Arrow's layouts (a stream, as `datasets` writes, or a file)."""
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
        raise DataError(f"{path}: damaged, or no {kind} file ({reason})") from None


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise DataError(f"{path}: reading Parquet and Arrow needs the pyarrow package (pip install pyarrow)") from None
    return pyarrow
