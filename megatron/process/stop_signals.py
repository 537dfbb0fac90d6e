"""Records and acknowledges signals that ask a process to stop, and tells whether one has arrived.

The recorded signal is kept in the signal handlers themselves, which Python stores. So any code can call
`stop_signal` or `look_for_stop` without extra arguments.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

# One signal may arrive twice: from a scheduler that sends it to every process, and from the launcher.
SAME_SIGNAL_S = 2.0
_STDOUT = 1


class StopRequested(Exception):
    """Raised to abandon the current work because a stop signal has arrived. number: number of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    def __str__(self) -> str:
        return stop_reason(self.number)


class StopHandler:
    """A signal handler that records the first stop signal in `received` and prints an acknowledgement.

    A second signal more than SAME_SIGNAL_S seconds later ends the process. In a forked child nothing is
    printed.
    """

    def __init__(self, promise: Callable[[], str] | None, *, ends_at_second: bool = True, received: int = 0) -> None:
        """Prepares a handler that acknowledges the first signal with the text that `promise` returns.

        promise: returns the text to print after the signal's name, which says what the command will do. None:
            no code will act on the signal, and nothing is printed.
        ends_at_second: whether a second signal ends the process.
        received: number of a signal that arrived earlier and has been acknowledged; 0: none.
        """
        self.received, self._promise, self._ends_at_second = received, promise, ends_at_second
        self._received_time, self._process = time.monotonic(), os.getpid()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.received:
            self.received, self._received_time = number, now
            if self._promise is not None and os.getpid() == self._process:
                say_at_once(f"{signal.Signals(number).name}: {self._promise()}")
        elif self._ends_at_second and now - self._received_time > SAME_SIGNAL_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    @property
    def requested(self) -> int:
        """The number of the recorded signal if `promise` was given, which means that code will act on the
        signal; else 0."""
        return 0 if self._promise is None else self.received


@contextmanager
def capture_stop_signals(promise: Callable[[], str]) -> Iterator[None]:
    """Within the `with` block, stop signals are recorded for `stop_signal` and do not end this process. A
    signal recorded before the block counts too.

    After the block the previous handlers are restored. Only the signal that arrived is ignored from then on,
    because the scheduler may send it twice and the process is about to end anyway.

    promise: returns the text that acknowledges the first signal.
    """
    handler = StopHandler(promise, received=stop_signal())
    previous = {number: signal.signal(number, handler) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler_before in previous.items():
            signal.signal(number, signal.SIG_IGN if number == handler.received else handler_before)


def stop_signal() -> int:
    """Returns the number of the stop signal that has arrived and must be acted on; 0 if there is none."""
    return max(getattr(signal.getsignal(number), "requested", 0) for number in STOP_SIGNALS)


def look_for_stop() -> None:
    """Raises StopRequested if a stop signal has arrived at this process.

    Call it between batches of long work, and only in code where an exception on one rank is raised on all
    ranks.
    """
    number = stop_signal()
    if number:
        raise StopRequested(number)


def stop_reason(number: int) -> str:
    """Returns the reason for stopping as text for status.json and the log, such as `signal SIGUSR1`."""
    return f"signal {signal.Signals(number).name}"


def say_at_once(line: str) -> None:
    """Writes a line to stdout from a signal handler. It uses no logger, because the signal may have
    interrupted a logger in the middle of a line."""
    with suppress(OSError):
        os.write(_STDOUT, f"{line}\n".encode())
