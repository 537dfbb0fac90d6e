"""Separates the log file of a run from what its terminal shows.

Where deepy.py shows rank 0 in a terminal, it names the rank's log file in TERMINAL_LOG of its environment.
The rank then marks lines for the file alone, such as GPT-NeoX's long ones, and lines for the terminal alone.
Elsewhere lines are not marked, and both get the same.
"""

import os
import re

TERMINAL_LOG = "NEOX_TERMINAL_LOG"
_FILE, _SCREEN = "\x0e", "\x0f"  # begin a line for the log file alone, for the terminal alone
_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


def terminal_log() -> str:
    """Returns the log file of this process, if deepy.py shows it in a terminal; else ""."""
    return os.environ.get(TERMINAL_LOG, "")


def has_colours() -> bool:
    """Returns whether text in a terminal may have colours (https://no-color.org)."""
    return not os.environ.get("NO_COLOR")


def coloured(text: str, code: int) -> str:
    """Returns a text in a colour. code: of ANSI, such as 32 for green."""
    return f"\x1b[{code}m{text}\x1b[0m" if has_colours() else text


def for_log_file(text: str) -> str:
    """Returns a text whose lines a terminal does not show."""
    return "\n".join(_FILE + line for line in text.splitlines()) if terminal_log() else text


def for_terminal(line: str) -> str:
    """Returns a line that goes into no log file. Call it only if there is a `terminal_log`."""
    return _SCREEN + line


class OutputSplitter:
    """Divides the output of a process between its log file and a terminal.

    The terminal gets text as it comes, the file complete lines without escape codes. A line that was drawn
    several times (progress bars) stands in the file as it was drawn last.
    """

    def __init__(self) -> None:
        self._line = b""  # the line that has not ended yet

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """Returns (text for the file, text for the terminal)."""
        logged, for_screen = b"", b""
        for piece in _lines(data):
            hidden = _FILE.encode() in self._line
            visible, _, _ = piece.partition(_FILE.encode())
            for_screen += b"" if hidden else visible.replace(_SCREEN.encode(), b"")
            self._line += piece
            if piece.endswith(b"\n"):
                logged += self._file_line()
                self._line = b""
        return logged, for_screen

    def finish(self) -> bytes:
        """Returns the line that has not ended, for the file."""
        line, self._line = self._file_line(), b""
        return line

    def _file_line(self) -> bytes:
        if _SCREEN.encode() in self._line:
            return b""
        drafts = self._line.rstrip(b"\r\n").split(b"\r")
        text = _ESCAPES.sub(b"", drafts[-1]).replace(_FILE.encode(), b"")
        if len(drafts) > 1 and not text.strip():  # a bar that was taken away
            return b""
        return text + (b"\n" if self._line.endswith(b"\n") else b"")


def _lines(data: bytes) -> list[bytes]:
    """Returns the lines of a text, with their ends; carriage returns end no line."""
    *lines, last = data.split(b"\n")
    return [line + b"\n" for line in lines] + ([last] if last else [])
