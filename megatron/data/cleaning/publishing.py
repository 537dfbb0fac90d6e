"""The last pass: the documents that stay, in files of about the same size, in their order."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.data.cleaning.accounts import Account
from megatron.data.cleaning.deduplication import Candidate, after_all
from megatron.data.cleaning.filtering import FILTERED, text_key
from megatron.data.cleaning.plan import Work
from megatron.data.cleaning.row_files import row_writer
from megatron.data.cleaning.sorted_runs import document_numbers
from megatron.data.files import map_npy

PUBLISHED = "published"
SETS = ("train", "validation")
_SPAN = 1 << 64


@dataclass(frozen=True)
class Slice:
    """Documents of a part, from row `first` to before `last`."""

    part: int
    first: int
    last: int


def slices_of_files(work: Work, parts: int) -> list[list[Slice]]:
    """Which documents go into which file: a new one begins once `file_chars` characters of filtered text are
    in the one before, so that it does not matter how the input lay in files."""
    size, before = work.options.file_chars, 0
    files: dict[int, list[Slice]] = {}
    for part in range(parts):
        chars = map_npy(work.file(FILTERED, part, "chars.npy"))
        begins = before + np.cumsum(chars) - chars
        for number in np.unique(begins // size).tolist():
            rows = np.flatnonzero(begins // size == number)
            files.setdefault(number, []).append(Slice(part, int(rows[0]), int(rows[-1]) + 1))
        before += int(chars.sum())
    return [files[number] for number in sorted(files)]


def file_name(name: str, number: int, files: int, kind: str) -> str:
    """What a file of a set is called, as `train-00000-of-00012.jsonl.zst`."""
    return f"{name}-{number:05d}-of-{files:05d}.{kind}"


def write_files(work: Work, number: int, files: int, slices: Sequence[Slice], schema: str | None) -> dict[str, Any]:
    """Write the files of a number, one of each set, and the account of the duplicates in its documents."""
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
        for one in (one for piece in slices for one in _documents(work, piece)):
            if one.reason is not None:
                document = int(document_numbers(one.part, np.array([one.row]))[0])
                account.drop(one.reason, one.text, text_key(one.text), document, one.kept)
                if out is not None:
                    out({"reason": one.reason, "row": one.values})
                continue
            for scope, removed in one.removed.items():
                pieces[scope] += len(removed)
                for piece in removed:
                    account.sample(f"{scope} taken out", piece, text_key(piece))
            name = names[-1] if text_key(f"{options.seed} {one.text}") < options.validation * _SPAN else names[0]
            documents[name] += 1
            chars[name] += len(one.text)
            writers[name]({**one.values, options.text_key: one.text})
    account.detail("pieces_removed", pieces)
    return {"documents": dict(documents), "chars": dict(chars), "account": account.as_dict()}


def kept_text(work: Work, document: int) -> str:
    """The text of a document of the job, by its number."""
    part, row = document >> 32, document & 0xFFFFFFFF
    return next(one.text for one in after_all(work, part) if one.row == row)


def _documents(work: Work, piece: Slice) -> Iterator[Candidate]:
    for one in after_all(work, piece.part):
        if one.row >= piece.last:
            return
        if one.row >= piece.first:
            yield one
