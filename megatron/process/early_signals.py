"""The first and the last moments of a process: closed streams, signals that nobody acts on yet, stacks on
demand, the last flush."""

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

STACKS_SIGNAL = signal.SIGUSR2  # has a rank write where it is
_STDERR = 2
_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def begin_process(name: str, advice: str = "", promise: str | None = None) -> None:
    """Prepare a process for signals; a command calls it before it imports anything slow.

    Standard streams that were closed become /dev/null. USR1, a scheduler's notice that time is running out,
    no longer ends this process: it is noted (`stop_signal`), and acknowledged by `promise`, what the command
    will do about it; None: nothing, and nothing is said. Ctrl-C ends it with one line, `name`: interrupted
    and the advice, and exit code 130, also while modules are imported and while the interpreter ends. Other
    signals end a run that has not begun.
    """
    open_streams()
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in a shell's background
        signal.signal(signal.SIGINT, _interrupted(f"{name}: interrupted{advice and f'; {advice}'}\n".encode()))
    noted = StopHandler(None if promise is None else lambda: f"{name}: {promise}", ends_at_second=False)
    signal.signal(signal.SIGUSR1, noted)  # last: a launcher sees by it that both are taken up


def take_early_signals(handler: Any) -> list[int]:
    """Signals that came since `begin_process`, for who handles them from now on. handler: that of USR1 until
    then."""
    return [signal.SIGUSR1] if getattr(handler, "received", 0) else []


def show_stacks_on_signal() -> None:
    """From now on SIGUSR2, and a crash in compiled code, write the Python stacks of all threads to stderr:
    also while this process waits in compiled code, as in a collective."""
    faulthandler.enable(file=_STDERR)
    faulthandler.register(STACKS_SIGNAL, file=_STDERR, all_threads=True)


def exit_code(code: int) -> int:
    """Flush stdout and stderr and return `code`, with which the process then ends also where they cannot be
    written.

    The interpreter would end with a code of its own (120) instead.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
    return code


def end_process(code: int) -> NoReturn:
    """End this process with `code`, as `sys.exit` does, but without destroying modules and what they hold.

    Threads are waited for, functions registered with `atexit` run, streams are flushed. Then the process ends
    at once: in the destruction of process groups and engines a thread of theirs now and then aborts a run
    that has succeeded (SIGABRT, code 134).
    """
    threading._shutdown()  # type: ignore[attr-defined]  # also ends the threads of executors, unlike join
    atexit._run_exitfuncs()
    os._exit(exit_code(code))


def _interrupted(line: bytes) -> Callable[[int, FrameType | None], None]:
    def end(number: int, frame: FrameType | None) -> None:
        with suppress(OSError, RuntimeError, ValueError):  # in the middle of a write, or it is closed
            sys.stdout.flush()
        with suppress(OSError):
            os.write(2, line)
        os._exit(128 + number)  # nothing unwinds: there would be tracebacks from whatever was under way

    return end


def open_streams() -> None:
    """Let standard streams that were closed be /dev/null: the next file to be opened would otherwise get the
    descriptor of one, and what is written there."""
    for descriptor, (name, mode) in enumerate(_STREAMS):
        if getattr(sys, name) is not None:
            continue
        with suppress(OSError):  # somebody's file has it already
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
