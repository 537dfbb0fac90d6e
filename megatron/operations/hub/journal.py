"""The journal of one checkpoint's upload: a file of JSON lines, from which an interrupted upload is
continued.

The file is also a lock: two processes never work on the same checkpoint.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megatron.operations.hub.errors import HubError
from megatron.operations.hub.retrying import Say

FOLDER = "hub"  # in `save`: a journal of each checkpoint, and converted folders until they are sent


@dataclass(frozen=True)
class FileDigest:
    """The digests by which the Hub identifies a file.

    sha256: of the content.
    blob: git's hash of the content; None if the file is too large for git.
    """

    size: int
    sha256: str
    blob: str | None


class Journal:
    """The journal of one checkpoint, locked by this process.

    Events of its lines:

    `converted`: the converted folder is complete; with `source` and the `files`' digests.
    `sent`: a large file is on the Hub.
    `published`: a revision is complete.
    `scores`: the evaluation's scores.
    `finished`: nothing is left to do.
    `gone`: the run has deleted the checkpoint.
    """

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        file.seek(0)  # read through this file object: closing another one would release the lock
        text = file.read()
        if text and not text.endswith("\n"):  # a process was ended within a line
            file.write("\n")
        self.events = _events(text)

    def add(self, event: str, file: str | None = None, **facts: Any) -> None:
        """Appends a line and syncs the file to disk."""
        file_entry = {} if file is None else {"file": file}
        line = {"event": event, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **file_entry, **facts}
        self._file.write(json.dumps(line, sort_keys=True) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.events.append(line)

    def last(self, event: str, **facts: Any) -> dict[str, Any] | None:
        """Returns the newest line of `event` that contains all of `facts`; None if there is none."""
        matches = (line for line in reversed(self.events) if line["event"] == event)
        return next((line for line in matches if all(line.get(key) == value for key, value in facts.items())), None)

    def digests(self, source: str) -> dict[str, FileDigest] | None:
        """Returns the digests by file name of the last conversion, with later changes; None without one.

        source: the checkpoint's `identity` at its conversion.
        """
        line = self.last("converted", source=source)
        return None if line is None else {name: FileDigest(**record) for name, record in line["files"].items()}


@contextmanager
def open_journal(save: Path, tag: str, say: Say) -> Iterator[Journal]:
    """Opens and locks the journal of the checkpoint `tag` in `save`; waits while another process holds it.
    Raises HubError."""
    path = save / FOLDER / f"{tag}.jsonl"
    try:
        path.parent.mkdir(exist_ok=True)
        file = path.open("a+", encoding="utf-8", errors="replace")
    except OSError as problem:
        raise HubError(f"{path}: cannot be written ({problem.strerror})") from None
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            say(f"{tag}: another process is publishing it ({path}); waiting for that process")
            fcntl.lockf(file, fcntl.LOCK_EX)
        except OSError as problem:
            raise HubError(f"{path}: its file system supports no file locks ({problem.strerror})") from None
        yield Journal(file)


def is_finished(save: Path, tag: str, repository: str, formats: str) -> bool:
    """Returns whether the journal says that a checkpoint was published here in these `formats`."""
    try:
        text = (save / FOLDER / f"{tag}.jsonl").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return False
    facts = {"event": "finished", "repository": repository, "formats": formats}
    return any(line.items() >= facts.items() for line in _events(text))


def _events(text: str) -> list[dict[str, Any]]:
    """Parses the lines of a journal. A line that a crash left incomplete is skipped."""
    events: list[dict[str, Any]] = []
    for line in text.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, Mapping) and "event" in event:
            events.append(dict(event))
    return events
