"""Runs a preprocessing job: sends shards to workers, appends their parts in order, and resumes after a crash.

While a job runs, its files are in the folder `.<name>.parts-<digest of the job>/` next to the output:
  journal.json       sizes of the files at the last finished shard; after a crash they are truncated to these
  <i>.bin, <i>.len   output i: the tokens, and the length of each document (int32)
  bad.jsonl          dropped rows
  part-<pid>-<n>.*   shards that are finished but not yet appended
"""

import itertools
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from megatron.data.errors import DataError
from megatron.data.files import sha256, write_json
from megatron.data.indexed_dataset import DocumentBlock, data_path, documents_of, publish, write_index
from megatron.data.preprocessing import shards
from megatron.data.preprocessing.encode_job import Job
from megatron.data.preprocessing.inputs import InputFile, resolve
from megatron.data.preprocessing.work_folder import digest, os_error, work_folder
from megatron.data.preprocessing.workers import BadRow, ShardCounts, encode_shard, in_order

FORMAT = 1  # version of the format of the journal and the job's files
JOURNAL_SECONDS = 2.0  # between two writes of the journal: a crash loses at most the work of this time
LENGTHS_AT_ONCE = 1 << 20
LEAST_TOKENS_PER_BYTE = 1 / 16  # tokens per byte of input, a lower bound for the first check of disk space


@dataclass
class PreprocessProgress:
    """The progress of a preprocessing job, summed over its runs. The field names are those in its journal.

    skipped: bad rows that were dropped.
    text_bytes: bytes of text read.
    disk_bytes: bytes of the input files read, of total_bytes.
    resumed: shards that earlier runs finished.
    """

    shards: int = 0
    documents: int = 0
    skipped: int = 0
    text_bytes: int = 0
    disk_bytes: int = 0
    total_bytes: int = 0
    seconds: float = 0.0
    resumed: int = 0


@dataclass(frozen=True)
class WrittenPair:
    """A `.bin/.idx` pair that was written.

    empty: number of documents without tokens; each is stored as a boundary without an end-of-document token.
    """

    prefix: str
    documents: int
    empty: int
    tokens: int
    dtype: str


@dataclass(frozen=True)
class PreprocessResult:
    """The result of a preprocessing job. counts: counts of events, by their names in the report."""

    outputs: list[WrittenPair]
    progress: PreprocessProgress
    counts: dict[str, int]


def preprocess(
    inputs: Sequence[str | Path | InputFile],
    output_prefixes: Sequence[str | Path],
    job: Job,
    *,
    workers: int = 1,
    max_bad_rows: int | None = 0,
    errors_file: str | Path | None = None,
    metadata_file: str | Path | None = None,
    arguments: dict[str, Any] | None = None,
    progress: Callable[[PreprocessProgress], None] = lambda state: None,
) -> PreprocessResult:
    """Write one `.bin/.idx` pair for each of the job's outputs. All files appear at the end, or none.

    max_bad_rows: so many bad rows are dropped and written to errors_file; one more raises DataError. None: no
      limit.
    metadata_file: gets a JSON description of the result, with `arguments`.
    progress: called after each shard.
    """
    files = [file for item in inputs for file in ([item] if isinstance(item, InputFile) else resolve([item]))]
    prefixes = [str(prefix) for prefix in output_prefixes]
    if len(set(prefixes)) < len(prefixes):
        raise DataError(f"{', '.join(prefixes)}: two keys write the same files; name each key once, or rename a column")
    if workers < 1:
        raise DataError(f"--workers {workers}: must be at least 1")
    with _work_folder(prefixes, job, files) as folder:
        run = _JobRun(folder, job, files, prefixes, max_bad_rows)
        if not run.journal["published"]:
            run.check_space(initial=True)
            try:
                run.encode_shards(workers, progress)
            except BrokenProcessPool:
                raise DataError(f"a worker process died (out of memory?){run.resume_hint()}") from None
            except OSError as problem:
                raise DataError(f"{os_error(problem, folder)}{run.resume_hint()}") from None
            except BadRow as problem:
                raise DataError(f"{problem}{run.resume_hint(' with --on-bad-row drop')}") from None
            finally:
                run.close()
        return run.finish(errors_file, metadata_file, arguments or {})


class _JobRun:
    """One run of a preprocessing job in its work folder; it continues from the journal of earlier runs."""

    def __init__(
        self, folder: Path, job: Job, files: list[InputFile], prefixes: list[str], max_bad_rows: int | None
    ) -> None:
        self.folder, self.job, self.files, self.prefixes = folder, job, files, prefixes
        self.max_bad_rows = max_bad_rows
        self.dtypes = job.dtypes()
        self.names = [f"{i}.{kind}" for i in range(len(prefixes)) for kind in ("bin", "len")] + ["bad.jsonl"]
        self.journal: dict[str, Any] = {
            "published": False,
            "sizes": dict.fromkeys(self.names, 0),
            "progress": asdict(PreprocessProgress(total_bytes=sum(file.bytes_read for file in files))),
            "part": asdict(ShardCounts.zeros(len(prefixes))),
        }
        path = folder / "journal.json"
        if path.is_file():
            self.journal = json.loads(path.read_text())
        self.state = PreprocessProgress(**self.journal["progress"])
        self.state.resumed = self.state.shards
        self.total = ShardCounts(**self.journal["part"])
        self.start = time.monotonic() - self.state.seconds
        self.saved = time.monotonic()
        self.handles: dict[str, IO[bytes]] = {}

    def encode_shards(self, workers: int, progress: Callable[[PreprocessProgress], None]) -> None:
        """Encode every shard that is not done yet, and append its parts in the order of the input."""
        for left_over in self.folder.glob("part-*"):
            left_over.unlink(missing_ok=True)
        for name in self.names:  # truncated to the sizes in the journal
            self.handles[name] = open(self.folder / name, "ab")
            self.handles[name].truncate(self.journal["sizes"][name])
            self.handles[name].seek(0, os.SEEK_END)
        progress(self.state)
        all_shards = (shard for file in self.files for shard in file.shards(self.job.fields))
        todo = itertools.islice(enumerate(all_shards), self.state.shards, None)
        tasks = ((self.job, shard, self._part(number), self.max_bad_rows, len(self.prefixes)) for number, shard in todo)
        for part in in_order(encode_shard, tasks, workers):
            self._append(self.state.shards, part)
            if self.max_bad_rows is not None and self.state.skipped > self.max_bad_rows:
                self._save()
                raise BadRow(
                    f"{self.state.skipped} bad rows, but --on-bad-row allows {self.max_bad_rows}; the first: "
                    f"{self._first_problem()}"
                )
            if time.monotonic() - self.saved >= JOURNAL_SECONDS:
                self._save()
            progress(self.state)
            self.check_space()
        self._save()

    def _part(self, number: int) -> str:
        # Named after this run, because a worker of a killed run may still write for a moment
        return str(self.folder / f"part-{os.getpid()}-{number}")

    def _append(self, number: int, part: ShardCounts) -> None:
        for name, handle in self.handles.items():
            with open(f"{self._part(number)}.{name}", "rb") as source:
                shutil.copyfileobj(source, handle, 1 << 20)
            os.unlink(f"{self._part(number)}.{name}")
        self.journal["sizes"] = {name: handle.tell() for name, handle in self.handles.items()}
        total, state = self.total, self.state
        for totals, new in ((total.tokens, part.tokens), (total.documents, part.documents), (total.empty, part.empty)):
            totals[:] = map(sum, zip(totals, new, strict=True))
        total.counts = dict(Counter(total.counts) + Counter(part.counts))
        state.shards, state.documents = state.shards + 1, total.documents[0]
        state.skipped += part.skipped
        state.text_bytes, state.disk_bytes = state.text_bytes + part.text_bytes, state.disk_bytes + part.disk_bytes
        state.seconds = time.monotonic() - self.start

    def _first_problem(self) -> str:
        for handle in self.handles.values():
            handle.flush()
        with open(self.folder / "bad.jsonl", "rb") as bad:
            return json.loads(bad.readline())["problem"]

    def _save(self) -> None:
        """Sync the files, then record their sizes and the progress in the journal."""
        for handle in self.handles.values():
            handle.flush()
            os.fsync(handle.fileno())
        self.saved = time.monotonic()
        self.journal |= {"progress": asdict(self.state), "part": asdict(self.total)}
        write_json(self.folder / "journal.json", self.journal)

    def check_space(self, initial: bool = False) -> None:
        """Raise DataError if the disk cannot hold the result, estimated from what is written so far.

        initial: nothing is written yet; the estimate is a lower bound from the size of the input.
        """
        left = self.state.total_bytes - self.state.disk_bytes
        if initial:
            need = left * LEAST_TOKENS_PER_BYTE * sum(dtype.itemsize for dtype in self.dtypes)
        else:
            written = sum(self.journal["sizes"].values())
            need = written / max(self.state.disk_bytes, 1) * left + self.journal["sizes"]["0.len"] * 5
        free = shutil.disk_usage(self.folder).free
        if need > free:
            raise DataError(
                f"{self.folder.parent}: disk full: about {need / 1e9:.3g} GB more needed, {free / 1e9:.3g} GB free"
                f"{'' if initial else f' (at {self._share_done()})'}{self.resume_hint()}"
            )

    def resume_hint(self, options: str = "") -> str:
        if not self.state.shards:
            return ""
        return f"; {self._share_done()} is done and kept: run the same command{options} again to resume"

    def _share_done(self) -> str:
        return f"{self.state.disk_bytes / max(self.state.total_bytes, 1):.0%} of the input"

    def close(self) -> None:
        """Record finished work in the journal, also after a failure, and close the files.

        On a full disk the journal stays as it was last written.
        """
        with suppress(OSError):
            if self.state.shards > self.state.resumed:
                self._save()
        for handle in self.handles.values():
            with suppress(OSError):
                handle.close()
        self.handles = {}

    def finish(
        self, errors_file: str | Path | None, metadata_file: str | Path | None, arguments: dict
    ) -> PreprocessResult:
        """Write the `.idx` files, then rename all files to their final names. If it is interrupted, call
        it again."""
        outputs = [
            WrittenPair(prefix, self.total.documents[i], self.total.empty[i], self.total.tokens[i], str(self.dtypes[i]))
            for i, prefix in enumerate(self.prefixes)
        ]
        result = PreprocessResult(outputs, self.state, self.total.counts)
        if not self.journal["published"]:
            self._check_result(outputs)
            try:
                for i, dtype in enumerate(self.dtypes):
                    write_index(self.folder / f"{i}.idx", dtype, partial(_documents, self.folder / f"{i}.len"))
                if metadata_file:
                    write_json(self.folder / "metadata.json", self._metadata(result, arguments))
            except OSError as problem:
                raise DataError(f"{os_error(problem, self.folder)}{self.resume_hint()}") from None
            self.journal["published"] = True
            self._save()
        for i, prefix in enumerate(self.prefixes):
            publish(self.folder / f"{i}.bin", self.folder / f"{i}.idx", prefix)
        bad = self.folder / "bad.jsonl"
        if errors_file and bad.exists():
            os.replace(bad, errors_file) if self.state.skipped else Path(errors_file).unlink(missing_ok=True)
        if metadata_file and (self.folder / "metadata.json").exists():
            os.replace(self.folder / "metadata.json", metadata_file)
        return result

    def _check_result(self, outputs: list[WrittenPair]) -> None:
        problem = ""
        for file in self.files:
            if not file.path.exists() or InputFile.from_path(file.path, file.rows) != file:
                problem = f"{file.path}: this input changed while the job read it; run the command again"
        for output in outputs:
            if not output.tokens:
                names = ", ".join(str(file.path) for file in self.files)
                problem = f"{names}: no document with text is left for {output.prefix}; nothing is written"
                reasons = [f"{name}: {count}" for name, count in self.total.counts.items() if count]
                if self.state.skipped:
                    reasons.append(f"{self.state.skipped} bad rows left out, the first: {self._first_problem()}")
                problem += f" ({'; '.join(reasons)})" if reasons else ""
        if problem:
            (self.folder / "journal.json").unlink(missing_ok=True)  # this work is of no use to the next run
            raise DataError(problem)

    def _metadata(self, result: PreprocessResult, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the content of `metadata_file`, with the key names of the fork of GPT-NeoX.

        It holds counts, settings, `arguments`, timing, and path, size and SHA-256 of each input file.
        """
        names = [Path(prefix).name for prefix in self.prefixes]
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            digests = list(pool.map(sha256, [file.path for file in self.files]))
        return {
            "token_counts": {name: output.tokens for name, output in zip(names, result.outputs, strict=True)},
            "document_counts": {name: output.documents for name, output in zip(names, result.outputs, strict=True)},
            "total_tokens": sum(output.tokens for output in result.outputs),
            "empty_documents": {name: output.empty for name, output in zip(names, result.outputs, strict=True)},
            "dtypes": {name: output.dtype for name, output in zip(names, result.outputs, strict=True)},
            "rows_skipped": self.state.skipped,
            "counts": result.counts,
            **self.job.describe(),
            "args": arguments,
            "inputs": [
                {"path": str(file.path), "bytes": file.size, "sha256": digest}
                | ({} if file.rows is None else {"rows": file.rows[:2]})
                for file, digest in zip(self.files, digests, strict=True)
            ],
            "timing": {
                "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "seconds": round(self.state.seconds, 3),
                "text_bytes": self.state.text_bytes,
            },
            "output_files": [f"{prefix}.{kind}" for prefix in self.prefixes for kind in ("bin", "idx")],
        }


def _documents(path: Path) -> Iterator[DocumentBlock]:
    with open(path, "rb") as file:
        while block := file.read(4 * LENGTHS_AT_ONCE):
            yield documents_of(np.frombuffer(block, "<i4"))


def _work_folder(prefixes: list[str], job: Job, files: list[InputFile]) -> AbstractContextManager[Path]:
    """Return the context manager of the job's work folder.

    A job with the same input, outputs and description has the same folder.
    """
    identity = [FORMAT, shards.CHUNK_BYTES, prefixes, job.describe(), [file.version() for file in files]]
    target = data_path(prefixes[0]).absolute()
    return work_folder(
        target.with_name(f".{Path(prefixes[0]).name}.parts-{digest(identity)}"), f".{Path(prefixes[0]).name}.parts-*",
        prefixes[0], "choose another --output-prefix", lambda folder: (folder / "journal.json").exists(),
    )  # fmt: skip
