"""Runs one rank as a child process: reads its output, writes its log, sends it signals."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron.process import LogFile
from megatron.process.terminal import TERMINAL_LOG, OutputSplitter

FATAL = (b"Traceback (most recent call last)", b"Fatal Python error: ")
STACK = b"(most recent call first)"  # faulthandler's
OVERDUE = re.compile(rb"^Timeout \(\d+:\d+:\d+(\.\d+)?\)!", re.MULTILINE)
# torch puts the rank before each line of a traceback.
WORTH_READING = re.compile(rb"^(\[rank\d+\]: )?(Traceback|Fatal Python error:|Timeout|Thread|Current thread) ", re.M)
TAIL_BYTES = 64 * 1024


class AdoptedProcess:
    """A child of this process that another process started, with the part of Popen that a launcher needs.

    returncode: as Popen's; None while it runs.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.poll()  # raises ChildProcessError if it is no child of this process

    def poll(self) -> int | None:
        """Returns the exit code, negative if a signal ended it; None while it runs."""
        return self._waited(os.WNOHANG)

    def wait(self) -> int | None:
        """Waits for the end of the process, and returns its exit code."""
        return self._waited(0)

    def _waited(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def adopt_orphans() -> None:
    """Makes this process the parent of its descendants whose parents end. Does nothing outside Linux."""
    if sys.platform == "linux":
        PR_SET_CHILD_SUBREAPER = 36
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


@dataclass
class Rank:
    """A rank's child process, the last part of its output, and signs of failure found in that output."""

    index: int
    world_size: int
    process: "subprocess.Popen[bytes] | AdoptedProcess"
    output: int  # file descriptor we read
    log: LogFile
    tail: bytes = b""
    held: bytes = b""  # of rank 0: read, not yet shown
    traceback_at: float | None = None
    stopped_at: float | None = None
    splitter: OutputSplitter | None = None  # of a rank in a terminal

    def read(self) -> bytes:
        """Reads the next piece of the rank's output, writes it to the rank's log and returns it; b"" if there
        is none."""
        data = _read(self.output)
        if data:
            logged, for_screen = (data, data) if self.splitter is None else self.splitter.feed(data)
            self.log.write(logged)
            self.held += for_screen if self.index == 0 else b""
            recent = self.tail[-len(FATAL[0]) :] + data
            if any(mark in recent for mark in FATAL):
                self.traceback_at = time.monotonic()
            self.tail = (self.tail + data)[-TAIL_BYTES:]
        return data

    def close(self) -> None:
        """Writes the rest of the output into the log, and closes both."""
        if self.splitter is not None:
            self.log.write(self.splitter.finish())
        self.log.close()
        os.close(self.output)

    def read_all(self) -> None:
        """Reads all output that the rank has written so far. It does not wait for the end of the pipe,
        because a child process of the rank may keep the pipe open."""
        while self.read():
            pass

    def stopped_for(self) -> float:
        """Returns the seconds since the rank was first seen stopped (SIGSTOP). 0 while it runs or a debugger
        holds it."""
        if self.process.returncode is not None or not hasattr(os, "waitid"):
            return 0.0
        try:
            state = os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # it has just ended
            state = None
        if state is None or state.si_code != os.CLD_STOPPED:
            self.stopped_at = None
            return 0.0
        self.stopped_at = self.stopped_at or time.monotonic()
        return time.monotonic() - self.stopped_at

    def is_overdue(self) -> bool:
        """Returns whether the rank ended itself because it made no progress within the time limit."""
        return self.process.returncode == 1 and OVERDUE.search(self.tail) is not None

    def ending_signal(self) -> int:
        """Returns the signal that ended the rank; 0 if no signal ended it. Exit code 130 counts as SIGINT."""
        code = self.process.poll() or 0
        return -code if code < 0 else signal.SIGINT if code == 128 + signal.SIGINT else 0

    def last_lines(self, lines: int) -> str:
        """Returns the last `lines` lines of the output, starting at a traceback or stack if there is one."""
        last = b"\n".join(self.tail.splitlines()[-lines:])
        begins = WORTH_READING.search(last)
        return last[begins.start() if begins else 0 :].decode(errors="replace")

    def would_die(self, number: int) -> bool:
        """Returns whether the signal `number` would end the rank, because the rank has no handler for it yet.
        Always False outside Linux."""
        try:
            status = Path(f"/proc/{self.process.pid}/status").read_text()
        except OSError:  # another system, or it has ended
            return False
        handled = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
        return handled is not None and not int(handled[1], 16) >> (number - 1) & 1

    def signal(self, number: int) -> None:
        """Sends a signal to the rank's own process, not to its child processes."""
        if self.process.poll() is None:
            os.kill(self.process.pid, number)

    def signal_group(self, number: int) -> None:
        """Sends a signal to the rank and its child processes."""
        with suppress(ProcessLookupError, PermissionError):  # all of them have ended
            os.killpg(self.process.pid, number)


def start_rank(
    index: int,
    world_size: int,
    command: Sequence[str],
    env: Mapping[str, str],
    log: LogFile,
    descriptors: Sequence[int] = (),
) -> Rank:
    """Starts one rank in its own session. Its stdout and stderr go into one stream, which the caller must
    read. descriptors: open files that it inherits."""
    terminal, reader, writer = open_output(index)
    env = {**env, TERMINAL_LOG: str(log.path) if terminal else ""}
    try:
        process = subprocess.Popen(
            list(command), env=dict(env), stdin=None if index == 0 else subprocess.DEVNULL, stdout=writer,
            stderr=writer, start_new_session=True, preexec_fn=die_with_parent(signal.SIGKILL),
            pass_fds=descriptors,
        )  # fmt: skip
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    return Rank(index, world_size, process, reader, log, splitter=OutputSplitter() if terminal else None)


def open_output(index: int) -> tuple[bool, int, int]:
    """Opens a stream for the output of rank `index`.

    Returns (whether it is a terminal, the end to read from, which never blocks, the rank's end).
    """
    terminal = index == 0 and os.isatty(sys.stdout.fileno())
    reader, writer = _terminal() if terminal else os.pipe()
    os.set_blocking(reader, False)
    return terminal, reader, writer


def _terminal() -> tuple[int, int]:
    """Opens a pseudo-terminal as large as the launcher's terminal, in which rank 0 draws its progress bar.

    Returns two file descriptors: (the launcher's end, the rank's end).
    """
    import pty
    import termios

    parent_end, child_end = pty.openpty()
    attributes = termios.tcgetattr(child_end)
    attributes[1] &= ~termios.OPOST  # bytes pass unchanged; the real terminal translates newlines
    termios.tcsetattr(child_end, termios.TCSANOW, attributes)
    termios.tcsetwinsize(child_end, termios.tcgetwinsize(sys.stdout.fileno()))
    return parent_end, child_end


def die_with_parent(number: int) -> Callable[[], None] | None:
    """Returns a `preexec_fn` for Popen: the child gets the signal `number` when the launcher dies. None
    outside Linux."""
    if sys.platform != "linux":
        return None
    libc, parent = ctypes.CDLL(None), os.getpid()
    PR_SET_PDEATHSIG = 1

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def _read(descriptor: int) -> bytes:
    """Returns the bytes waiting in a pipe or pseudo-terminal; b"" at its end or if none wait."""
    try:
        return os.read(descriptor, 64 * 1024)
    except (BlockingIOError, InterruptedError):
        return b""
    except OSError:  # a pseudo-terminal whose other end is closed
        return b""
