"""The line of a run in a terminal, its progress in validation, and how long it says it will take."""

import logging
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron.training.builtin_callbacks.log import LogCallback, status_text
from megatron.training.builtin_callbacks.validation import with_progress

ROW = {"train/lm_loss": 2.34567, "runtime/tokens_per_sec": 12345.6}


def test_a_step_is_told_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert status_text(ROW) == "loss 2.3457, 12,346 tokens/s"
    assert status_text({**ROW, "runtime/model_flops_utilization": 0.412}) == "loss 2.3457, 12,346 tokens/s, MFU 41%"
    monkeypatch.delenv("NO_COLOR")
    assert status_text(ROW) == "\x1b[32mloss 2.3457\x1b[0m, \x1b[34m12,346 tokens/s\x1b[0m"


def test_validation_tells_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 30))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    progress: list[tuple[float, str]] = []
    calls: list[int] = []
    look = with_progress(lambda: calls.append(1), 4, lambda share, left: progress.append((share, left)))
    for _ in range(6):  # more often than was said
        look()
    assert progress == [(0.25, "01:30"), (0.5, "01:00"), (0.75, "00:30"), (1.0, "00:00"), (1.0, "00:00")]
    assert len(calls) == 6


@pytest.mark.parametrize(("start", "seconds", "days"), [(0, 2.0, "23.1"), (500, 2.0, "23.1"), (0, 0.05, None)])
def test_a_run_of_days_says_so_once(caplog: pytest.LogCaptureFixture, start: int, seconds: float,
                                    days: str | None) -> None:  # fmt: skip
    args = SimpleNamespace(train_iters=start + 1_000_000)
    training = SimpleNamespace(args=args, iteration=start, logger=logging.getLogger("days"))
    log = LogCallback(cast(Any, training))
    with caplog.at_level(logging.INFO):
        for iteration in range(start + 1, start + 30):
            log._tell_days(iteration, seconds)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (days is not None) and all(f"{days} more days" in line for line in lines)
