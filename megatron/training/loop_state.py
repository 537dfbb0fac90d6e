"""What the training loop and its callbacks tell each other between two steps."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tqdm import tqdm


class Stopwatch:
    """Wall-clock seconds of training, without what runs under `pause` (validation, saving)."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._paused = False

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time in here is not counted; may be nested."""
        if self._paused:
            yield
            return
        begun, self._paused = time.perf_counter(), True
        try:
            yield
        finally:
            self._since += time.perf_counter() - begun
            self._paused = False

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        return seconds


@dataclass
class LoopState:
    """The state of a loop beside its progress.

    stop_reason: why the run ends after this step, None while it goes on; save_is_due: a checkpoint is due by
    the clock or was asked for; stop_request, save_request: what a callback of this rank has asked for, until
    all ranks know of it; stop_signal: the signal that all ranks know to have come to one of them, 0 while
    there is none; gave_up: for it something that belongs to this step was left out; look_for_stop,
    agree_on_stop: `StopCallback`'s, for what takes long; settle: waits for the step's result and writes its
    log line; ending: (status, reason) of a run that did not fail, once it is over.
    """

    stop_reason: str | None = None
    save_is_due: bool = False
    stop_request: str | None = None
    save_request: bool = False
    stop_signal: int = 0
    gave_up: bool = False
    look_for_stop: Callable[[], None] = lambda: None
    agree_on_stop: Callable[[], None] = lambda: None
    settle: Callable[[], None] = lambda: None
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    bar: tqdm = field(default_factory=lambda: tqdm(disable=True))
    ending: tuple[str, str | None] | None = None
