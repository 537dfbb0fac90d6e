"""Turns a process into a keeper, which waits for its child to end and then kills all descendants (Linux).

The descendants include processes in sessions of their own, which signals to a process group do not reach. It
works only on Linux, where an ancestor can become the parent of orphaned processes (PR_SET_CHILD_SUBREAPER).
"""

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
"""The signal that tells a keeper to end. Schedulers do not send this signal."""
_LOOKS_S = 1.0
_KILLING_S = 10.0  # a process that survives longer belongs to another user, or waits for a disk
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36


def keep_this_process(let_go: Callable[[], None]) -> None:
    """Forks: the child returns from this call and continues the program; this process stays as its keeper.
    Call it before threads are started.

    The keeper waits until the child ends, the keeper's own parent ends, or the signal `END` arrives. Then it
    kills the child and all of its descendants, and ends with the exit code or signal of the child.

    let_go: called in the keeper; it must close the files that only the child may hold open.
    """
    parent, keeper = os.getppid(), os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, exit codes of children are lost
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
    """Calls the Linux system call prctl(2) with `option` and `value`. Raises OSError if the call fails."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl: {os.strerror(code)}")


def _wait(child: int, parent: int) -> int | None:
    """Waits for the process `child` and returns its wait status. Returns None if the signal `END` arrives
    first, or the process `parent` of this process ends first."""
    while os.getppid() == parent:
        received = signal.sigtimedwait({signal.SIGCHLD, END}, _LOOKS_S)
        if received is not None and received.si_signo == END:
            return None
        with suppress(ChildProcessError):
            while (exited := os.waitpid(-1, os.WNOHANG))[0]:  # orphans too
                if exited[0] == child:
                    return exited[1]
    return None


def _kill_all(child: int) -> int:
    """Kills all descendants of this process, and returns the wait status of the process `child`.

    When a process is killed, its children become children of this process, and are killed next.
    """
    deadline, status = time.monotonic() + _KILLING_S, signal.SIGKILL.value
    while time.monotonic() < deadline:
        for pid in children(os.getpid()):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while (exited := os.waitpid(-1, os.WNOHANG))[0]:
                if exited[0] == child:
                    status = exited[1]
        except ChildProcessError:
            return status
        signal.sigtimedwait({signal.SIGCHLD}, 0.05)
    left = ", ".join(map(str, children(os.getpid())))
    sys.stderr.write(f"process {os.getpid()}: could not kill its descendants, processes {left}; kill them yourself\n")
    return status


def _end_as(status: int) -> NoReturn:
    """Ends this process with the exit code, or by the signal, that the wait status `status` contains."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no second core file beside the child's
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))
