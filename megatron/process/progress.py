"""Shows the progress of long work: a bar on a terminal, elsewhere a log line every ten seconds."""

import logging
import sys
import time
from typing import Self

from tqdm import tqdm

_LOG_INTERVAL_S = 10.0


class ProgressBar:
    """Shows progress towards `total` units: a bar on a terminal, elsewhere a log line every ten seconds.

    It is a context manager.

    unit: name of the unit in the singular, such as "token", or "MB".
    done: number of units that are already finished at the start.
    visible: whether this rank may draw a bar.
    transient: the bar disappears at the end, and work of less than a second shows none.
    """

    def __init__(
        self,
        description: str,
        total: int,
        unit: str,
        logger: logging.Logger,
        *,
        done: int = 0,
        visible: bool,
        transient: bool = False,
    ) -> None:
        self.description, self.total, self.unit, self.logger = description, total, unit, logger
        self.initial = self.done = done
        self.start_time = self.last_log_time = time.perf_counter()
        self.on_terminal = visible and sys.stderr.isatty()
        self.bar = tqdm(
            total=total, initial=done, desc=description, unit=unit, file=sys.stderr, disable=not self.on_terminal,
            dynamic_ncols=True, leave=not transient, delay=1.0 if transient else 0.0,
            position=0,  # a training run that waits for this has its status line there
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.close()

    def advance_to_share(self, done_before: int, count: int, share: float) -> None:
        """Sets the number of finished units to `done_before` plus a `share` (0 to 1) of the `count` units
        that follow."""
        self.advance_to(done_before + int(count * share))

    def advance_to(self, done: int) -> None:
        """Sets the number of finished units to `done`."""
        self.bar.update(done - self.done)
        self.done, now = done, time.perf_counter()
        if not self.on_terminal and now - self.last_log_time > _LOG_INTERVAL_S:
            self.last_log_time = now
            self.logger.info(self.line((done - self.initial) / (now - self.start_time)))

    def line(self, speed: float) -> str:
        """Returns the progress as a line for the log. speed: units per second."""
        share = 100 * self.done // max(1, self.total)
        units = self.unit if self.unit == "MB" else f"{self.unit}s"
        left = tqdm.format_interval((self.total - self.done) / speed) if speed else "?"
        return (
            f"{self.description}: {share:3d}%| {self.done} of {self.total} {units}, {speed:.1f} a second, {left} left"
        )
