"""The state that the training loop and its callbacks share between two steps."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tqdm import tqdm


class Stopwatch:
    """Wall-clock seconds of training, without what runs under `pause` (validation, saving)."""

    def __init__(self) -> None:
        self._lap_start = time.perf_counter()
        self._paused = False

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Stops the clock in a `with` block; may be nested."""
        if self._paused:
            yield
            return
        pause_start, self._paused = time.perf_counter(), True
        try:
            yield
        finally:
            self._lap_start += time.perf_counter() - pause_start
            self._paused = False

    def lap(self) -> float:
        """Returns the seconds since the last lap."""
        now = time.perf_counter()
        seconds, self._lap_start = now - self._lap_start, now
        return seconds


@dataclass
class LoopState:
    """The state of a training loop besides its progress.

    stop_reason: why the run ends after this step; None while it continues.
    save_is_due: a checkpoint is due by the clock or by request.
    stop_request, save_request: requests by callbacks of this rank, until all ranks know of them.
    stop_signal: number of a stop signal that some rank has received and all ranks know of; 0: none.
    gave_up: because of that signal, work that belongs to this step was skipped.
    look_for_stop, agree_on_stop: methods of `StopCallback`, for long work.
    settle: waits for the step's result and writes its log line.
    ending: (status, reason) of a run that did not fail, once it is over.
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
