"""Signals that ask a process to stop: taken up, acknowledged and asked for in this one place.

What has come is kept by the handlers themselves, in Python's table of signals, so that every phase of a run
can ask without being handed anything: `stop_signal`, or `look_for_stop` between its batches.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

# One signal may come twice, from a scheduler to every process and passed on by the launcher.
SAME_SIGNAL_S = 2.0
_STDOUT = 1


class StopRequested(Exception):
    """A stop signal has come, and what was under way is given up. number: the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    def __str__(self) -> str:
        return stop_reason(self.number)


class StopHandler:
    """A handler of stop signals that notes the first one, `received`, and acknowledges it at once; another
    one, later than its echo, ends the process. In a forked child it says nothing."""

    def __init__(self, promise: Callable[[], str] | None, *, ends_at_second: bool = True, received: int = 0) -> None:
        """promise: the line that acknowledges a signal, behind its name; None: nobody will obey, and nothing
        is said. received: a signal that has come before, and is acknowledged."""
        self.received, self._promise, self._ends_at_second = received, promise, ends_at_second
        self._first, self._process = time.monotonic(), os.getpid()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.received:
            self.received, self._first = number, now
            if self._promise is not None and os.getpid() == self._process:
                say_at_once(f"{signal.Signals(number).name}: {self._promise()}")
        elif self._ends_at_second and now - self._first > SAME_SIGNAL_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    @property
    def requested(self) -> int:
        """The signal that this process has promised to obey, 0 without one."""
        return 0 if self._promise is None else self.received


@contextmanager
def stop_signals_taken(promise: Callable[[], str]) -> Iterator[None]:
    """Within, the stop signals are noted and no longer end this process; one that came before is among them.

    Afterwards the signals are as they were, but for the one that came: its echo may still be on its way, and
    would end a process that is about to end by itself.
    """
    handler = StopHandler(promise, received=stop_signal())
    previous = {number: signal.signal(number, handler) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, signal.SIG_IGN if number == handler.received else before)


def stop_signal() -> int:
    """The first stop signal that has come to this process and is still to be obeyed; 0: none has."""
    return max(getattr(signal.getsignal(number), "requested", 0) for number in STOP_SIGNALS)


def look_for_stop() -> None:
    """Raise StopRequested once a stop signal has come; called between the batches of what takes long, where
    what one rank raises is raised on all."""
    number = stop_signal()
    if number:
        raise StopRequested(number)


def stop_reason(number: int) -> str:
    """The reason that status.json and log give for a run that ends for this signal."""
    return f"signal {signal.Signals(number).name}"


def say_at_once(line: str) -> None:
    """A line on stdout from within a handler, where a logger may be in the middle of another."""
    with suppress(OSError):
        os.write(_STDOUT, f"{line}\n".encode())
