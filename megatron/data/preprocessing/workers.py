"""Runs worker processes: each turns shards into its own part files, so that no single process handles
every token."""

import itertools
import json
import multiprocessing
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import IO, Any, TypeVar

import numpy as np

from megatron.data.errors import DataError
from megatron.data.indexed_dataset import can_store
from megatron.data.preprocessing.encode_job import Job
from megatron.data.preprocessing.shards import InputRow, Shard

SHARDS_AHEAD = 2  # shards in progress per worker; this limits memory
BATCH_BYTES = 1 << 18  # bytes of text tokenised at once: they fit a core's cache
LEFT_OUT = "empty rows left out"  # its name among the counts of a job
MAX_ROW_CHARS = 1 << 16  # characters of a bad row that are written to the file of bad rows

Done = TypeVar("Done")


class BadRow(DataError):
    """Raised for a bad row that ends the job. (With `--on-bad-row drop` the row would be dropped instead.)"""


@dataclass
class ShardCounts:
    """Counts of one shard or of a job: bytes read, bad rows dropped, and tokens and documents of each output.

    empty: documents without tokens of each output. counts: counts of events, by their names in the report.
      The field names are those in a job's journal.
    """

    text_bytes: int = 0
    disk_bytes: int = 0
    skipped: int = 0
    tokens: list[int] = field(default_factory=list)
    documents: list[int] = field(default_factory=list)
    empty: list[int] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    @classmethod
    def zeros(cls, outputs: int, disk_bytes: int = 0) -> "ShardCounts":
        """Return counts of zero for a job with this many outputs."""
        return cls(0, disk_bytes, 0, [0] * outputs, [0] * outputs, [0] * outputs)


def encode_shard(job: Job, shard: Shard, stem: str, max_bad_rows: int | None, outputs: int) -> ShardCounts:
    """Turn a shard into the part files `<stem>.<i>.bin`, `<stem>.<i>.len` and `<stem>.bad.jsonl`; runs in a
    worker.

    max_bad_rows: so many bad rows are dropped, one more raises BadRow; None: no limit. outputs: number of the
      job's outputs.
    """
    part = ShardCounts.zeros(outputs, shard.disk_bytes)
    dtypes, counts = job.dtypes(), Counter[str]()
    handles = [[open(f"{stem}.{i}.{kind}", "wb") for kind in ("bin", "len")] for i in range(outputs)]
    bad = open(f"{stem}.bad.jsonl", "wb")
    prepared: list[tuple[InputRow, Any]] = []
    size = 0

    def refuse(row: InputRow, problem: DataError) -> None:
        if max_bad_rows is not None and part.skipped >= max_bad_rows:
            raise BadRow(str(problem)) from problem
        part.skipped += 1
        bad.write(_bad_row(row, problem))

    def write(batch: list[tuple[InputRow, Any]]) -> None:
        try:
            columns, batch_counts = job.encode([item for _, item in batch])
        except DataError as problem:
            if len(batch) == 1:
                return refuse(batch[0][0], problem)
            for pair in batch:  # one by one, to find the bad rows
                write([pair])
            return
        counts.update(batch_counts)
        for i, (values, lengths) in enumerate(columns):
            _store(values, lengths, dtypes[i], *handles[i])
            part.tokens[i] += len(values)
            part.documents[i] += len(lengths)
            part.empty[i] += int((np.asarray(lengths) == 0).sum())

    for row in shard.rows():
        part.text_bytes += row.size
        try:
            item = job.prepare(row)
        except DataError as problem:
            refuse(row, problem)
            continue
        if item is None:
            counts[LEFT_OUT] += 1
            continue
        prepared.append((row, item))
        size += row.size
        if size >= BATCH_BYTES:
            write(prepared)
            prepared, size = [], 0
    if prepared:
        write(prepared)
    for handle in (*itertools.chain.from_iterable(handles), bad):
        handle.close()
    part.counts = dict(counts)
    return part


def _store(values: np.ndarray, lengths: np.ndarray, dtype: np.dtype, data: IO[bytes], sizes: IO[bytes]) -> None:
    lengths = np.asarray(lengths, np.int64)
    if lengths.sum() != len(values):
        raise DataError(f"{len(values)} tokens, but the document lengths sum to {lengths.sum()}")
    if len(lengths) and lengths.max() > np.iinfo(np.int32).max:
        raise DataError(f"a document has {lengths.max()} tokens; at most 2,147,483,647 fit; split it")
    if values.dtype != dtype and not can_store(values, dtype):
        raise DataError(
            f"output values from {values.min()} to {values.max()} do not fit the type of the file, {dtype}; check the "
            "tokenizer's vocabulary size, or the rewards"
        )
    data.write(np.ascontiguousarray(values, dtype.newbyteorder("<")).data)
    sizes.write(lengths.astype("<i4").data)


def _bad_row(row: InputRow, problem: DataError) -> bytes:
    content = row.content.decode("utf-8", "backslashreplace") if isinstance(row.content, bytes) else row.content
    if not isinstance(content, str):
        content = json.dumps(content, default=str)
    return (json.dumps({"problem": str(problem), "row": content[:MAX_ROW_CHARS]}) + "\n").encode()


def in_order(call: Callable[..., Done], tasks: Iterator[tuple[Any, ...]], workers: int) -> Iterator[Done]:
    """Run call(*task) for all tasks in `workers` processes, and yield the results in the order of the tasks.

    workers: 1 runs the tasks in this process. At most about SHARDS_AHEAD tasks per worker are in progress.
    """
    if workers <= 1:
        yield from itertools.starmap(call, tasks)
        return
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    pending: deque[Future[Done]] = deque()
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(os.getpid(),)) as pool:
        try:
            for task in tasks:
                pending.append(pool.submit(call, *task))
                if len(pending) > SHARDS_AHEAD * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _start_worker(parent: int) -> None:
    """Prepare a worker: its tokenizer uses one thread, because processes share the cores, and it ends with
    its parent."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
