"""Writes the rows of a data file in one form, a part of them for validation."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from megatron.data import DataError
from megatron.data.files import replace_text
from megatron.data.preprocessing.inputs import resolve, split_names
from megatron.data.preprocessing.shards import InputRow
from megatron.data.preprocessing.splitting import assign
from megatron.finetuning.formats import JUDGED, TEXTS, DataFormat, prompt_of, recognise

_MOST_BAD, _BAD_SHARE = 100, 0.1  # rows that are left out before the file is refused, and their share
_QUESTIONS = 4  # that the model answers before and after training
_SEED = 1


@dataclass(frozen=True)
class RowSource:
    """The source of a fine-tuning's rows.

    data: as `--input` of tools/datasets/preprocess_data.py. valid: the rows for validation: a share below 1,
        a number, or the name of another file. split, subset: of a dataset that has several; None: its only
        one.
    """

    data: str
    valid: str
    split: str | None = None
    subset: str | None = None


class Rows(NamedTuple):
    """Rows that were written: `train.jsonl`, `valid.jsonl` and `questions.jsonl` in a folder.

    bad: rows that were left out, and `problem`: what is wrong with the first of them.
    """

    format: DataFormat
    train: int
    valid: int
    bad: int
    problem: str


def write_rows(source: RowSource, folder: Path) -> Rows:
    """Converts the rows of a file or dataset, and writes them into `folder`. Raises DataError for rows of no
    known format."""
    data, valid = source.data, source.valid
    input_rows = partial(_input, data, source.split, source.subset)
    row_format = _format(input_rows(), data)
    rows, bad, problem = _converted(input_rows(), row_format)
    if Path(valid).is_file():
        valid_format = _format(_input(valid), valid)
        if valid_format.kind != row_format.kind:
            raise DataError(f"--valid {valid}: {valid_format.description}, but {data} has {row_format.description}")
        train_rows, (valid_rows, more_bad, valid_problem) = rows, _converted(_input(valid), valid_format)
        bad, problem = bad + more_bad, problem or valid_problem
    else:
        train_rows, valid_rows = _parts(rows, valid, row_format.kind)
    _check_labels(train_rows, row_format.kind, data)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "train.jsonl", train_rows)
    questions = [line for row in valid_rows if (line := prompt_of(json.loads(row), row_format.kind)) is not None]
    _write(folder / "questions.jsonl", [json.dumps(question) for question in questions[:_QUESTIONS]])
    _write(folder / "valid.jsonl", valid_rows)
    return Rows(row_format, len(train_rows), len(valid_rows), bad, problem)


def _input(data: str, split: str | None = None, subset: str | None = None) -> Iterator[InputRow]:
    files = resolve(split_names(data), split, subset)
    return (row for file in files for shard in file.shards(None) for row in shard.rows())


def _format(input_rows: Iterator[InputRow], name: str) -> DataFormat:
    """Returns the format of the first rows that have one. name: of the file, for messages."""
    first_problem: DataError | None = None
    for row in islice(input_rows, _MOST_BAD):
        try:
            row_format = recognise(row.value(), name)
            _convert(row_format, row)
            return row_format
        except DataError as cause:
            first_problem = first_problem or cause
    raise first_problem or DataError(f"{name}: has no rows")


def _converted(input_rows: Iterator[InputRow], row_format: DataFormat) -> tuple[list[str], int, str]:
    """Returns the usable rows as lines of JSON, the number of other rows, and the problem of the first.

    Raises DataError if more than a tenth cannot be used.
    """
    rows, bad, problem = list[str](), 0, ""
    for row in input_rows:
        try:
            rows.append(_convert(row_format, row))
        except DataError as cause:
            bad, problem = bad + 1, problem or str(cause)
            if bad > max(_MOST_BAD, _BAD_SHARE * len(rows)):
                break
    if bad > max(1, _BAD_SHARE * (len(rows) + bad)):
        raise DataError(f"{problem}; {bad} of the first {len(rows) + bad} rows are no {row_format.description}")
    return rows, bad, problem


def _convert(row_format: DataFormat, row: InputRow) -> str:
    """Returns a row as a line of JSON. Raises DataError, which names the row, if it is of another format."""
    value = row.value()
    try:
        value = {"text": value} if isinstance(value, str) else value
        if not isinstance(value, Mapping):
            raise DataError(f"a row is {type(value).__name__}, not an object with columns")
        line = json.dumps(row_format.convert(value), ensure_ascii=False, default=str)
        line.encode()
        return line
    except UnicodeEncodeError:
        raise DataError(f"{row.location()}: has half of a surrogate pair, which is no character") from None
    except DataError as cause:
        raise DataError(f"{row.location()}: {cause}") from None


def _parts(rows: Sequence[str], valid: str, kind: str) -> tuple[list[str], list[str]]:
    """Returns rows for training and for validation, drawn at random; of a single text, its last part."""
    try:
        share = float(valid)
    except ValueError:
        raise DataError(f"--valid {valid}: no such file, and not a number of rows or a share of them") from None
    if len(rows) == 1 and kind == TEXTS and 0 < share < 1:
        text = json.loads(rows[0])["text"]
        end = text.rfind("\n", 1, round((1 - share) * len(text))) + 1 or round((1 - share) * len(text))
        return [json.dumps({"text": text[:end]})], [json.dumps({"text": text[end:]})]
    if len(rows) < 2:
        raise DataError("one row cannot be split into training and validation; give --valid FILE")
    if 0 < share < 1:
        share = min(max(1, round(share * len(rows))), len(rows) - 1)
    try:
        parts = assign(len(rows), {"valid": share}, _SEED)
    except DataError:
        raise DataError(
            f"--valid {valid}: expected is a share above 0 and below 1, or a whole number below the {len(rows)} rows"
        ) from None
    return [rows[number] for number in parts["train"]], [rows[number] for number in parts["valid"]]


def _check_labels(rows: Sequence[str], kind: str, data: str) -> None:
    """Raises DataError for judged answers of one kind."""
    labels = {json.loads(row)["label"] for row in rows} if kind == JUDGED else set()
    if len(labels) == 1:
        raise DataError(f"{data}: every label is {str(*labels).lower()}; good and bad answers are needed")


def _write(path: Path, lines: Sequence[str]) -> None:
    replace_text(path, "".join(f"{line}\n" for line in lines))
