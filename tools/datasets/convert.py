"""Converts any input that preprocess_data.py reads to one Parquet file.

python tools/datasets/convert.py data.jsonl data.parquet
"""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.data import DataError  # noqa: E402
from megatron.data.files import sync, temporary  # noqa: E402
from megatron.data.preprocessing.inputs import InputFile, resolve  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402
from tools.datasets.run_job import add_choice_flags  # noqa: E402

GROUP_BYTES = 32 << 20  # bytes of input in a row group, which is held in memory


def tables(files: Sequence[InputFile]) -> Iterator[Any]:
    """Yields the rows of files as Arrow tables of about 32 MiB of input each.

    A row that is a text becomes the column `text`. Raises DataError for a row that is neither object nor
    text."""
    import pyarrow

    rows: list[dict] = []
    size = 0
    for row in (row for file in files for shard in file.shards(None) for row in shard.rows()):
        value = row.value()
        if isinstance(value, str):
            value = {"text": value}
        if not isinstance(value, dict):
            raise DataError(f"{row.location()}: expected an object with keys, or a text, got {type(value).__name__}")
        rows.append(value)
        size += row.size
        if size >= GROUP_BYTES:
            yield pyarrow.Table.from_pylist(rows, schema=_schema(rows))
            rows, size = [], 0
    if rows:
        yield pyarrow.Table.from_pylist(rows, schema=_schema(rows))


def _schema(rows: list[dict]) -> Any:
    """Returns an Arrow schema of the columns of all rows; pyarrow by itself would use only the first row's
    columns."""
    import pyarrow

    names = dict.fromkeys(name for row in rows for name in row)
    return pyarrow.schema([(name, pyarrow.array([row.get(name) for row in rows]).type) for name in names])


def convert(source: str, target: Path, split: str | None = None, subset: str | None = None) -> int:
    """Writes the rows of `source` to the Parquet file `target`. Returns the number of rows.

    Reads the input twice: for the types of the columns, then for the rows. Memory holds one row group.
    split, subset: as the flags --split and --subset. Raises DataError if `source` cannot be read or
    converted.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise DataError("writing Parquet needs the package pyarrow; install: pip install pyarrow") from None
    if target.suffix != ".parquet":
        raise DataError(f"{target}: the output name must end in .parquet")
    files, unfinished, count = resolve([source], split, subset), temporary(target), 0
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        schema = pyarrow.unify_schemas([table.schema for table in tables(files)], promote_options="permissive")
        with parquet.ParquetWriter(unfinished, schema) as writer:
            for table in tables(files):
                missing = [name for name in schema.names if name not in table.schema.names]
                for name in missing:
                    table = table.append_column(name, pyarrow.nulls(len(table), schema.field(name).type))
                writer.write_table(table.select(schema.names).cast(schema))
                count += len(table)
        sync(unfinished)
        os.replace(unfinished, target)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError) as problem:
        raise DataError(
            f"{source}: a column holds values of different types ({str(problem).splitlines()[0]})"
        ) from None
    except OSError as problem:
        raise DataError(f"{target}: cannot be written ({problem.strerror or problem})") from None
    finally:
        unfinished.unlink(missing_ok=True)
    return count


def main(argv: Sequence[str] | None = None) -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument("input", help="file, folder or dataset, as for --input of preprocess_data.py")
    parser.add_argument("output", type=Path, help="the .parquet file to write")
    add_choice_flags(parser)
    options = parser.parse_args(argv)
    try:
        print(f"{options.output}: {convert(options.input, options.output, options.split, options.subset)} rows")
    except DataError as problem:
        sys.exit(f"convert.py: error: {problem}")


if __name__ == "__main__":
    run_command(main)
