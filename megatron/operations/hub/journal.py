"""What has been done with one checkpoint, in a file of JSON lines, so that a process that was ended goes on
where it was.

The file is also the lock: two processes never work on one checkpoint.
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
    """What the Hub knows a file by. blob: git's name of its content, None of a file that is too large to be
    one of git's."""

    size: int
    sha256: str
    blob: str | None


class Journal:
    """The journal of one checkpoint, which this process has locked.

    Lines: {"event": "converted", "source": ..., "files": {...}} once the folder is whole, "sent" for each
    large file that the Hub has, "published" for each revision, "scores", "finished", "gone".
    """

    def __init__(self, path: Path, file: IO[str]) -> None:
        self.path, self._file = path, file
        file.seek(0)  # read through this file alone: closing another one of it would end the lock
        text = file.read()
        if text and not text.endswith("\n"):  # a process was ended within a line
            file.write("\n")
        self.events = _events(text)

    def add(self, event: str, file: str | None = None, **facts: Any) -> None:
        """Append a line; it is on the disk when this returns."""
        of_file = {} if file is None else {"file": file}
        line = {"event": event, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **of_file, **facts}
        self._file.write(json.dumps(line, sort_keys=True) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.events.append(line)

    def last(self, event: str, **facts: Any) -> dict[str, Any] | None:
        """The newest line of an event whose entries are as given."""
        found = (line for line in reversed(self.events) if line["event"] == event)
        return next((line for line in found if all(line.get(key) == value for key, value in facts.items())), None)

    def digests(self, source: str) -> dict[str, FileDigest] | None:
        """The files that the conversion of a checkpoint of this identity gave, as they are now; None before
        it."""
        line = self.last("converted", source=source)
        return None if line is None else {name: FileDigest(**record) for name, record in line["files"].items()}


@contextmanager
def open_journal(save: Path, tag: str, say: Say) -> Iterator[Journal]:
    """The journal of the checkpoint `tag` in `save`, locked; another process is waited for. Raises
    HubError."""
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
            say(f"{tag}: another process works on it ({path}); waiting for it")
            fcntl.lockf(file, fcntl.LOCK_EX)
        except OSError as problem:
            raise HubError(f"{path}: its file system takes no locks ({problem.strerror})") from None
        yield Journal(path, file)


def is_finished(save: Path, tag: str, repository: str, what: str) -> bool:
    """Whether a journal says that a checkpoint has been published in a repository; what: `formats` of it."""
    try:
        text = (save / FOLDER / f"{tag}.jsonl").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return False
    facts = {"event": "finished", "repository": repository, "formats": what}
    return any(line.items() >= facts.items() for line in _events(text))


def _events(text: str) -> list[dict[str, Any]]:
    """The lines of a journal; what a crash has left of one is none."""
    events: list[dict[str, Any]] = []
    for line in text.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, Mapping) and "event" in event:
            events.append(dict(event))
    return events
