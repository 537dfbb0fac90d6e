"""How far a command is: a bar on a terminal, now and then a line elsewhere."""

import logging
import sys
import time
from typing import Self

from tqdm import tqdm

_SECONDS_A_LINE = 10.0


class ProgressBar:
    """Counts to `total` of `unit`; only rank 0 (`shown`) says so."""

    def __init__(self, what: str, total: int, unit: str, logger: logging.Logger, *, done: int = 0, shown: bool) -> None:
        self.what, self.total, self.unit, self.logger = what, total, unit, logger
        self.first = self.done = done
        self.begun = self.said = time.perf_counter()
        self.on_terminal = shown and sys.stderr.isatty()
        self.bar = tqdm(
            total=total, initial=done, desc=what, unit=unit, file=sys.stderr, disable=not self.on_terminal,
            dynamic_ncols=True,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.bar.close()

    def to_share(self, before: int, count: int, share: float) -> None:
        """Move to where `before` units and this share (0 to 1) of the `count` after them are done."""
        self.to(before + int(count * share))

    def to(self, done: int) -> None:
        """So many are done."""
        self.bar.update(done - self.done)
        self.done, now = done, time.perf_counter()
        if not self.on_terminal and now - self.said > _SECONDS_A_LINE:
            self.said = now
            self.logger.info(self.line((done - self.first) / (now - self.begun)))

    def line(self, speed: float) -> str:
        """Without a terminal. speed: in units a second."""
        share = 100 * self.done // max(1, self.total)
        return f"{self.what}: {share:3d}%| {self.done} of {self.total} {self.unit}s, {speed:.1f} a second"
