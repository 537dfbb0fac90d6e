"""How a command ends, also when nobody reads what it writes."""

import atexit
import io
import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from megatron.process.early_signals import open_streams


def run_command(main: Callable[[], object]) -> NoReturn:
    """Run a command, and end this process with what it returns, as `sys.exit` does.

    When the reader of its stdout or stderr has gone, as `| head` does, the command is unwound at its next
    write, so that it removes temporary files and ends its processes. Then the process ends by SIGPIPE, in
    silence, as other Unix programs do.
    """
    open_streams()
    _notice_closed_pipes()
    threading.excepthook = _silent_threads
    ended: object = None
    try:
        try:
            ended = main()
        finally:
            with suppress(OSError):  # a full disk, which the interpreter tells of
                sys.stdout.flush()
    except _ReaderGone:
        pass
    if gone := [pipe for pipe in _pipes() if pipe.reader_gone]:  # maybe seen by a thread
        _end_by_sigpipe(gone)
    sys.exit(ended)  # type: ignore[arg-type]


def outlive_readers() -> None:
    """From now on this process goes on when nobody reads what it writes, as a run does: what is written to
    the streams then raises BrokenPipeError."""
    for pipe in _pipes():
        pipe.ends_command = False


class _ReaderGone(SystemExit):
    """Unwinds a command: no `except Exception` or `except OSError` keeps it from ending."""


class _Pipe(io.FileIO):
    """The writing end of a pipe. name: the stream's, for messages."""

    def __init__(self, descriptor: int, name: str) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.name = name
        self.ends_command = True
        self.reader_gone = False

    def write(self, data: Any, /) -> Any:
        try:
            return super().write(data)
        except BrokenPipeError:
            if not self.ends_command:
                raise
            self.reader_gone = True
            raise _ReaderGone(128 + signal.SIGPIPE) from None


def _notice_closed_pipes() -> None:
    """Let stdout and stderr, where they are pipes, raise _ReaderGone when nobody reads them."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            mode = os.fstat(stream.fileno()).st_mode
        except (AttributeError, OSError, ValueError):  # no stream, or one of memory
            continue
        if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)) or isinstance(_raw(stream), _Pipe):
            continue
        stream.flush()
        raw = _Pipe(stream.fileno(), f"<{name}>")
        buffered = not isinstance(stream.buffer, io.RawIOBase)  # as without `python -u`
        piped = io.TextIOWrapper(
            io.BufferedWriter(raw) if buffered else raw,  # type: ignore[arg-type, type-var]
            encoding=stream.encoding, errors=stream.errors, line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )  # fmt: skip
        setattr(sys, name, piped)


def _pipes() -> list[_Pipe]:
    return [raw for stream in (sys.stdout, sys.stderr) if isinstance(raw := _raw(stream), _Pipe)]


def _silent_threads(told: threading.ExceptHookArgs) -> None:
    """Of a thread that ends: nothing is said where nobody reads."""
    if told.exc_type is not _ReaderGone:
        threading.__excepthook__(told)


def _raw(stream: Any) -> Any:
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)


def _end_by_sigpipe(gone: Sequence[_Pipe]) -> NoReturn:
    """What Python does at its end, and the end by a signal, which a shell calls 141."""
    for pipe in gone:
        nowhere = os.open(os.devnull, os.O_WRONLY)  # for what threads and functions of `atexit` still write
        os.dup2(nowhere, pipe.fileno())
        os.close(nowhere)
    threading._shutdown()  # type: ignore[attr-defined]  # as `end_process`
    atexit._run_exitfuncs()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPIPE})
    os.kill(os.getpid(), signal.SIGPIPE)
    os._exit(128 + signal.SIGPIPE)
