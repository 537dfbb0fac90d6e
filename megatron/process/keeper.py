"""A process that keeps another, and ends everything that came of it: also what moved to a session of its own,
which no signal to a process group reaches.

Linux alone hands orphans to the nearest ancestor that asks for them (PR_SET_CHILD_SUBREAPER)."""

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from megatron.process.children import children

END = signal.SIGRTMIN
"""Tells a keeper to end; schedulers send others."""
_LOOKS_S = 1.0
_KILLING_S = 10.0  # what does not end within is another user's, or waits for a disk
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36


def keep_this_process(let_go: Callable[[], None]) -> None:
    """Go on in a child of this process, which stays behind as its keeper. Call it before threads are started.

    The keeper ends when the child does, and as the child did; when its own parent ends; and by `END`. First
    it kills the child and all that descends from it. let_go: closes in the keeper what only the child may
    hold."""
    parent, keeper = os.getppid(), os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would hide how children end
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    prctl(_SET_CHILD_SUBREAPER, 1)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        prctl(_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(1)
        return
    try:
        let_go()
        status = _wait(child, parent)
        killed = _kill_all(child)
        _end_as(killed if status is None else status)
    finally:
        os._exit(1)


def prctl(option: int, value: int) -> None:
    """prctl(2). Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl: {os.strerror(code)}")


def _wait(child: int, parent: int) -> int | None:
    """The child's wait status once it has ended; None: it is to be ended."""
    while os.getppid() == parent:
        told = signal.sigtimedwait({signal.SIGCHLD, END}, _LOOKS_S)
        if told is not None and told.si_signo == END:
            return None
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:  # orphans too
                if ended[0] == child:
                    return ended[1]
    return None


def _kill_all(child: int) -> int:
    """Kill all descendants: a process that loses its parent becomes a child of this one, and is killed next.
    The wait status of `child`, if it ran."""
    deadline, status = time.monotonic() + _KILLING_S, signal.SIGKILL.value
    while time.monotonic() < deadline:
        for pid in children(os.getpid()):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child:
                    status = ended[1]
        except ChildProcessError:
            return status
        signal.sigtimedwait({signal.SIGCHLD}, 0.05)
    left = ", ".join(map(str, children(os.getpid())))
    sys.stderr.write(f"process {os.getpid()}: could not end processes {left} that were started here\n")
    return status


def _end_as(status: int) -> NoReturn:
    """End with the exit code or the signal of a wait status."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child has left one
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))
