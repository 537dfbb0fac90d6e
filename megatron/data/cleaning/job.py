"""A job of cleaning from its input to its files, in passes over parts; what is done stays done.

While it runs, everything lies in OUT/.clean-<digest of the job>/, a folder for each pass:
  evaluation/   runs of words of the evaluation sets
  filtered/     of each part of the input the documents that stay, their hashes, and an account
  exact/        which documents have stood before
  minhash/      keys of bands, pairs, and which documents go
  pieces/       hashes of paragraphs and lines of what is left, and which have stood before
  published/    the files of the result
A pass writes <part>.json last, which vouches for the rest of that part.
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
    find_later,
    find_pairs,
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
from megatron.data.cleaning.publishing import PUBLISHED, SETS, file_name, kept_text, slices_of_files, write_files
from megatron.data.cleaning.row_files import unified_schema
from megatron.data.errors import DataError
from megatron.data.files import sha256, write_json
from megatron.data.preprocessing import shards
from megatron.data.preprocessing.inputs import InputFile
from megatron.data.preprocessing.work_folder import digest, os_error, work_folder
from megatron.data.preprocessing.workers import in_order

# Whose versions may change a verdict: a job is not gone on with by others.
_LIBRARIES = ("spacy", "ftfy", "py3langid", "regex", "xxhash")
_GO_ON = "what is done is kept: the same command goes on from there"


@dataclass
class PassProgress:
    """How far a pass is. done, total: of what it reads, in bytes or parts; documents: it has looked at;
    resumed: documents of an earlier run."""

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
    """What a job may use, which changes nothing about its result. device: where torch computes signatures;
    None: numpy in the workers."""

    workers: int = 1
    device: str | None = None


@dataclass
class CleaningResult:
    """What a job has made. documents, chars: by set; account: of all that went. already: whether it was all
    there from before."""

    files: list[str]
    documents: dict[str, int]
    chars: dict[str, int]
    account: Account
    already: bool = False
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
    """Write what stays of the documents of `files` into the folder `target`, with metadata.json and
    report.html.

    evaluation: sets whose runs of words no document may hold. arguments: for the metadata. overwrite: replace
    another result there. Raises DataError; then the same call goes on from what was done.
    """
    versions = [[file.version() for file in group] for group in (files, evaluation)]
    identity = digest([FORMAT, shards.CHUNK_BYTES, options.describe(), versions, _libraries()])
    known = check_target(target, identity, [*files, *evaluation], overwrite)
    if known is not None:
        account = Account.of_dict(known["account"])
        return CleaningResult(known["output_files"], known["document_counts"], known["chars"], account, already=True)
    folder = target.absolute() / f"{WORK}{identity}"

    def is_worth_keeping(found: Path) -> bool:
        return any(found.glob(f"{FILTERED}/*.json"))

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
    """A job in its folder."""

    def __init__(
        self, work: Work, files: Sequence[InputFile], evaluation: Sequence[InputFile], resources: Resources, show: Show
    ) -> None:
        self.work, self.files, self.evaluation, self.resources, self.show = work, files, evaluation, resources, show
        self.began = time.monotonic()
        self.notes: list[str] = []
        self.facts: dict[str, Any] = {}

    def run(self, target: Path, identity: str, arguments: dict[str, Any]) -> CleaningResult:
        """All passes, then the result gets its place."""
        self._evaluation_sets()
        cleaner_of(self.work)  # what is missing is told now; the workers, which are forked, have it already
        account = Account()
        filtered = self._filter(account)
        options, parts = self.work.options, len(filtered)
        if "document" in options.exact:
            self.facts["exact"] = self._later(EXACT, FILTERED, ["document"], parts)
        if options.minhash is not None:
            self._near_duplicates(filtered)
        if options.piece_scopes:
            self._hash_pieces(filtered)
            self.facts["pieces"] = self._later(PIECES, PIECES, options.piece_scopes, parts)
        documents, chars, count = self._write(filtered, account)
        if not sum(documents.values()):
            shutil.rmtree(self.work.folder / FILTERED)  # nothing of the job is worth keeping
            reasons = ", ".join(f"{reason} {number}" for reason, number in account.dropped.most_common(5))
            raise DataError(
                f"no document is left of {account.read}{f': {reasons}' if reasons else ''}; nothing is written"
            )
        for file in (*self.files, *self.evaluation):
            if not file.path.exists() or InputFile.of(file.path, file.rows) != file:
                raise DataError(f"{file.path}: changed while it was read; run again")
        return self._publish(target, identity, arguments, account, documents, chars, parts, count)

    def _evaluation_sets(self) -> None:
        """The runs of words of the evaluation sets, and their names."""
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
        """Of each part what later passes need; account: gets what it dropped."""
        (self.work.folder / FILTERED).mkdir(exist_ok=True)
        progress = self._begin(PassProgress("filter", sum(file.bytes_read for file in self.files)))

        tasks = (partial(filter_part, self.work, part, some) for part, some in enumerate(parts_of(self.files)))
        filtered = []
        for values, was_done in self._each(FILTERED, tasks):
            part = FilteredPart.of_dict(values)
            account.add(part.account)
            self._step(progress, part.disk_bytes, part.account.read, was_done)
            filtered.append(replace(part, account=Account()))  # samples of thousands of parts are not kept
        return filtered

    def _later(self, stage: str, hashed: str, scopes: Sequence[str], parts: int) -> dict[str, Any]:
        """Find what has stood before, and how much that is by scope."""
        progress = self._begin(PassProgress(f"exact {', '.join(scopes)}", len(scopes)))
        found = {}
        for scope in scopes:
            call = partial(find_later, self.work, parts, stage, hashed, scope)
            found[scope] = self._once(stage, f"found-{scope}", call)["pieces"]
            self._step(progress, 1, 0, False)
        return found

    def _hash_pieces(self, filtered: Sequence[FilteredPart]) -> None:
        (self.work.folder / PIECES).mkdir(exist_ok=True)
        progress = self._begin(PassProgress("paragraphs and lines", sum(one.kept for one in filtered)))
        tasks = (partial(write_pieces, self.work, part) for part in range(len(filtered)))
        for part, (_, was_done) in enumerate(self._each(PIECES, tasks)):
            self._step(progress, filtered[part].kept, filtered[part].kept, was_done)

    def _near_duplicates(self, filtered: Sequence[FilteredPart]) -> None:
        work, parts = self.work, len(filtered)
        (work.folder / MINHASH).mkdir(exist_ok=True)
        progress = self._begin(PassProgress("minhash", sum(one.kept for one in filtered)))
        tasks = (partial(write_bands, work, part, self.resources.device is None) for part in range(parts))
        without = 0
        for part, (values, was_done) in enumerate(self._each(MINHASH, tasks)):
            if work.file(MINHASH, part, "shingles.npz").exists():  # maybe of an earlier run with a device
                sign_on_device(work, part, self.resources.device or "cpu")
            without += values["without"]
            self._step(progress, filtered[part].kept, filtered[part].kept, was_done)
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

        self.facts["minhash"] = self._once(MINHASH, "clusters", cluster) | {"too_short_for_a_shingle": without}

    def _write(self, filtered: Sequence[FilteredPart], account: Account) -> tuple[dict[str, int], dict[str, int], int]:
        """Documents and characters by set, and the number of files of each."""
        work = self.work
        (work.folder / PUBLISHED).mkdir(exist_ok=True)
        files = slices_of_files(work, len(filtered))
        schema = None
        if work.options.format == "parquet":
            schemas = [bytes.fromhex(one.schema) for one in filtered if one.schema is not None]
            schema = unified_schema(schemas).hex() if schemas else None
        progress = self._begin(PassProgress("write", len(files)))
        tasks = (partial(write_files, work, number, len(files), slices, schema) for number, slices in enumerate(files))
        documents, chars = dict.fromkeys(SETS, 0), dict.fromkeys(SETS, 0)
        for values, was_done in self._each(PUBLISHED, tasks):
            account.add(Account.of_dict(values["account"]))
            for name, count in values["documents"].items():
                documents[name] += count
                chars[name] += values["chars"].get(name, 0)
            self._step(progress, 1, sum(values["documents"].values()), was_done)
        return documents, chars, len(files)

    def _each(self, stage: str, tasks: Iterator[Task]) -> Iterator[tuple[dict[str, Any], bool]]:
        """The result of each task of a pass, and whether it was there from before."""
        noted = ((task, self.work.file(stage, number, "json")) for number, task in enumerate(tasks))
        # A task that is done is not sent to a worker: it may hold a part of the input.
        todo = ((None if path.exists() else task, path) for task, path in noted)
        yield from in_order(_remembered, todo, self.resources.workers)

    def _once(self, stage: str, name: str, call: Task) -> dict[str, Any]:
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
        """Describe the result and give it its place. parts: of the input; count: of files of each set."""
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
        kept = {
            sample.kept: kept_text(self.work, sample.kept)
            for samples in account.samples.values() for sample in samples if sample.kept is not None
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
                "seconds": round(time.monotonic() - self.began, 3),
            },
            "identity": identity, "output_files": files,
            "rejected_files": [name for name in moves if name.startswith("rejected/")],
        }  # fmt: skip
        write_page(folder / PAGE, metadata, account, kept)
        publish(self.work.folder, target, moves, metadata)
        return CleaningResult(files, documents, chars, account, notes=self.notes)


def _described(file: InputFile, digest_of_it: str) -> dict[str, Any]:
    rows = {} if file.rows is None else {"rows": file.rows[:2]}
    return {"path": str(file.path), "bytes": file.size, "sha256": digest_of_it, **rows}


def _remembered(call: Task | None, path: Path) -> tuple[dict[str, Any], bool]:
    """What a call gave, noted in a file, and whether the note was there: then the call is not made."""
    if call is None or path.exists():
        return json.loads(path.read_text(encoding="utf-8")), True
    result = call()
    write_json(path, result)
    return result, False
