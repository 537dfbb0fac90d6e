"""The first pass: each part of the input becomes a file of the documents that stay, one of those that go, and
what the later passes need to know of them."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.cleaning.accounts import Account
from megatron.data.cleaning.exact import hash_records
from megatron.data.cleaning.plan import EVALUATION, CleaningOptions, Work
from megatron.data.cleaning.recipe import Cleaner, Edits, Recipe
from megatron.data.cleaning.row_files import Write, as_json, row_writer, schema_of
from megatron.data.cleaning.sorted_runs import write_run
from megatron.data.errors import DataError
from megatron.data.preprocessing.shards import InputRow, Shard, row_texts
from megatron.neox_arguments.optional_packages import import_optional

FILTERED = "filtered"
UNREADABLE = "unreadable/row"


@dataclass(frozen=True)
class FilteredPart:
    """What became of a part. kept: its documents; disk_bytes: of its input; schema: of the rows that stay,
    in hexadecimal, for Parquet."""

    kept: int
    disk_bytes: int
    account: Account
    schema: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "account": self.account.as_dict()}

    @classmethod
    def of_dict(cls, values: dict[str, Any]) -> "FilteredPart":
        return cls(**{**values, "account": Account.of_dict(values["account"])})


def filter_part(work: Work, part: int, shards: Sequence[Shard]) -> dict[str, Any]:
    """Do a part; the result is a `FilteredPart`. Raises DataError at a row that cannot be read, unless they
    are to be skipped."""
    options = work.options
    cleaner = cleaner_of(work)
    account, edits, texts, rows = Account(), Edits(), list[str](), list[dict[str, Any]]()
    worth: list[float] = []
    with row_writer(work.file(FILTERED, part, "jsonl.zst"), "jsonl.zst") as keep, _rejects(work, part) as out:
        for row in _rows(shards):
            try:
                (text,) = row_texts(row, (options.text_key,), "--text-key")
                score = _score(row, options)
            except DataError as problem:
                if not options.skip_bad_rows:
                    raise
                account.read += 1
                content = _shown(row)
                account.drop(UNREADABLE, f"{problem}\n{content}", text_key(content))
                out({"reason": UNREADABLE, "problem": str(problem), "row": content})
                continue
            account.read, account.chars = account.read + 1, account.chars + len(text)
            cleaned, reason = cleaner.clean(text, edits)
            values = _values(row, options.text_key)
            if reason is not None:
                account.drop(reason, cleaned, text_key(cleaned))
                out({"reason": reason, "row": values})
                continue
            values[options.text_key] = cleaned
            keep(values)
            texts.append(cleaned)
            worth.append(score)
            if options.format == "parquet":
                rows.append(json.loads(as_json(values)))
    if "document" in options.exact:
        write_hashes(work, FILTERED, part, "document", enumerate(texts))
    np.save(work.file(FILTERED, part, "chars.npy"), np.array([len(text) for text in texts], np.int64))
    np.save(work.file(FILTERED, part, "worth.npy"), np.array(worth, np.float64))
    for name, counts in edits.as_dict().items():
        account.detail(name, counts if isinstance(counts, dict) else {name: counts})
    schema = schema_of(rows).hex() if rows else None
    return FilteredPart(len(texts), sum(shard.disk_bytes for shard in shards), account, schema).as_dict()


def write_hashes(work: Work, stage: str, part: int, scope: str, texts: Iterable[tuple[int, str]]) -> None:
    """Write what `deduplication.find_later` needs of the pieces of texts, by their rows."""
    records, own = hash_records(texts, part, scope, work.options.exact_min_chars)
    write_run(work.file(stage, part, f"{scope}.npy"), records)
    np.save(work.file(stage, part, f"{scope}.own.npy"), own)


def text_key(text: str) -> int:
    """A hash of a text, by which samples are chosen."""
    xxhash = import_optional("xxhash", DataError("cleaning needs the xxhash package: pip install 'neox[clean]'"))
    return int(xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass")))


def cleaner_of(work: Work) -> Cleaner:
    """The recipe of a job in this process. Raises DataError for a package that is missing."""
    return _cleaner(work.options.recipe, work.folder / EVALUATION, work.sets)


@lru_cache(1)
def _cleaner(recipe: Recipe, evaluation: Path, sets: tuple[str, ...]) -> Cleaner:
    """One a process: its words stay known from part to part."""
    return Cleaner(recipe, evaluation, sets)


def _rows(shards: Sequence[Shard]) -> Iterator[InputRow]:
    for shard in shards:
        yield from shard.rows()


def _values(row: InputRow, key: str) -> dict[str, Any]:
    """The fields of a row; a bare text has the one."""
    value = row.value()
    return dict(value) if isinstance(value, dict) else {key: value}


def _rejects(work: Work, part: int) -> AbstractContextManager[Write]:
    """A writer of dropped rows, which does nothing where they are not wanted."""
    if work.options.keep_rejected:
        return row_writer(work.file(FILTERED, part, "rejected.jsonl.zst"), "jsonl.zst")
    return nullcontext(lambda row: None)


def _shown(row: InputRow) -> str:
    """A row that cannot be read, as text."""
    content = row.content
    if isinstance(content, bytes):
        return content.decode("utf-8", "backslashreplace")
    return content if isinstance(content, str) else as_json(content).decode()


def _score(row: InputRow, options: CleaningOptions) -> float:
    """What a document is worth to `--keep best`; 0 without. Raises DataError, naming the row, where that is
    no number."""
    if options.minhash is None or options.minhash.score is None:
        return 0.0
    value = row.value()
    for name in options.minhash.score.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    with suppress(OverflowError):
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    raise DataError(f"{row.where()}: --score {options.minhash.score} is {str(value)[:40]}, no number")
