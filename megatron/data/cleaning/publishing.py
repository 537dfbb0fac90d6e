"""Runs the last pass of a cleaning job: writes kept documents, in order, to files of similar size in the
output folder."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.cleaning.accounts import Account
from megatron.data.cleaning.deduplication import Candidate, after_all
from megatron.data.cleaning.filtering import FILTERED, text_key
from megatron.data.cleaning.plan import Work
from megatron.data.cleaning.row_files import row_writer
from megatron.data.cleaning.sorted_runs import document_numbers
from megatron.data.errors import DataError
from megatron.data.files import map_npy, write_json
from megatron.data.preprocessing.inputs import InputFile
from megatron.neox_arguments.values.json_text import parse_json

PUBLISHED = "published"
METADATA, PAGE = "metadata.json", "report.html"
WORK = ".clean-"  # begins the name of the work folder; the digest of the job follows
_MARKER = "publishing.json"  # in the work folder, while files are moved into the output folder
SETS = ("train", "validation")
_SPAN = 1 << 64


@dataclass(frozen=True)
class Slice:
    """The documents in rows [begin, end) of a part."""

    part: int
    begin: int
    end: int


def slices_of_files(work: Work, parts: int) -> list[list[Slice]]:
    """Return, for each output file, which documents go into it.

    A new file begins after each `file_chars` characters of filtered text, so the result does not depend on
    how the input is split into files.
    """
    size, chars_so_far = work.options.file_chars, 0
    files: dict[int, list[Slice]] = {}
    for part in range(parts):
        chars = map_npy(work.file(FILTERED, part, "chars.npy"))
        begins = chars_so_far + np.cumsum(chars) - chars
        for number in np.unique(begins // size).tolist():
            rows = np.flatnonzero(begins // size == number)
            files.setdefault(number, []).append(Slice(part, int(rows[0]), int(rows[-1]) + 1))
        chars_so_far += int(chars.sum())
    return [files[number] for number in sorted(files)]


def file_name(name: str, number: int, files: int, kind: str) -> str:
    """Return the name of an output file, such as `train-00000-of-00012.jsonl.zst`.

    name: train, validation or duplicates. number: index of the file. files: number of files. kind: the file
      format.
    """
    return f"{name}-{number:05d}-of-{files:05d}.{kind}"


def write_files(work: Work, number: int, files: int, slices: Sequence[Slice], schema: str | None) -> dict[str, Any]:
    """Write output file `number` of each set (train, validation).

    Returns JSON values: the number of written documents and characters by set, and an `Account` of dropped
      duplicates.
    """
    options = work.options
    folder = work.folder / PUBLISHED
    account, documents, chars, pieces = Account(), Counter[str](), Counter[str](), Counter[str]()
    names = SETS if options.validation else SETS[:1]
    columns = bytes.fromhex(schema) if schema is not None else None
    with ExitStack() as stack:
        writers = {
            name: stack.enter_context(
                row_writer(folder / file_name(name, number, files, options.format), options.format, columns)
            )
            for name in names
        }
        out = None
        if options.keep_rejected:
            path = folder / file_name("duplicates", number, files, "jsonl.zst")
            out = stack.enter_context(row_writer(path, "jsonl.zst"))
        for candidate in (candidate for piece in slices for candidate in _documents(work, piece)):
            if candidate.reason is not None:
                document = int(document_numbers(candidate.part, np.array([candidate.row]))[0])
                account.drop(
                    candidate.reason, candidate.text, text_key(candidate.text), document, candidate.duplicate_of
                )
                if out is not None:
                    out({"reason": candidate.reason, "row": candidate.values})
                continue
            for scope, removed in candidate.removed.items():
                pieces[scope] += len(removed)
                for piece in removed:
                    account.sample(f"{scope} taken out", piece, text_key(piece))
            name = names[-1] if text_key(f"{options.seed} {candidate.text}") < options.validation * _SPAN else names[0]
            documents[name] += 1
            chars[name] += len(candidate.text)
            writers[name]({**candidate.values, options.text_key: candidate.text})
    account.detail("pieces_removed", pieces)
    return {"documents": dict(documents), "chars": dict(chars), "account": account.as_dict()}


def text_of_document(work: Work, document: int) -> str:
    """Return the text of the document with the number `document` in this job."""
    part, row = document >> 32, document & 0xFFFFFFFF
    return next(candidate.text for candidate in after_all(work, part) if candidate.row == row)


def _documents(work: Work, piece: Slice) -> Iterator[Candidate]:
    for candidate in after_all(work, piece.part):
        if candidate.row >= piece.end:
            return
        if candidate.row >= piece.begin:
            yield candidate


def check_target(target: Path, identity: str, inputs: Sequence[InputFile], overwrite: bool) -> Mapping[str, Any] | None:
    """Return the metadata of the same job if its full result already exists in the output folder, else None.

    Raises DataError if the folder holds something that would be lost: an input, files that no job lists, or,
      without overwrite, the result of another job.
    """
    for file in inputs:
        if file.path.resolve().is_relative_to(target.resolve()):
            raise DataError(f"{target}: this output folder holds the input {file.path}; choose another OUT")
    if not target.exists():
        return None
    metadata = _metadata(target)
    if metadata is not None and metadata["identity"] == identity:
        return metadata if all((target / name).exists() for name in metadata["output_files"]) else None
    if (target / f"{WORK}{identity}" / _MARKER).exists():
        return None  # this job was interrupted while it moved its files here
    if metadata is None:
        foreign = [path for pattern in ("train-*-of-*", "validation-*-of-*", PAGE) for path in target.glob(pattern)]
        if foreign:
            raise DataError(f"{foreign[0]}: this file was not made by this command; choose another OUT")
    elif not overwrite:
        raise DataError(
            f"{target}: this folder holds the result of another job; choose another OUT, or add --overwrite"
        )
    return None


def publish(work: Path, target: Path, files: Mapping[str, Path], metadata: Mapping[str, Any]) -> None:
    """Move the output files and then the metadata into the output folder, replacing an earlier result.

    If it is interrupted, call it again. work: the work folder of the job. files: {final name: current path}.
    """
    marker = work / _MARKER
    if not marker.exists():
        old = _metadata(target) or {"output_files": []}
        write_json(marker, {"stale": [*old["output_files"], *old.get("rejected_files", [])]})
    for name in parse_json(marker.read_text(encoding="utf-8"))["stale"]:
        if name not in files:
            (target / name).unlink(missing_ok=True)
    for name, path in files.items():
        if path.exists():  # else an earlier call has moved it
            (target / name).parent.mkdir(exist_ok=True)
            os.replace(path, target / name)
    write_json(target / METADATA, metadata)


def _metadata(target: Path) -> dict[str, Any] | None:
    """Return the content of metadata.json in `target`, of whatever job; None if there is no such file.

    Raises DataError if the file was not written by this command, or is damaged.
    """
    try:
        metadata = parse_json((target / METADATA).read_text(encoding="utf-8"))
        if isinstance(metadata["identity"], str) and all(isinstance(name, str) for name in metadata["output_files"]):
            return dict(metadata)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise DataError(f"{target / METADATA}: this file was not made by this command, or is damaged; choose another OUT")
