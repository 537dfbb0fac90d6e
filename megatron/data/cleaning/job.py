"""Runs a cleaning job in passes over the parts of its input; a restarted job keeps finished parts.

While the job runs, its files are in OUT/.clean-<digest of the job>/, in one folder for each pass:
  evaluation/   n-gram hashes of the evaluation sets
  filtered/     for each part of the input: the kept documents, their hashes, and counts of dropped documents
  exact/        documents that repeat an earlier document
  minhash/      MinHash band keys, pairs of near-duplicates, and the documents dropped for them
  pieces/       hashes of paragraphs and lines of the remaining documents, and the repeated ones
  published/    the output files
A pass writes <part>.json last: if this file exists, all other files of the part are complete.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.cleaning import deduplication, publishing
from megatron.data.cleaning.accounts import Account
from megatron.data.cleaning.decontamination import write_runs
from megatron.data.cleaning.deduplication import EXACT, MINHASH, PIECES
from megatron.data.cleaning.filtering import FILTERED, cleaner_of, filter_part
from megatron.data.cleaning.page import write_page
from megatron.data.cleaning.plan import EVALUATION, FORMAT, CleaningOptions, Work, parts_of
from megatron.data.cleaning.publishing import PAGE, PUBLISHED, SETS, WORK, file_name
from megatron.data.cleaning.row_files import unified_schema
from megatron.data.errors import DataError
from megatron.data.files import sha256, write_json
from megatron.data.preprocessing import shards
from megatron.data.preprocessing.inputs import InputFile
from megatron.data.preprocessing.work_folder import digest, os_error, work_folder
from megatron.data.preprocessing.workers import in_order

# Other versions may drop other documents, so a job resumes only with the versions it began with.
_LIBRARIES = ("spacy", "ftfy", "py3langid", "regex", "xxhash")
_GO_ON = "finished parts are kept: run the same command again to resume"


@dataclass
class PassProgress:
    """The progress of one pass of a cleaning job.

    total: the size of the pass's work in its own unit (bytes, documents, bands or files). done: how much is
      processed.
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


@dataclass(frozen=True)
class _FilteredPart:
    """A filtered part: the number of its kept documents, and for Parquet their Arrow schema in
    hexadecimal."""

    num_documents: int
    schema: str | None


@dataclass
class CleaningResult:
    """The result of a cleaning job.

    files: names of the output files.
    documents, chars: number of kept documents and of their characters, by set (train, validation).
    account: counts of dropped documents.
    existed: True if an earlier run had already written the full result.
    notes: remarks for the user.
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
    """Clean the documents of `files` into the folder `target`, and write metadata.json and report.html there.

    evaluation: sets whose n-grams no kept document may contain.
    arguments: written into the metadata.
    overwrite: replace the result of another job.
    show: called with the progress of each pass.
    Raises DataError for unusable input. Called again with the same arguments, it resumes from the finished
    parts.
    """
    versions = [[file.version() for file in group] for group in (files, evaluation)]
    identity = digest([FORMAT, shards.CHUNK_BYTES, options.describe(), versions, _libraries()])
    metadata = publishing.check_target(target, identity, [*files, *evaluation], overwrite)
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
        """Run all passes, move the output files into `target`, and return the result.

        identity: a digest of the input and options. arguments: written into the metadata.
        """
        self._evaluation_sets()
        cleaner_of(self.work)  # reports missing packages now; forked workers inherit the cleaner
        account = Account()
        filtered = self._filter(account)
        options, parts = self.work.options, len(filtered)
        if "document" in options.exact:
            self.facts["exact"] = self._find_repeats(EXACT, FILTERED, ["document"], parts)
        if options.minhash is not None:
            self._near_duplicates(filtered)
        if options.piece_scopes:
            for _ in self._over_documents("paragraphs and lines", PIECES, filtered, deduplication.write_pieces):
                pass
            self.facts["pieces"] = self._find_repeats(PIECES, PIECES, options.piece_scopes, parts)
        documents, chars, count = self._write(filtered, account)
        if not sum(documents.values()):
            shutil.rmtree(self.work.folder / FILTERED)  # a restart would drop all documents again
            reasons = ", ".join(f"{reason} {number}" for reason, number in account.dropped.most_common(5))
            raise DataError(
                f"all {account.read} documents are dropped{f': {reasons}' if reasons else ''}; use weaker rules or "
                "other data"
            )
        for file in (*self.files, *self.evaluation):
            if not file.path.exists() or InputFile.from_path(file.path, file.rows) != file:
                raise DataError(f"{file.path}: this input changed while the job read it; run the command again")
        return self._publish(target, identity, arguments, account, documents, chars, parts, count)

    def _evaluation_sets(self) -> None:
        """Write the n-gram hashes of the evaluation sets into the work folder, and remember the names of
        the sets."""
        ngrams = self.work.options.recipe.decontaminate
        if ngrams is None:
            return
        folder = self.work.folder / EVALUATION
        folder.mkdir(exist_ok=True)
        runs = write_runs(self.evaluation, ngrams, folder)
        self.work = Work(self.work.folder, self.work.options, runs.names)
        if runs.short:
            self.notes.append(f"--decontaminate: {runs.short} of {runs.texts} texts have fewer than {ngrams} words, "
                              "so no document was compared with them")  # fmt: skip

    def _filter(self, account: Account) -> list[_FilteredPart]:
        """Filter each part of the input and add its counts to `account`; return each part's document count
        and schema."""
        progress = self._begin(PassProgress("filter", sum(file.bytes_read for file in self.files)))
        tasks = (
            partial(filter_part, self.work, part, shards_of_part)
            for part, shards_of_part in enumerate(parts_of(self.files))
        )
        filtered = []
        for values, was_done in self._run_tasks(FILTERED, tasks):
            part_account = Account.from_dict(values["account"])  # not kept: thousands of parts have many examples
            account.add(part_account)
            self._step(progress, values["disk_bytes"], part_account.read, was_done)
            filtered.append(_FilteredPart(values["kept"], values["schema"]))
        return filtered

    def _find_repeats(self, stage: str, hashed: str, scopes: Sequence[str], parts: int) -> dict[str, Any]:
        """Find the repeated pieces of each scope (document, paragraph or line); return {scope: number of
        repeated pieces}."""
        progress = self._begin(PassProgress(f"exact {', '.join(scopes)}", len(scopes)))
        counts = {}
        for scope in scopes:
            call = partial(deduplication.find_repeats, self.work, parts, stage, hashed, scope)
            counts[scope] = self._run_once(stage, f"found-{scope}", call)["pieces"]
            self._step(progress, 1, 0, False)
        return counts

    def _over_documents(
        self, name: str, stage: str, filtered: Sequence[_FilteredPart], function: Callable[..., dict[str, Any]],
        *arguments: Any,
    ) -> Iterator[dict[str, Any]]:  # fmt: skip
        """Run a pass that measures its progress in documents: call `function` for each part, and yield the
        results."""
        progress = self._begin(PassProgress(name, sum(part.num_documents for part in filtered)))
        tasks = (partial(function, self.work, part, *arguments) for part in range(len(filtered)))
        for part, (values, was_done) in zip(filtered, self._run_tasks(stage, tasks), strict=True):
            yield values
            self._step(progress, part.num_documents, part.num_documents, was_done)

    def _near_duplicates(self, filtered: Sequence[_FilteredPart]) -> None:
        work, parts, method = self.work, len(filtered), self.work.minhash
        num_too_short, device = 0, self.resources.device
        results = self._over_documents("minhash", MINHASH, filtered, deduplication.write_bands, device is None)
        for part, values in enumerate(results):
            if work.file(MINHASH, part, "shingles.npz").exists():  # an earlier run with a device may have left it
                deduplication.sign_on_device(work, part, device or "cpu")
            num_too_short += values["without"]
        bands = self._begin(PassProgress("clusters", method.bands))

        def cluster() -> dict[str, Any]:
            pairs = deduplication.find_pairs(work, parts, lambda done: self._step(bands, done - bands.done, 0, False))
            if method.jaccard is not None:
                np.save(work.folder / MINHASH / "paired.npy", np.unique(pairs))
                tasks = ((work, part) for part in range(parts))
                for _ in in_order(deduplication.write_shingle_sets, tasks, self.resources.workers):
                    pass
                pairs = deduplication.similar_pairs(work, pairs, parts)
            return deduplication.choose(work, pairs, parts)

        too_short = {"too_short_for_a_shingle": num_too_short}
        self.facts["minhash"] = self._run_once(MINHASH, "clusters", cluster) | too_short

    def _write(self, filtered: Sequence[_FilteredPart], account: Account) -> tuple[dict[str, int], dict[str, int], int]:
        """Write the output files; return (documents of each set, characters of each set, number of files
        of each set)."""
        work = self.work
        files = publishing.slices_of_files(work, len(filtered))
        schema = None
        if work.options.format == "parquet":
            schemas = [bytes.fromhex(part.schema) for part in filtered if part.schema is not None]
            schema = unified_schema(schemas).hex() if schemas else None
        write, count = publishing.write_files, len(files)
        progress = self._begin(PassProgress("write", count))
        tasks = (partial(write, work, number, count, slices, schema) for number, slices in enumerate(files))
        documents, chars = dict.fromkeys(SETS, 0), dict.fromkeys(SETS, 0)
        for values, was_done in self._run_tasks(PUBLISHED, tasks):
            account.add(Account.from_dict(values["account"]))
            for name, number in values["documents"].items():
                documents[name] += number
                chars[name] += values["chars"].get(name, 0)
            self._step(progress, 1, sum(values["documents"].values()), was_done)
        return documents, chars, count

    def _run_tasks(self, stage: str, tasks: Iterator[Task]) -> Iterator[tuple[dict[str, Any], bool]]:
        """Run the tasks of a pass in the workers; yield (result, whether an earlier run had finished the
        task) for each.

        Results come in the order of the tasks.
        """
        (self.work.folder / stage).mkdir(exist_ok=True)
        noted = ((task, self.work.file(stage, number, "json")) for number, task in enumerate(tasks))
        # A finished task is not sent to a worker, because it may hold a part of the input.
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
        """Write the metadata and the report, and move the output files into `target`.

        parts: number of parts of the input. count: number of output files of each set.
        """
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
            sample.duplicate_of: publishing.text_of_document(self.work, sample.duplicate_of)
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
        publishing.publish(self.work.folder, target, moves, metadata)
        return CleaningResult(files, documents, chars, account, notes=self.notes)


def _described(file: InputFile, digest_of_it: str) -> dict[str, Any]:
    rows = {} if file.rows is None else {"rows": file.rows[:2]}
    return {"path": str(file.path), "bytes": file.size, "sha256": digest_of_it, **rows}


def _remembered(call: Task | None, path: Path) -> tuple[dict[str, Any], bool]:
    """Return (result, True) if the file `path` holds the result of an earlier call, else (result of `call`,
    False).

    A new result is written to `path`. call: may be None if the file exists.
    """
    if call is None or path.exists():
        return json.loads(path.read_text(encoding="utf-8")), True
    result = call()
    write_json(path, result)
    return result, False
