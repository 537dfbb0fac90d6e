"""Run one process per rank to the end: stream rank 0, keep every rank's output, end all when one fails."""

import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import BinaryIO

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
GRACE_S = 5.0  # from SIGTERM to SIGKILL
POLL_S = 0.1
# A rank that prints a traceback and is still alive after this long has handled it.
TRACEBACK_S = 5.0
TRACEBACK = b"Traceback (most recent call last)"
TAIL_BYTES = 64 * 1024
TAIL_LINES = 100


@dataclass
class _Rank:
    """A running rank and what is known of it."""

    index: int
    process: subprocess.Popen[bytes]
    output: int  # file descriptor we read
    log: BinaryIO
    tail: bytes = b""
    held: bytes = b""  # of rank 0: read, not yet shown
    traceback_at: float | None = None

    def read(self) -> bytes:
        """The next piece of what the rank has written; also written to its log."""
        data = _read(self.output)
        if data:
            self.log.write(data)
            self.held += data if self.index == 0 else b""
            if TRACEBACK in self.tail[-len(TRACEBACK) :] + data:
                self.traceback_at = time.monotonic()
            self.tail = (self.tail + data)[-TAIL_BYTES:]
        return data

    def read_all(self) -> None:
        """Everything written so far. The pipe's end is not waited for: a grandchild may keep it open."""
        while self.read():
            pass


def watch_ranks(command: Sequence[str], environments: Sequence[Mapping[str, str]], log_dir: Path) -> int:
    """Run `command` once per environment; the exit code: 0, or that of the rank that failed first.

    Rank 0's output goes to our stdout as it comes, every rank's to `log_dir/rank_<r>.log`. When a rank fails, its
    traceback is shown before anything the others print because of it, and they are ended with their children.
    SIGTERM, SIGINT and SIGUSR1 are passed on to every rank. A rank killed by signal N counts as exit code 128 + N.
    """
    received: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        received.append(number)

    previous = {number: signal.signal(number, remember) for number in PASSED_ON}
    ranks: list[_Rank] = []
    try:
        for index, env in enumerate(environments):
            ranks.append(_start(index, command, env, log_dir))
        return _watch(ranks, received, _Screen())
    finally:
        _end(ranks)
        for rank in ranks:
            rank.log.close()
            os.close(rank.output)
        for number, handler in previous.items():
            signal.signal(number, handler)


class _Screen:
    """Our stdout as bytes. When its reader goes away the run goes on, only unseen."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._descriptor: int | None = sys.stdout.fileno()

    def show(self, rank: _Rank) -> None:
        data, rank.held = rank.held, b""
        while data and self._descriptor is not None:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BrokenPipeError:
                self._descriptor = None


def _watch(ranks: list[_Rank], received: list[int], screen: _Screen) -> int:
    """Pump output, pass signals on, until all ranks have ended or one has failed."""
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.output, selectors.EVENT_READ, rank)
        while True:
            for number in _drain(received):
                for rank in ranks:
                    if rank.process.poll() is None:
                        os.kill(rank.process.pid, number)
            # Exit codes first, output second: then nothing an ended rank wrote is missed.
            codes = [rank.process.poll() for rank in ranks]
            for key, _ in selector.select(POLL_S if None in codes else 0):
                if not key.data.read():  # closed
                    selector.unregister(key.fd)
            failed = [rank for rank, code in zip(ranks, codes, strict=True) if code]
            if failed:
                return _report(_first_failed(_suspect(ranks), failed[0]), ranks, screen)
            if None not in codes:
                for rank in ranks:
                    rank.read_all()
                screen.show(ranks[0])
                return 0
            suspect = _suspect(ranks)
            if suspect is None or suspect.index == 0:  # else rank 0 may be about to complain of what another did
                screen.show(ranks[0])


def _drain(received: list[int]) -> list[int]:
    numbers = received[:]
    del received[: len(numbers)]
    return numbers


def _suspect(ranks: list[_Rank]) -> _Rank | None:
    """The rank that printed a traceback first, and not so long ago that it must have survived it."""
    now = time.monotonic()
    fresh = [
        rank
        for rank in ranks
        if rank.traceback_at and (rank.process.returncode or now - rank.traceback_at < TRACEBACK_S)
    ]
    return min(fresh, key=lambda rank: rank.traceback_at or now, default=None)


def _report(culprit: _Rank, ranks: list[_Rank], screen: _Screen) -> int:
    """End every rank and show why: the culprit's last output first, then what rank 0 has still to say."""
    culprit.read_all()
    code = culprit.process.poll() or 1
    how = f"was killed by {_signal_name(-code)}" if code < 0 else f"failed with exit code {code}"
    if culprit.index == 0:
        screen.show(culprit)
        why = "its output is above"
    else:
        last = b"\n".join(culprit.tail.splitlines()[-TAIL_LINES:])
        shown = last[max(0, last.find(TRACEBACK)) :].decode(errors="replace")
        why = f"{culprit.log.name} ends with:\n{shown}"
    sys.stderr.write(f"rank {culprit.index} of {len(ranks)} {how}; {why}\n")
    sys.stderr.flush()
    _end(ranks)
    screen.show(ranks[0])
    return 128 - code if code < 0 else code


def _first_failed(suspect: _Rank | None, failed: _Rank) -> _Rank:
    """Which of the two to blame: the one that printed a traceback first, if it does end of it."""
    if suspect is None:
        return failed
    deadline = time.monotonic() + GRACE_S
    while suspect.process.poll() is None and time.monotonic() < deadline:
        suspect.read()
        time.sleep(0.02)
    return suspect if suspect.process.poll() else failed


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _end(ranks: list[_Rank]) -> None:
    """End the ranks' process groups, so that data-loader workers go too: politely, then not."""
    alive = [rank for rank in ranks if rank.process.poll() is None]
    for rank in alive:
        _signal_group(rank, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while alive and time.monotonic() < deadline:
        for rank in alive:
            rank.read()  # a rank that cannot write cannot end
        alive = [rank for rank in alive if rank.process.poll() is None]
        time.sleep(0.02)
    for rank in ranks:
        _signal_group(rank, signal.SIGKILL)
        rank.process.wait()
        rank.read_all()


def _signal_group(rank: _Rank, number: signal.Signals) -> None:
    try:
        os.killpg(rank.process.pid, number)
    except (ProcessLookupError, PermissionError):
        pass  # everyone in it has ended


def _start(index: int, command: Sequence[str], env: Mapping[str, str], log_dir: Path) -> _Rank:
    """Start one rank in a process group of its own; stdout and stderr are one stream."""
    terminal = index == 0 and os.isatty(sys.stdout.fileno())
    reader, writer = _terminal() if terminal else os.pipe()
    os.set_blocking(reader, False)
    log = open(log_dir / f"rank_{index}.log", "ab", buffering=0)
    try:
        process = subprocess.Popen(
            list(command),
            env=dict(env),
            stdin=None if index == 0 else subprocess.DEVNULL,
            stdout=writer,
            stderr=writer,
            start_new_session=True,
            preexec_fn=_die_with_parent(),
        )
    except BaseException:
        os.close(reader)
        log.close()
        raise
    finally:
        os.close(writer)
    return _Rank(index, process, reader, log)


def _terminal() -> tuple[int, int]:
    """A pseudo-terminal of our terminal's size, so that rank 0 draws its progress bar: (our end, its end)."""
    import pty
    import termios

    ours, theirs = pty.openpty()
    attributes = termios.tcgetattr(theirs)
    attributes[1] &= ~termios.OPOST  # bytes pass unchanged; the real terminal translates newlines
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    termios.tcsetwinsize(theirs, termios.tcgetwinsize(sys.stdout.fileno()))
    return ours, theirs


def _die_with_parent() -> Callable[[], None] | None:
    """What a rank does before it starts, so that it does not outlive a launcher that is killed outright (Linux)."""
    if sys.platform != "linux":
        return None
    libc, parent = ctypes.CDLL(None), os.getpid()
    PR_SET_PDEATHSIG = 1

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def _read(descriptor: int) -> bytes:
    """Bytes waiting in a pipe or pseudo-terminal; none at its end or when nothing waits."""
    try:
        return os.read(descriptor, 64 * 1024)
    except (BlockingIOError, InterruptedError):
        return b""
    except OSError:  # a pseudo-terminal whose other end is closed
        return b""
