"""How far a command is: a bar on a terminal, a line in the log every ten seconds elsewhere."""

import logging
import sys
import time
from typing import Self

from tqdm import tqdm

_LOG_INTERVAL_S = 10.0


class ProgressBar:
    """Progress towards `total` units of work, `unit` being the word for one. Only rank 0 (`shown`) has a bar.
    A context manager."""

    def __init__(self, what: str, total: int, unit: str, logger: logging.Logger, *, done: int = 0, shown: bool) -> None:
        self.what, self.total, self.unit, self.logger = what, total, unit, logger
        self.first = self.done = done
        self.start_time = self.last_log_time = time.perf_counter()
        self.on_terminal = shown and sys.stderr.isatty()
        self.bar = tqdm(
            total=total, initial=done, desc=what, unit=unit, file=sys.stderr, disable=not self.on_terminal,
            dynamic_ncols=True,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.close()

    def advance_to_share(self, before: int, count: int, share: float) -> None:
        """Advance to where `before` units and this share (0 to 1) of the `count` after them are done."""
        self.advance_to(before + int(count * share))

    def advance_to(self, done: int) -> None:
        """Say that `done` units are done in all."""
        self.bar.update(done - self.done)
        self.done, now = done, time.perf_counter()
        if not self.on_terminal and now - self.last_log_time > _LOG_INTERVAL_S:
            self.last_log_time = now
            self.logger.info(self.line((done - self.first) / (now - self.start_time)))

    def line(self, speed: float) -> str:
        """The line for the log. speed: in units a second."""
        share = 100 * self.done // max(1, self.total)
        return f"{self.what}: {share:3d}%| {self.done} of {self.total} {self.unit}s, {speed:.1f} a second"
