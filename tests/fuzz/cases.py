"""A case is a small folder of files, some of them spoilt; it is saved in `corpus/` as one JSON file."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"


@dataclass(frozen=True)
class Odd:
    """Something that is not a regular file at a file's place: nothing, a folder, a pipe, or a link."""

    kind: str  # missing, folder, pipe or link
    target: str = ""


MISSING, FOLDER, PIPE = Odd("missing"), Odd("folder"), Odd("pipe")
Entry = bytes | Odd
Case = Mapping[str, Entry]


def put(case: Case, folder: Path) -> None:
    """Writes the files of a case into `folder`, over files that lie there."""
    for name, entry in case.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        if isinstance(entry, bytes):
            path.write_bytes(entry)
        elif entry.kind == "folder":
            path.mkdir()
        elif entry.kind == "pipe":
            os.mkfifo(path)
        elif entry.kind == "link":
            path.symlink_to(path.name if entry.target == "itself" else entry.target)


def to_json(case: Case, reason: str) -> str:
    """Returns a case as text. Bytes are written as latin-1, so that text in ASCII can be read."""
    entries = {
        name: entry.decode("latin-1") if isinstance(entry, bytes) else [entry.kind, entry.target]
        for name, entry in case.items()
    }
    return json.dumps({"reason": reason, "files": entries}, indent=1) + "\n"


def from_json(text: str) -> Case:
    files = json.loads(text)["files"]
    return {name: entry.encode("latin-1") if isinstance(entry, str) else Odd(*entry) for name, entry in files.items()}


def saved_cases(kind: str) -> Iterator[tuple[str, Case]]:
    """Yields (name, case) of the past failures of a kind of input."""
    for file in sorted((CORPUS / kind).glob("*.json")):
        yield file.stem, from_json(file.read_text())
