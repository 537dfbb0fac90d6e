"""Runs a cleaning job, from its input to its output files, in passes over parts. Finished parts survive a
restart.

While it runs, everything lies in OUT/.clean-<digest of the job>/, a folder for each pass:
  evaluation/   runs of words of the evaluation sets
  filtered/     for each part of the input: the documents that stay, their hashes, and an account
  exact/        documents that repeat an earlier one
  minhash/      keys of bands, pairs, and dropped documents
  pieces/       hashes of paragraphs and lines of what is left, and the repeats among them
  published/    the output files
A pass writes <part>.json last: where it exists, the other files of that part are complete.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.cleaning.accounts import Account
from megatron.data.cleaning.decontamination import write_runs
from megatron.data.cleaning.deduplication import (
    EXACT,
    MINHASH,
    PIECES,
    choose,
    find_pairs,
    find_repeats,
    sign_on_device,
    similar_pairs,
    write_bands,
    write_pieces,
    write_shingle_sets,
)
from megatron.data.cleaning.filtering import FILTERED, FilteredPart, cleaner_of, filter_part
from megatron.data.cleaning.output_folder import PAGE, WORK, check_target, publish
from megatron.data.cleaning.page import write_page
from megatron.data.cleaning.plan import EVALUATION, FORMAT, CleaningOptions, Work, parts_of
from megatron.data.cleaning.publishing import PUBLISHED, SETS, file_name, slices_of_files, text_of_document, write_files
from megatron.data.cleaning.row_files import unified_schema
from megatron.data.errors import DataError
from megatron.data.files import sha256, write_json
from megatron.data.preprocessing import shards
from megatron.data.preprocessing.inputs import InputFile
from megatron.data.preprocessing.work_folder import digest, os_error, work_folder
from megatron.data.preprocessing.workers import in_order

# Whose versions may change a verdict: a job is not gone on with by others.
_LIBRARIES = ("spacy", "ftfy", "py3langid", "regex", "xxhash")
_GO_ON = "finished work is kept: the same command goes on from there"


@dataclass
class PassProgress:
    """The progress of a pass.

    total: the size of its input, in the unit of this pass. done: how much of it is processed.
    documents: documents processed so far.
    resumed, resumed_done: how many of `documents` and of `done` an earlier run had processed.
    """

    name: str
    total: int
    done: int = 0
    documents: int = 0
    resumed: int = 0
    resumed_done: int = 0


Show = Callable[[PassProgress], None]
Task = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Resources:
    """The workers and the device of a job; they do not change its result.

    workers: number of worker processes.
    device: the torch device that computes MinHash signatures; None: the workers compute them with numpy.
    """

    workers: int = 1
    device: str | None = None


@dataclass
class CleaningResult:
    """The result of a job.

    documents, chars: counts of kept documents, by set.
    account: counts of dropped documents.
    existed: True if an earlier run had already written the full result.
    """

    files: list[str]
    documents: dict[str, int]
    chars: dict[str, int]
    account: Account
    existed: bool = False
    notes: list[str] = field(default_factory=list)


def clean(
    files: Sequence[InputFile],
    target: Path,
    options: CleaningOptions,
    resources: Resources,
    evaluation: Sequence[InputFile] = (),
    arguments: dict[str, Any] | None = None,
    overwrite: bool = False,
    show: Show = lambda progress: None,
) -> CleaningResult:
    """Clean the documents of `files` into the folder `target`, and write metadata.json and report.html.

    evaluation: sets whose n-grams no document may contain.
    arguments: written into the metadata.
    overwrite: replace the result of another job.
    show: called with the progress of each pass.
    Raises DataError for unusable input. The same call then resumes from the finished parts.
    """
    versions = [[file.version() for file in group] for group in (files, evaluation)]
    identity = digest([FORMAT, shards.CHUNK_BYTES, options.describe(), versions, _libraries()])
    metadata = check_target(target, identity, [*files, *evaluation], overwrite)
    if metadata is not None:
        account = Account.from_dict(metadata["account"])
        return CleaningResult(
            metadata["output_files"], metadata["document_counts"], metadata["chars"], account, existed=True
        )
    folder = target.absolute() / f"{WORK}{identity}"

    def is_worth_keeping(folder: Path) -> bool:
        return any(folder.glob(f"{FILTERED}/*.json"))

    advice = "choose another OUT"
    with work_folder(folder, f"{WORK}*", str(target), advice, is_worth_keeping, keep_others=True) as place:
        job = _Job(Work(place, options), files, evaluation, resources, show)
        try:
            return job.run(target, identity, arguments or {})
        except BrokenProcessPool:
            raise DataError(f"a worker process died (out of memory?); {_GO_ON}") from None
        except OSError as problem:
            raise DataError(f"{os_error(problem, place)}; {_GO_ON}") from None


def _libraries() -> dict[str, str | None]:
    def version_of(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    return {name: version_of(name) for name in _LIBRARIES}


class _Job:
    """A running job with its work folder."""

    def __init__(
        self, work: Work, files: Sequence[InputFile], evaluation: Sequence[InputFile], resources: Resources, show: Show
    ) -> None:
        self.work, self.files, self.evaluation, self.resources, self.show = work, files, evaluation, resources, show
        self.start_time = time.monotonic()
        self.notes: list[str] = []
        self.facts: dict[str, Any] = {}

    def run(self, target: Path, identity: str, arguments: dict[str, Any]) -> CleaningResult:
        """Run all passes, then publish the result."""
        self._evaluation_sets()
        cleaner_of(self.work)  # what is missing is told now; the workers, which are forked, have it already
        account = Account()
        filtered = self._filter(account)
        options, parts = self.work.options, len(filtered)
        if "document" in options.exact:
            self.facts["exact"] = self._find_repeats(EXACT, FILTERED, ["document"], parts)
        if options.minhash is not None:
            self._near_duplicates(filtered)
        if options.piece_scopes:
            self._hash_pieces(filtered)
            self.facts["pieces"] = self._find_repeats(PIECES, PIECES, options.piece_scopes, parts)
        documents, chars, count = self._write(filtered, account)
        if not sum(documents.values()):
            shutil.rmtree(self.work.folder / FILTERED)  # nothing of the job is worth keeping
            reasons = ", ".join(f"{reason} {number}" for reason, number in account.dropped.most_common(5))
            raise DataError(
                f"all {account.read} documents are dropped{f': {reasons}' if reasons else ''}; use other rules or data"
            )
        for file in (*self.files, *self.evaluation):
            if not file.path.exists() or InputFile.from_path(file.path, file.rows) != file:
                raise DataError(f"{file.path}: changed while it was read; run again")
        return self._publish(target, identity, arguments, account, documents, chars, parts, count)

    def _evaluation_sets(self) -> None:
        """Write the n-grams of the evaluation sets into the work folder, and keep the names of the sets."""
        ngrams = self.work.options.recipe.decontaminate
        if ngrams is None:
            return
        folder = self.work.folder / EVALUATION
        folder.mkdir(exist_ok=True)
        runs = write_runs(self.evaluation, ngrams, folder)
        self.work = Work(self.work.folder, self.work.options, runs.names)
        if runs.short:
            self.notes.append(f"--decontaminate: {runs.short} of {runs.texts} texts have fewer than {ngrams} words, "
                              "so nothing was compared with them")  # fmt: skip

    def _filter(self, account: Account) -> list[FilteredPart]:
        """Filter each part, add the parts' accounts to `account`, and return the results without accounts."""
        (self.work.folder / FILTERED).mkdir(exist_ok=True)
        progress = self._begin(PassProgress("filter", sum(file.bytes_read for file in self.files)))

        tasks = (
            partial(filter_part, self.work, part, shards_of_part)
            for part, shards_of_part in enumerate(parts_of(self.files))
        )
        filtered = []
        for values, was_done in self._run_tasks(FILTERED, tasks):
            part = FilteredPart.from_dict(values)
            account.add(part.account)
            self._step(progress, part.disk_bytes, part.account.read, was_done)
            filtered.append(replace(part, account=Account()))  # samples of thousands of parts are not kept
        return filtered

    def _find_repeats(self, stage: str, hashed: str, scopes: Sequence[str], parts: int) -> dict[str, Any]:
        """Find the repeated pieces of each scope, and return {scope: number of repeated pieces}."""
        progress = self._begin(PassProgress(f"exact {', '.join(scopes)}", len(scopes)))
        counts = {}
        for scope in scopes:
            call = partial(find_repeats, self.work, parts, stage, hashed, scope)
            counts[scope] = self._run_once(stage, f"found-{scope}", call)["pieces"]
            self._step(progress, 1, 0, False)
        return counts

    def _hash_pieces(self, filtered: Sequence[FilteredPart]) -> None:
        (self.work.folder / PIECES).mkdir(exist_ok=True)
        progress = self._begin(PassProgress("paragraphs and lines", sum(part.num_documents for part in filtered)))
        tasks = (partial(write_pieces, self.work, part) for part in range(len(filtered)))
        for part, (_, was_done) in enumerate(self._run_tasks(PIECES, tasks)):
            self._step(progress, filtered[part].num_documents, filtered[part].num_documents, was_done)

    def _near_duplicates(self, filtered: Sequence[FilteredPart]) -> None:
        work, parts = self.work, len(filtered)
        (work.folder / MINHASH).mkdir(exist_ok=True)
        progress = self._begin(PassProgress("minhash", sum(part.num_documents for part in filtered)))
        tasks = (partial(write_bands, work, part, self.resources.device is None) for part in range(parts))
        num_too_short = 0
        for part, (values, was_done) in enumerate(self._run_tasks(MINHASH, tasks)):
            if work.file(MINHASH, part, "shingles.npz").exists():  # maybe of an earlier run with a device
                sign_on_device(work, part, self.resources.device or "cpu")
            num_too_short += values["without"]
            self._step(progress, filtered[part].num_documents, filtered[part].num_documents, was_done)
        method = work.options.minhash
        assert method is not None
        bands = self._begin(PassProgress("clusters", method.bands))

        def cluster() -> dict[str, Any]:
            pairs = find_pairs(work, parts, lambda done: self._step(bands, done - bands.done, 0, False))
            if method.jaccard is not None:
                np.save(work.folder / MINHASH / "paired.npy", np.unique(pairs))
                for _ in in_order(write_shingle_sets, ((work, part) for part in range(parts)), self.resources.workers):
                    pass
                pairs = similar_pairs(work, pairs, parts)
            return choose(work, pairs, parts)

        self.facts["minhash"] = self._run_once(MINHASH, "clusters", cluster) | {
            "too_short_for_a_shingle": num_too_short
        }

    def _write(self, filtered: Sequence[FilteredPart], account: Account) -> tuple[dict[str, int], dict[str, int], int]:
        """Write the output files. Return documents and characters by set, and the number of files of each
        set."""
        work = self.work
        (work.folder / PUBLISHED).mkdir(exist_ok=True)
        files = slices_of_files(work, len(filtered))
        schema = None
        if work.options.format == "parquet":
            schemas = [
                bytes.fromhex(filtered_part.schema) for filtered_part in filtered if filtered_part.schema is not None
            ]
            schema = unified_schema(schemas).hex() if schemas else None
        progress = self._begin(PassProgress("write", len(files)))
        tasks = (partial(write_files, work, number, len(files), slices, schema) for number, slices in enumerate(files))
        documents, chars = dict.fromkeys(SETS, 0), dict.fromkeys(SETS, 0)
        for values, was_done in self._run_tasks(PUBLISHED, tasks):
            account.add(Account.from_dict(values["account"]))
            for name, count in values["documents"].items():
                documents[name] += count
                chars[name] += values["chars"].get(name, 0)
            self._step(progress, 1, sum(values["documents"].values()), was_done)
        return documents, chars, len(files)

    def _run_tasks(self, stage: str, tasks: Iterator[Task]) -> Iterator[tuple[dict[str, Any], bool]]:
        """Run the tasks of a pass in the workers. Yield, for each task in order, its result and whether an
        earlier run had finished it."""
        noted = ((task, self.work.file(stage, number, "json")) for number, task in enumerate(tasks))
        # A task that is done is not sent to a worker: it may hold a part of the input.
        todo = ((None if path.exists() else task, path) for task, path in noted)
        yield from in_order(_remembered, todo, self.resources.workers)

    def _run_once(self, stage: str, name: str, call: Task) -> dict[str, Any]:
        folder = self.work.folder / stage
        folder.mkdir(exist_ok=True)
        return _remembered(call, folder / f"{name}.json")[0]

    def _begin(self, progress: PassProgress) -> PassProgress:
        self.show(progress)
        return progress

    def _step(self, progress: PassProgress, done: int, documents: int, was_done: bool) -> None:
        progress.done += done
        progress.documents += documents
        if was_done:
            progress.resumed, progress.resumed_done = progress.documents, progress.done
        self.show(progress)

    def _publish(
        self, target: Path, identity: str, arguments: dict[str, Any], account: Account, documents: dict[str, int],
        chars: dict[str, int], parts: int, count: int,
    ) -> CleaningResult:  # fmt: skip
        """Write the metadata and the report, and move the files into OUT. parts: of the input; count: files
        of each set."""
        options, folder = self.work.options, self.work.folder / PUBLISHED
        files = [
            file_name(name, number, count, options.format)
            for name in SETS if options.validation or name == "train" for number in range(count)
        ]  # fmt: skip
        moves = {name: folder / name for name in [*files, PAGE]}
        if options.keep_rejected:
            for part in range(parts):
                source = self.work.file(FILTERED, part, "rejected.jsonl.zst")
                moves[f"rejected/filtered-{part:06d}.jsonl.zst"] = source
            for name in (file_name("duplicates", number, count, "jsonl.zst") for number in range(count)):
                moves[f"rejected/{name}"] = folder / name
        retained_texts = {
            sample.duplicate_of: text_of_document(self.work, sample.duplicate_of)
            for samples in account.samples.values() for sample in samples if sample.duplicate_of is not None
        }  # fmt: skip
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            digests = iter(list(pool.map(sha256, [file.path for file in (*self.files, *self.evaluation)])))
        metadata = {
            "document_counts": documents, "chars": chars, "documents_read": account.read,
            "chars_read": account.chars, "counts": dict(account.dropped.most_common()), "account": account.as_dict(),
            **self.facts, "notes": self.notes, "options": options.describe(), "args": arguments,
            "inputs": [_described(file, next(digests)) for file in self.files],
            "evaluation_sets": [_described(file, next(digests)) for file in self.evaluation],
            "libraries": _libraries(),
            "timing": {
                "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "seconds": round(time.monotonic() - self.start_time, 3),
            },
            "identity": identity, "output_files": files,
            "rejected_files": [name for name in moves if name.startswith("rejected/")],
        }  # fmt: skip
        write_page(folder / PAGE, metadata, account, retained_texts)
        publish(self.work.folder, target, moves, metadata)
        return CleaningResult(files, documents, chars, account, notes=self.notes)


def _described(file: InputFile, digest_of_it: str) -> dict[str, Any]:
    rows = {} if file.rows is None else {"rows": file.rows[:2]}
    return {"path": str(file.path), "bytes": file.size, "sha256": digest_of_it, **rows}


def _remembered(call: Task | None, path: Path) -> tuple[dict[str, Any], bool]:
    """Return (result, True) from the file `path` if it exists; else call `call`, write the file, and return
    (result, False).

    call: None if the file exists.
    """
    if call is None or path.exists():
        return json.loads(path.read_text(encoding="utf-8")), True
    result = call()
    write_json(path, result)
    return result, False
