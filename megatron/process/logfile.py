"""Files and lines that are only read by people: what cannot be written is said, and the run goes on."""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

KEPT = 1 << 20  # bytes of one file


class LogFile:
    """A log file that is only added to. Where its disk is full or read-only, what comes is kept, up to KEPT
    bytes (the newest), and written as soon as it can be; a line stands for what was lost.

    say: is told once, in a line that names the folder alone, so that it is the same for all files there.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self.path = path
        self._say = say
        self._descriptor: int | None = None
        self._waiting = b""
        self._lost = 0
        self._told = False
        self.write(b"")  # it is there from the beginning

    @property
    def is_whole(self) -> bool:
        """Whether everything is in the file."""
        return not self._waiting

    def write(self, data: bytes) -> None:
        """Add something; never raises OSError."""
        self._waiting += data
        if len(self._waiting) > KEPT and self._told:
            self._lost += len(self._waiting) - KEPT
            self._waiting = self._waiting[-KEPT:]
        try:
            self._write()
        except OSError as problem:
            if not self._told:
                self._told = True
                self._say(
                    f"{self.path.parent}: logs cannot be written ({problem.strerror}); the run goes on, and up to "
                    f"{KEPT >> 20} MiB of each is kept until they can be"
                )

    def close(self) -> None:
        """Write what is left, if it can be; else say how much is missing at its end."""
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
    """Write a line to stderr, if that can be written to; else it is lost."""
    with suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
