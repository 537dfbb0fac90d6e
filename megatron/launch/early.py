"""USR1 that comes before anybody acts on it: while modules are imported, ranks meet, a checkpoint is read."""

import signal
from types import FrameType


class _Remembered:
    """A handler that only notes the signal. Who takes its place asks it for `received`, as `SignalWatch` does."""

    received = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.received = number


def remember_usr1() -> None:
    """From now on USR1, a scheduler's notice that time is running out, no longer ends this process: a run saves and
    stops after its first step. Other signals end a run that has not begun."""
    signal.signal(signal.SIGUSR1, _Remembered())


def has_early() -> bool:
    """Whether one came since `remember_usr1`."""
    handler = signal.getsignal(signal.SIGUSR1)
    return isinstance(handler, _Remembered) and bool(handler.received)


def take_early() -> list[int]:
    """Signals that came since `remember_usr1`, for who takes them up now."""
    return [signal.SIGUSR1] if has_early() else []
