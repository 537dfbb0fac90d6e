"""Text files -> tokens -> `.bin/.idx`, byte-identical for any number of worker processes."""

import functools
import multiprocessing
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Protocol

import numpy as np

from megatron.data.errors import DataError
from megatron.data.indexed_dataset import IndexedDatasetWriter, best_fitting_dtype
from megatron.data.readers import Chunk, documents, read_chunks

CHUNKS_AHEAD = 4  # per worker: bounds memory, whatever the size of the input


class Encoder(Protocol):
    """What preprocessing needs of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eod(self) -> int: ...
    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]: ...


@dataclass(frozen=True)
class EncodeJob:
    """How a chunk becomes tokens; sent to the workers with every chunk, so it is small and comparable.

    make_tokenizer: an importable function, called with tokenizer_args once in every process.
    """

    make_tokenizer: Callable[..., Encoder]
    tokenizer_args: tuple[str | None, ...]
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    ftfy: bool = False

    def tokenizer(self) -> Encoder:
        return _build(self.make_tokenizer, self.tokenizer_args)


@dataclass(frozen=True)
class Encoded:
    """One chunk: per key the joined tokens and the length of each document."""

    columns: tuple[tuple[np.ndarray, np.ndarray], ...]
    input_bytes: int


@dataclass(frozen=True)
class Output:
    """One written dataset. `empty`: documents without a single token, which are boundaries only, without an EOD."""

    prefix: str
    documents: int
    empty: int
    tokens: int


def preprocess(
    inputs: Sequence[str | Path],
    output_prefixes: Sequence[str | Path],
    job: EncodeJob,
    *,
    workers: int = 1,
    progress: Callable[[int, int], None] = lambda documents, input_bytes: None,
) -> list[Output]:
    """Write one `.bin/.idx` pair for each of job.keys, under output_prefixes; they appear at the end, or not at all.

    progress(documents, input_bytes) is called with what each finished chunk adds. Raises DataError with file and line.
    """
    dtype = best_fitting_dtype(job.tokenizer().vocab_size)
    outputs = []
    empty = [0] * len(job.keys)
    with ExitStack() as stack:
        writers = [stack.enter_context(IndexedDatasetWriter(prefix, dtype)) for prefix in output_prefixes]
        for encoded in stack.enter_context(closing(_encode_all(read_chunks(inputs), job, workers))):
            for column, (writer, (tokens, sizes)) in enumerate(zip(writers, encoded.columns, strict=True)):
                writer.add_documents(tokens, sizes)
                empty[column] += int((sizes == 0).sum())
            progress(len(encoded.columns[0][1]), encoded.input_bytes)
        for writer, without in zip(writers, empty, strict=True):
            if not writer.tokens:
                raise DataError(
                    f"{', '.join(map(str, inputs))}: no text in any document for {writer.prefix}; nothing is written"
                )
            outputs.append(Output(writer.prefix, writer.documents, without, writer.tokens))
    return outputs


def encode(job: EncodeJob, chunk: Chunk) -> Encoded:
    """Tokenise one chunk. An EOD follows every document that has tokens."""
    tokenizer = job.tokenizer()
    columns = []
    for key in job.keys:
        texts = documents(chunk, key)
        if job.ftfy:
            texts = [_fix_text(text) for text in texts]
        rows = tokenizer.tokenize_batch(texts)
        if job.append_eod:
            rows = [row + [tokenizer.eod] if len(row) else row for row in rows]
        sizes = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        # Already in the stored type: a quarter of the bytes come back from a worker
        tokens = np.fromiter(
            chain.from_iterable(rows), dtype=best_fitting_dtype(tokenizer.vocab_size), count=int(sizes.sum())
        )
        columns.append((tokens, sizes))
    return Encoded(tuple(columns), chunk.size)


def _encode_all(chunks: Iterable[Chunk], job: EncodeJob, workers: int) -> Generator[Encoded, None, None]:
    """Chunks in order; at most CHUNKS_AHEAD a worker are under way."""
    if workers <= 1:
        yield from (encode(job, chunk) for chunk in chunks)
        return
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    pending: deque[Future[Encoded]] = deque()
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(os.getpid(),)) as pool:
        try:
            for chunk in chunks:
                pending.append(pool.submit(encode, job, chunk))
                if len(pending) > CHUNKS_AHEAD * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _start_worker(parent: int) -> None:
    """In a worker: one thread of the tokenizer, as the processes share the cores; and no life after the parent's."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


@functools.lru_cache(maxsize=1)
def _build(make_tokenizer: Callable[..., Encoder], tokenizer_args: tuple[str | None, ...]) -> Encoder:
    return make_tokenizer(*tokenizer_args)


def _fix_text(text: str) -> str:
    try:
        import ftfy
    except ModuleNotFoundError:
        raise DataError("--ftfy needs the ftfy package (pip install ftfy)") from None
    return ftfy.fix_text(text)
