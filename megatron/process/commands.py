"""How a command ends, also when nobody reads what it writes."""

import atexit
import io
import os
import select
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
    silence, as other Unix programs do. An error of its own is told and ends it as ever.
    """
    open_streams()
    _notice_closed_pipes()
    threading.excepthook = _silent_threads
    os.register_at_fork(after_in_child=outlive_readers)  # its parent is told of a BrokenPipeError, and ends
    ended: object = None
    problem: BaseException | None = None
    is_gone = False
    try:
        ended = main()
    except _ReaderGone:
        is_gone = True
    except SystemExit as ending:
        ended = ending.code
    except BaseException as other:
        problem, is_gone = other, isinstance(other, BrokenPipeError) and bool(_without_reader())
    with suppress(OSError, _ReaderGone):  # OSError: a full disk, which the interpreter tells of
        sys.stdout.flush()
    gone = _without_reader()
    if is_gone or gone and problem is None and not ended:
        _end_by_sigpipe(gone)
    _leave(gone)  # what went wrong comes first
    if problem is not None:
        raise problem
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


def _without_reader() -> list[_Pipe]:
    """The pipes that nobody reads, of a command that ends then."""
    found = []
    for pipe in _pipes():
        if pipe.ends_command:
            poll = select.poll()
            poll.register(pipe.fileno(), 0)  # of errors alone: its other end is closed
            if pipe.reader_gone or poll.poll(0):
                found.append(pipe)
    return found


def _silent_threads(told: threading.ExceptHookArgs) -> None:
    """Report the exception that ended a thread, unless it is that nobody reads."""
    if told.exc_type is not _ReaderGone:
        threading.__excepthook__(told)


def _raw(stream: Any) -> Any:
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)


def _leave(gone: Sequence[_Pipe]) -> None:
    """Let what is still written to these go nowhere."""
    for pipe in gone:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, pipe.fileno())
        os.close(nowhere)


def _end_by_sigpipe(gone: Sequence[_Pipe]) -> NoReturn:
    """What Python does at its end, and the end by a signal, which a shell calls 141."""
    _leave(gone)  # threads and functions of `atexit` may still write
    threading._shutdown()  # type: ignore[attr-defined]  # as `end_process`
    atexit._run_exitfuncs()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPIPE})
    os.kill(os.getpid(), signal.SIGPIPE)
    os._exit(128 + signal.SIGPIPE)
