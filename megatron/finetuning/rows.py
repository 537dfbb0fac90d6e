"""Writes the rows of a data file in one form, a part of them for validation."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.data import DataError
from megatron.data.files import replace_text
from megatron.data.preprocessing.inputs import resolve, split_names
from megatron.data.preprocessing.shards import InputRow
from megatron.data.preprocessing.splitting import assign
from megatron.finetuning.formats import DataFormat, Row, prompt_of, recognise

_MOST_BAD = 100  # rows that are left out before the file is refused
_QUESTIONS = 4  # that the model answers before and after training
_SEED = 1


class Rows(NamedTuple):
    """Rows that were written: `train.jsonl`, `valid.jsonl` and `questions.jsonl` in a folder.

    bad: rows that were left out, and `problem`: what is wrong with the first of them.
    """

    format: DataFormat
    train: int
    valid: int
    bad: int
    problem: str


def write_rows(data: str, valid: str, folder: Path) -> Rows:
    """Converts the rows of a file or dataset, and writes them into `folder`.

    data: as `--input` of tools/datasets/preprocess_data.py. valid: the rows for validation: a share below 1,
        a number, or the name of another file. Raises DataError for rows of no known format.
    """
    row_format = _format(data)
    rows, bad, problem = _converted(data, row_format)
    if not rows:
        raise DataError(f"{data}: no row can be used; the first problem: {problem}")
    if Path(valid).is_file():
        valid_format = _format(valid)
        if valid_format.kind != row_format.kind:
            raise DataError(f"--valid {valid}: {valid_format.description}, but {data} has {row_format.description}")
        train_rows, (valid_rows, more_bad, other_problem) = rows, _converted(valid, valid_format)
        bad, problem = bad + more_bad, problem or other_problem
    else:
        train_rows, valid_rows = _parts(rows, valid)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "train.jsonl", train_rows)
    questions = [
        question for row in valid_rows if (question := prompt_of(json.loads(row), row_format.kind)) is not None
    ]
    _write(folder / "questions.jsonl", [json.dumps(question) for question in questions[:_QUESTIONS]])
    _write(folder / "valid.jsonl", valid_rows)
    return Rows(row_format, len(train_rows), len(valid_rows), bad, problem)


def _input(data: str) -> Iterator[InputRow]:
    return (row for file in resolve(split_names(data)) for shard in file.shards(None) for row in shard.rows())


def _format(data: str) -> DataFormat:
    row = next(_input(data), None)
    if row is None:
        raise DataError(f"{data}: has no rows")
    return recognise(row.value(), data)


def _converted(data: str, row_format: DataFormat) -> tuple[list[str], int, str]:
    """Returns the usable rows as lines of JSON, the number of other rows, and the problem of the first."""
    rows, bad, problem = list[str](), 0, ""
    for row in _input(data):
        try:
            value = row.value()
            if not isinstance(value, Mapping):
                raise DataError(f"{row.location()}: a row is {type(value).__name__}, not an object with columns")
            rows.append(json.dumps(_convert(row_format.convert, value, row), ensure_ascii=False, default=str))
        except DataError as cause:
            bad, problem = bad + 1, problem or str(cause)
            if bad > _MOST_BAD:
                raise DataError(f"{problem}; more than {_MOST_BAD} rows are no {row_format.description}") from None
    return rows, bad, problem


def _convert(convert: Callable[[Row], dict[str, object]], value: Row, row: InputRow) -> dict[str, object]:
    try:
        return convert(value)
    except DataError as cause:
        raise DataError(f"{row.location()}: {cause}") from None


def _parts(rows: Sequence[str], valid: str) -> tuple[list[str], list[str]]:
    """Returns rows for training and for validation, drawn at random."""
    try:
        share = float(valid)
    except ValueError:
        raise DataError(f"--valid {valid}: no such file, and not a number of rows or a share of them") from None
    if len(rows) < 2:
        raise DataError("one row cannot be split into training and validation; give --valid FILE")
    if 0 < share < 1:
        share = min(max(1, round(share * len(rows))), len(rows) - 1)
    parts = assign(len(rows), {"valid": share}, _SEED)
    return [rows[number] for number in parts["train"]], [rows[number] for number in parts["valid"]]


def _write(path: Path, lines: Sequence[str]) -> None:
    replace_text(path, "".join(f"{line}\n" for line in lines))
