"""Records the progress of one checkpoint's upload in a file of JSON lines, so that it can be continued.

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

from megatron.neox_arguments.values.json_text import parse_json
from megatron.operations.hub.errors import HubError
from megatron.operations.hub.retrying import Say

FOLDER = "hub"  # folder in `save` for the journal of each checkpoint, and for converted models until they are sent


@dataclass(frozen=True)
class FileDigest:
    """The digests by which the Hub identifies a file.

    size: in bytes. sha256: SHA-256 of the content, in hexadecimal.
    blob: git's hash of the content; None for files over 64 MiB, which the Hub never keeps in git.
    """

    size: int
    sha256: str
    blob: str | None


class Journal:
    """The journal of one checkpoint's upload, a file of JSON lines that this process has locked.

    Each line has an `event`:

    `converted`: the converted model is complete; has `source` and the digests of its `files`.
    `sent`: a file is on the Hub.
    `published`: a revision on the Hub is complete.
    `scores`: an evaluation has ended; has its scores.
    `finished`: nothing is left to do.
    `gone`: the run deleted the checkpoint during the upload.
    """

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        file.seek(0)  # read through the locked file object: closing a second one would release the lock
        text = file.read()
        if text and not text.endswith("\n"):  # a process was killed while it wrote the last line
            file.write("\n")
        self.events = _events(text)

    def add(self, event: str, file: str | None = None, **facts: Any) -> None:
        """Appends a line with `event`, the time, `file` and `facts` to the journal, and syncs it to disk."""
        file_entry = {} if file is None else {"file": file}
        line = {"event": event, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **file_entry, **facts}
        self._file.write(json.dumps(line, sort_keys=True) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.events.append(line)

    def last(self, event: str, **facts: Any) -> dict[str, Any] | None:
        """Returns the newest journal line of `event` that contains all of `facts`; None without such a
        line."""
        matches = (line for line in reversed(self.events) if line["event"] == event)
        return next((line for line in matches if all(line.get(key) == value for key, value in facts.items())), None)

    def digests(self, source: str) -> dict[str, FileDigest] | None:
        """Returns digests by file name of the converted model in its newest state; None if it was not
        converted.

        source: identifies the checkpoint's content and the tokenizer; a conversion of another `source` is
        ignored.
        """
        line = self.last("converted", source=source)
        return None if line is None else {name: FileDigest(**record) for name, record in line["files"].items()}


@contextmanager
def open_journal(save: Path, tag: str, say: Say) -> Iterator[Journal]:
    """Opens and locks the journal of the checkpoint `tag` in `save`; waits while another process has the
    lock.

    Raises HubError if the file cannot be written or locked."""
    path = save / FOLDER / f"{tag}.jsonl"
    try:
        path.parent.mkdir(exist_ok=True)
        file = path.open("a+", encoding="utf-8", errors="replace")
    except OSError as problem:
        raise HubError(f"{path}: the journal of the upload cannot be written ({problem.strerror})") from None
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            say(f"{tag}: another process is publishing this checkpoint (it has locked {path}); waiting until it ends")
            fcntl.lockf(file, fcntl.LOCK_EX)
        except OSError as problem:
            raise HubError(
                f"{path}: cannot be locked ({problem.strerror}): its file system supports no file locks"
            ) from None
        yield Journal(file)


def is_finished(save: Path, tag: str, repository: str, formats: str) -> bool:
    """Returns whether the journal of checkpoint `tag` says that it was published in `repository` in
    `formats`."""
    try:
        text = (save / FOLDER / f"{tag}.jsonl").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return False
    facts = {"event": "finished", "repository": repository, "formats": formats}
    return any(line.items() >= facts.items() for line in _events(text))


def _events(text: str) -> list[dict[str, Any]]:
    """Returns the parsed lines of a journal. A line that a crash left incomplete is skipped."""
    events: list[dict[str, Any]] = []
    for line in text.splitlines():
        try:
            event = parse_json(line)
        except ValueError:
            continue
        if isinstance(event, Mapping) and "event" in event:
            events.append(dict(event))
    return events
