"""Stops chat templates after a time limit, because they are programs that may loop forever."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from types import FrameType
from typing import Any

RENDER_SECONDS = 10.0  # for one conversation; milliseconds are usual
TEMPLATE = "<template>"  # the file name that jinja gives to compiled templates


class RenderTimeout(Exception):
    """Raised inside a chat template that exceeds the time limit."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"stopped after {seconds:g} s: it may loop without end")


@lru_cache
def check_operations(template: str) -> None:
    """Raises ValueError if a template raises numbers to a power: 9 ** 9 ** 9 takes hours, and no time limit
    interrupts it."""
    from jinja2 import Environment, TemplateSyntaxError

    try:
        tokens = [token for token in Environment().lex(template) if token[1] != "whitespace"]
    except TemplateSyntaxError:
        return  # which rendering reports
    # After ( or , it is not a power: f(**options)
    pairs = zip(tokens, tokens[1:], strict=False)
    line = next((line for (_, _, preceding), (line, _, text) in pairs if text == "**" and preceding not in "(,"), None)
    if line is not None:
        raise ValueError(f"line {line}: ** is not allowed in chat templates, as it may take hours; multiply instead")


def render_limit() -> AbstractContextManager[None]:
    """Return a context manager that raises RenderTimeout if its block renders a template for longer than
    RENDER_SECONDS.

    The main thread is stopped by a timer signal, which costs nothing. Other threads, such as the server's,
    are stopped by a trace function, which makes rendering about five times slower. Neither interrupts a
    single operation of Python, so `check_operations` refuses powers.
    """
    is_main = threading.current_thread() is threading.main_thread()
    return _signal_limit(RENDER_SECONDS) if is_main else _trace_limit(RENDER_SECONDS)


@contextmanager
def _signal_limit(seconds: float) -> Iterator[None]:
    def on_alarm(number: int, frame: FrameType | None) -> None:
        raise RenderTimeout(seconds)

    previous_handler = signal.signal(signal.SIGALRM, on_alarm)
    started = time.monotonic()
    others_left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous_handler)
        if others_left:  # restart the timer that was set before; if it was due meanwhile it fires now
            signal.setitimer(signal.ITIMER_REAL, max(others_left - (time.monotonic() - started), 1e-6), interval)


@contextmanager
def _trace_limit(seconds: float) -> Iterator[None]:
    end = time.monotonic() + seconds

    def trace(frame: FrameType, event: str, value: Any) -> Any:
        if time.monotonic() > end:
            raise RenderTimeout(seconds)
        return trace if frame.f_code.co_filename == TEMPLATE else None

    previous_trace = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(previous_trace)
