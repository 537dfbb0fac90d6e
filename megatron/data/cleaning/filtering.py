"""Runs the first pass of a cleaning job: cleans and filters each part of the input.

It writes the kept documents, the dropped documents, and the hashes and lengths that later passes need.
"""

import json
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np

from megatron.data.cleaning.accounts import Account
from megatron.data.cleaning.exact import hash_records
from megatron.data.cleaning.plan import EVALUATION, CleaningOptions, Work
from megatron.data.cleaning.recipe import Cleaner, Edits
from megatron.data.cleaning.row_files import Write, as_json, row_writer, schema_of
from megatron.data.cleaning.sorted_runs import write_run
from megatron.data.errors import DataError
from megatron.data.preprocessing.shards import InputRow, Shard, row_texts
from megatron.neox_arguments.optional_packages import import_optional
from megatron.neox_arguments.values.integers import finite_float

FILTERED = "filtered"
UNREADABLE = "unreadable/row"


def filter_part(work: Work, part: int, shards: Sequence[Shard]) -> dict[str, Any]:
    """Clean and filter the documents of one part of the input.

    Returns JSON values: `kept`, the number of documents that stay; `disk_bytes`, the size of the part's
      input; `account`, an `Account` of dropped documents; `schema`, for Parquet the Arrow schema of the kept
      rows, in hexadecimal.
    Raises DataError at an unreadable row, unless `skip_bad_rows` is set.
    """
    options = work.options
    cleaner = cleaner_of(work)
    account, edits, texts, rows = Account(), Edits(), list[str](), list[dict[str, Any]]()
    worth: list[float] = []
    with row_writer(work.file(FILTERED, part, "jsonl.zst"), "jsonl.zst") as keep, _rejects(work, part) as out:
        for row in chain.from_iterable(shard.rows() for shard in shards):
            try:
                (text,) = row_texts(row, (options.text_key,), "--text-key")
                score = _score(row, options)
            except DataError as problem:
                if not options.skip_bad_rows:
                    raise
                account.read += 1
                content = _row_text(row)
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
    for name, counts in edits.named_counts().items():
        account.detail(name, counts)
    return {
        "kept": len(texts), "disk_bytes": sum(shard.disk_bytes for shard in shards), "account": account.as_dict(),
        "schema": schema_of(rows).hex() if rows else None,
    }  # fmt: skip


def write_hashes(work: Work, stage: str, part: int, scope: str, texts: Iterable[tuple[int, str]]) -> None:
    """Hash the pieces of `texts` (row, text), and write the files that `deduplication.find_repeats` reads."""
    records, repeats = hash_records(texts, part, scope, work.options.exact_min_chars)
    write_run(work.file(stage, part, f"{scope}.npy"), records)
    np.save(work.file(stage, part, f"{scope}.own.npy"), repeats)


def text_key(text: str) -> int:
    """Return a 64-bit hash of a text, which decides whether the text becomes an example in the report."""
    xxhash = import_optional("xxhash", DataError("cleaning needs the xxhash package: pip install 'neox[clean]'"))
    return int(xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass")))


@lru_cache(1)
def cleaner_of(work: Work) -> Cleaner:
    """Return the `Cleaner` of a job, created once per process, so that its cache of words serves all parts.

    Raises DataError for a missing package.
    """
    return Cleaner(work.options.recipe, work.folder / EVALUATION, work.sets)


def _values(row: InputRow, key: str) -> dict[str, Any]:
    """Return the fields of a row; a row that is only a text becomes {key: text}."""
    value = row.value()
    return dict(value) if isinstance(value, dict) else {key: value}


def _rejects(work: Work, part: int) -> AbstractContextManager[Write]:
    """Return a context manager that yields a function to write dropped rows.

    Without `keep_rejected` the function does nothing.
    """
    if work.options.keep_rejected:
        return row_writer(work.file(FILTERED, part, "rejected.jsonl.zst"), "jsonl.zst")
    return nullcontext(lambda row: None)


def _row_text(row: InputRow) -> str:
    """Return the content of an unreadable row as text."""
    content = row.content
    if isinstance(content, bytes):
        return content.decode("utf-8", "backslashreplace")
    return content if isinstance(content, str) else as_json(content).decode()


def _score(row: InputRow, options: CleaningOptions) -> float:
    """Return the score of a document for `--keep best`; 0 if no score field is set.

    Raises DataError, naming the row, if the field is missing or not a finite number.
    """
    if options.minhash is None or options.minhash.score is None:
        return 0.0
    value = row.value()
    for name in options.minhash.score.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if (score := finite_float(value)) is not None:
        return score
    raise DataError(
        f"{row.location()}: --score {options.minhash.score} is {str(value)[:40]}, expected a finite number; mend the "
        "row, or skip it: --on-error skip"
    )
