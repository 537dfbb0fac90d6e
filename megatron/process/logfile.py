"""Writes log files and messages on stderr. A write error does not end the run."""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

MAX_BYTES = 1 << 20  # most bytes of one file that are kept in memory


class LogFile:
    """A log file to which data is appended.

    If the disk is full or read-only, the newest MAX_BYTES bytes are kept in memory and written as soon as
    possible. If more bytes are lost, a line in the file gives their number.

    say: called with a message at the first write error. The message names the folder but not the file, so
        that it is equal for all log files of a folder.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self.path = path
        self._say = say
        self._descriptor: int | None = None
        self._waiting = b""
        self._lost = 0
        self._reported = False
        self.write(b"")  # creates the file

    @property
    def is_complete(self) -> bool:
        """Whether all data has been written to the file, with none left in memory."""
        return not self._waiting

    def write(self, data: bytes) -> None:
        """Appends `data` to the file, or keeps it in memory if the file cannot be written. Never raises
        OSError."""
        self._waiting += data
        if len(self._waiting) > MAX_BYTES and self._reported:
            self._lost += len(self._waiting) - MAX_BYTES
            self._waiting = self._waiting[-MAX_BYTES:]
        try:
            self._write()
        except OSError as problem:
            if not self._reported:
                self._reported = True
                self._say(
                    f"{self.path.parent}: logs cannot be written ({problem.strerror}); the run goes on, and keeps the "
                    f"last {MAX_BYTES >> 20} MiB of each log in memory until the file can be written again"
                )

    def close(self) -> None:
        """Writes the data kept in memory and closes the file. If that data cannot be written, passes the
        number of missing bytes to `say`."""
        if self._waiting:
            self.write(b"")
        if self._waiting:
            self._say(f"{self.path}: the last {self._lost + len(self._waiting)} bytes could not be written")
        if self._descriptor is not None:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None

    def _write(self) -> None:
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if self._lost:
            os.write(self._descriptor, b"\n[%d bytes could not be written]\n" % self._lost)
            self._lost = 0
        while self._waiting:
            self._waiting = self._waiting[os.write(self._descriptor, self._waiting) :]


def say(text: str) -> None:
    """Writes `text` as a line to stderr. If stderr cannot be written, the line is lost."""
    with suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
