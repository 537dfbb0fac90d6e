"""Shows the progress of an evaluation: a bar on a terminal, elsewhere a log line every half minute."""

from __future__ import annotations

import logging
import sys
import threading
import time

from tqdm import tqdm

DESCRIPTION = "Running evaluation harness"  # GPT-NeoX logs these words
LOG_INTERVAL_S = 30.0


class EvaluationProgress:
    """Counts finished and expected requests, and shows them in a bar or in log lines.

    It is a context manager, used by the thread that runs lm-eval.
    """

    def __init__(self, logger: logging.Logger, interval_s: float = LOG_INTERVAL_S) -> None:
        self._logger, self._interval_s = logger, interval_s
        self._total = self._done = 0
        self._start_time = time.perf_counter()
        self._bar: tqdm | None = None
        if sys.stderr.isatty():
            self._bar = tqdm(total=0, desc=DESCRIPTION, unit="request", file=sys.stderr, dynamic_ncols=True, position=0)
        self._closed = threading.Event()

    def __enter__(self) -> EvaluationProgress:
        if self._bar is None:
            threading.Thread(target=self._log_periodically, name="progress", daemon=True).start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._closed.set()
        if self._bar is not None:
            self._bar.close()
        elif problem[0] is None and self._total:
            self._log()

    def expect(self, requests: int) -> None:
        """Adds `requests` to the number of expected requests."""
        self._total += requests
        if self._bar is not None:
            self._bar.total = self._total
            self._bar.refresh()

    def update(self, requests: int) -> None:
        """Adds `requests` to the number of finished requests."""
        self._done += requests
        if self._bar is not None:
            self._bar.update(requests)

    def line(self) -> str:
        """Returns the progress as a line such as ` 45%|####5     | 450/1000 [00:30<00:36,
        15.00request/s]`."""
        seconds = time.perf_counter() - self._start_time
        return tqdm.format_meter(
            self._done, max(self._total, 1), seconds, ncols=100, prefix=DESCRIPTION, ascii=True, unit="request"
        )

    def _log(self) -> None:
        self._logger.info(self.line())

    def _log_periodically(self) -> None:
        while not self._closed.wait(self._interval_s):
            self._log()
