"""Handles signals and closed streams from the start of a process, writes stacks on demand, and ends a
process."""

import atexit
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

from megatron.process.stop_signals import StopHandler

STACKS_SIGNAL = signal.SIGUSR2  # makes a rank write the stacks of its threads
_STDERR = 2
_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def begin_process(name: str, advice: str = "", promise: str | None = None) -> None:
    """Sets signal handlers that stay until the command sets its own handlers. Call it before slow imports.

    Ctrl-C ends the process with the line `NAME: interrupted; ADVICE` and exit code 130, also during imports
    and interpreter shutdown. SIGUSR1, by which a scheduler announces the time limit, is only recorded
    (`stop_signal`). Other signals end the process as usual. Closed standard streams are opened to /dev/null.

    name: the command's name in messages.
    advice: text after "interrupted".
    promise: text to print when SIGUSR1 arrives, which says what the command will do about the signal. None:
        the command will ignore the signal, and nothing is printed.
    """
    open_streams()
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a shell's background jobs ignore it
        signal.signal(signal.SIGINT, _interrupted(f"{name}: interrupted{advice and f'; {advice}'}\n".encode()))
    noted = StopHandler(None if promise is None else lambda: f"{name}: {promise}", ends_at_second=False)
    signal.signal(signal.SIGUSR1, noted)  # set last: a launcher takes it as a sign that both are set


def take_early_signals(handler: Any) -> list[int]:
    """Returns [SIGUSR1] if SIGUSR1 has arrived since `begin_process`, else []. Call it after replacing its
    handler.

    handler: the previous handler of SIGUSR1, which `begin_process` had set.
    """
    return [signal.SIGUSR1] if getattr(handler, "received", 0) else []


def show_stacks_on_signal() -> None:
    """Makes this process write the Python stacks of all threads to stderr on SIGUSR2 or a crash in compiled
    code.

    SIGUSR2 works even while the process waits in compiled code, such as a collective.
    """
    faulthandler.enable(file=_STDERR)
    faulthandler.register(STACKS_SIGNAL, file=_STDERR, all_threads=True)


def exit_code(code: int) -> int:
    """Flushes stdout and stderr and returns `code`.

    A stream that cannot be written is redirected to /dev/null, because otherwise the interpreter would exit
    with code 120.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            discard_output(stream.fileno())
    return code


def discard_output(descriptor: int) -> None:
    """Redirects a file descriptor to /dev/null, so that later writes to it succeed."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def end_process(code: int) -> NoReturn:
    """Ends this process with exit code `code`, without destroying Python modules and objects.

    Before that it waits for threads, runs functions registered with `atexit`, and flushes streams. Destroying
    objects could abort a successful run (SIGABRT, code 134), because threads of process groups and engines
    still use them.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # also ends the threads of executors, unlike join
    atexit._run_exitfuncs()
    os._exit(exit_code(code))


def _interrupted(line: bytes) -> Callable[[int, FrameType | None], None]:
    def end(number: int, frame: FrameType | None) -> None:
        with suppress(OSError, RuntimeError, ValueError):  # interrupted during a write, or closed
            sys.stdout.flush()
        with suppress(OSError):
            os.write(2, line)
        os._exit(128 + number)  # without unwinding, which would print tracebacks of the interrupted work

    return end


def open_streams() -> None:
    """Opens /dev/null for each of stdin, stdout and stderr that is closed.

    Otherwise the next opened file would get the file descriptor of a closed stream, and the output written to
    that stream.
    """
    for descriptor, (name, mode) in enumerate(_STREAMS):
        if getattr(sys, name) is not None:
            continue
        with suppress(OSError):  # another file already has this descriptor
            os.fstat(descriptor)
            descriptor = -1
        nowhere = os.open(os.devnull, os.O_RDWR)
        if descriptor >= 0 and nowhere != descriptor:
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
            nowhere = descriptor
        os.set_inheritable(nowhere, True)
        stream = open(nowhere, mode, encoding="utf-8", closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
