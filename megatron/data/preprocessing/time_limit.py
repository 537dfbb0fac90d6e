"""Python code that is stopped when its time is over: chat templates are programs, and may loop without
end."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

RENDER_SECONDS = 10.0  # for one conversation; milliseconds are usual
TEMPLATE = "<template>"  # the file name that jinja gives to compiled templates


class RenderTimeout(Exception):
    """A template that was stopped."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"stopped after {seconds:g} s: it loops without end, or nearly so")


@contextmanager
def render_limit(seconds: float | None = None) -> Iterator[None]:
    """Raise RenderTimeout in what renders a jinja template for longer than `seconds` (None: RENDER_SECONDS).

    The main thread is stopped by a timer's signal, which costs nothing; any other, as those of the server, by
    a trace function, which makes rendering some five times slower. Neither ends a single operation of
    Python's own, such as 9 ** 9 ** 9: only between operations is there a place to stop.
    """
    limit = RENDER_SECONDS if seconds is None else seconds
    stop = _by_signal if threading.current_thread() is threading.main_thread() else _by_trace
    with stop(limit):
        yield


@contextmanager
def _by_signal(seconds: float) -> Iterator[None]:
    def ended(number: int, frame: FrameType | None) -> None:
        raise RenderTimeout(seconds)

    before = signal.signal(signal.SIGALRM, ended)
    started = time.monotonic()
    others_left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if others_left:  # a timer of others goes on; one that was due in between rings now
            signal.setitimer(signal.ITIMER_REAL, max(others_left - (time.monotonic() - started), 1e-6), interval)


@contextmanager
def _by_trace(seconds: float) -> Iterator[None]:
    end = time.monotonic() + seconds

    def inside(frame: FrameType, event: str, value: Any) -> Any:
        if time.monotonic() > end:
            raise RenderTimeout(seconds)
        return inside if frame.f_code.co_filename == TEMPLATE else None

    before = sys.gettrace()
    sys.settrace(inside)
    try:
        yield
    finally:
        sys.settrace(before)
