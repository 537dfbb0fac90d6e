"""Runs a command and ends its process cleanly, even if the reader of its output closes the pipe (`|
head`)."""

import atexit
import errno
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

from megatron.process.early_signals import discard_output, open_streams


def run_command(main: Callable[[], object]) -> NoReturn:
    """Runs `main`, then ends this process with its return value, as `sys.exit` does.

    If the reader of stdout or stderr closes the pipe (`| head`), the next write raises _PipeBroken, so that
    `main` can remove its temporary files and end its child processes. Then this process ends silently by
    SIGPIPE, like other Unix programs. Any other exception of `main` is reported as usual.
    """
    open_streams()
    _notice_closed_pipes()
    threading.excepthook = _silent_threads
    os.register_at_fork(after_in_child=outlive_readers)  # a forked child raises BrokenPipeError instead
    result: object = None
    problem: BaseException | None = None
    is_broken = False
    try:
        result = main()
    except _PipeBroken:
        is_broken = True
    except SystemExit as ending:
        result = ending.code
    except OSError as error:
        is_broken = isinstance(error, BrokenPipeError) and bool(_broken_pipes())
        line = long_name_error(error)
        result, problem = (result, error) if line is None else (f"{os.path.basename(sys.argv[0])}: error: {line}", None)
    except BaseException as error:
        problem = error
    with suppress(OSError, _PipeBroken):  # OSError: a full disk, which the interpreter reports at exit
        sys.stdout.flush()
    broken_pipes = _broken_pipes()
    if is_broken or broken_pipes and problem is None and not result:
        _end_by_sigpipe(broken_pipes)
    _leave(broken_pipes)  # so that only the command's own error is reported
    if problem is not None:
        raise problem
    sys.exit(result)  # type: ignore[arg-type]


def long_name_error(problem: OSError) -> str | None:
    """Returns an error message if a name that a user gave is too long for the file system; else None.

    Every question about a file, even whether it exists, raises OSError for such a name.
    """
    if problem.errno != errno.ENAMETOOLONG or problem.filename is None:
        return None
    return f"{str(problem.filename)[:100]}...: is too long for the name of a file; give another"


def outlive_readers() -> None:
    """Keeps this process running if the reader of its output closes the pipe; training runs call it.

    Writes to the closed pipe then raise BrokenPipeError, which can be caught, instead of _PipeBroken.
    """
    for pipe in _pipes():
        pipe.ends_command = False


class _PipeBroken(SystemExit):
    """Raised by a write to stdout or stderr whose reader has closed the pipe; it ends the command. `except
    Exception` and `except OSError` do not catch it."""


class _Pipe(io.FileIO):
    """The writing end of a pipe. A write raises _PipeBroken once the reader has closed the pipe.

    name: name of the stream, for messages.
    """

    def __init__(self, descriptor: int, name: str) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.name = name
        self.ends_command = True
        self.is_broken = False

    def write(self, data: Any, /) -> Any:
        try:
            return super().write(data)
        except BrokenPipeError:
            if not self.ends_command:
                raise
            self.is_broken = True
            raise _PipeBroken(128 + signal.SIGPIPE) from None


def _notice_closed_pipes() -> None:
    """If stdout or stderr is a pipe, replaces it by a stream whose writes raise _PipeBroken once the reader
    has closed it."""
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


def _broken_pipes() -> list[_Pipe]:
    """Returns the pipes of stdout and stderr whose reader has closed them. Returns none after
    `outlive_readers`."""
    broken_pipes = []
    for pipe in _pipes():
        if pipe.ends_command:
            poll = select.poll()
            poll.register(pipe.fileno(), 0)  # reports only errors, such as a reader that has closed the pipe
            if pipe.is_broken or poll.poll(0):
                broken_pipes.append(pipe)
    return broken_pipes


def _silent_threads(uncaught: threading.ExceptHookArgs) -> None:
    """Reports the exception that ended a thread, except _PipeBroken."""
    if uncaught.exc_type is not _PipeBroken:
        threading.__excepthook__(uncaught)


def _raw(stream: Any) -> Any:
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)


def _leave(pipes: Sequence[_Pipe]) -> None:
    for pipe in pipes:
        discard_output(pipe.fileno())


def _end_by_sigpipe(pipes: Sequence[_Pipe]) -> NoReturn:
    """Runs the functions registered with `atexit`, then ends this process by SIGPIPE (exit code 141 in a
    shell)."""
    _leave(pipes)  # threads and functions of `atexit` may still write
    threading._shutdown()  # type: ignore[attr-defined]  # as in `end_process`
    atexit._run_exitfuncs()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPIPE})
    os.kill(os.getpid(), signal.SIGPIPE)
    os._exit(128 + signal.SIGPIPE)
