"""Derives the events of a run from its files: starts, saves, skipped steps, loss spikes, its end."""

import math
import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.operations.report.facts import local_time
from megatron.operations.report.run_data import Run, Series

Kind = Literal["start", "restart", "save", "spike", "skipped", "stop"]
# A spike is a loss more than SIGMA standard deviations above the mean of the last WINDOW losses, once there
# are MIN_LOSSES losses: the rule of skip_step_above_sigma, at its usual value.
SIGMA, WINDOW, MIN_LOSSES = 6.0, 128, 32
_LARGEST = 1e100  # the squares of larger losses could overflow


@dataclass(frozen=True)
class Event:
    """An event in a run, after `iteration` steps.

    text: its description. timestamp: local time as text; "" if no file has it."""

    iteration: int
    kind: Kind
    text: str
    timestamp: str = ""


def events_of(run: Run) -> list[Event]:
    """Returns all events found in the files of a run, sorted by iteration."""
    events = [*_starts(run), *_saves(run), *_skipped_steps(run), *_spikes(run.series.get("train/lm_loss")), *_end(run)]
    return sorted(events, key=lambda event: event.iteration)


def _starts(run: Run) -> Iterator[Event]:
    """Yields an event for each start of a run that its metrics show.

    A start is seen by a new start time in the rows of metrics.jsonl; in older runs by a new restart number of
    deepy.py. A start is not seen if a later start resumed before it, because that removed its rows.
    """
    start_values = run.series.get("runtime/start_time") or run.series.get("runtime/restarts")
    if start_values is None:
        return
    restarts = dict(zip(*_columns(run.series.get("runtime/restarts")), strict=True))
    has_time, previous, last_iteration = "runtime/start_time" in run.series, None, 0.0
    for iteration, value in zip(*_columns(start_values), strict=True):
        if value != previous:
            timestamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value)) if has_time else ""
            number = int(restarts.get(iteration, 0))
            cause = f"restart {number} of deepy.py, " if number else "started again, " if previous is not None else ""
            if previous is None and last_iteration == 0 and not number:
                yield Event(0, "start", "first start", timestamp)
            else:
                text = f"{cause}continues after the logged iteration {int(last_iteration)}"
                yield Event(int(last_iteration), "restart", text, timestamp)
        previous, last_iteration = value, iteration


def _columns(series: Series | None) -> tuple[list[float], list[float]]:
    return ([], []) if series is None else (series.iterations.tolist(), series.values.tolist())


def _saves(run: Run) -> Iterator[Event]:
    for checkpoint in run.checkpoints:
        loss = checkpoint.manifest.get("validation_loss")
        loss_text = f", validation loss {loss:.4f}" if loss is not None else ""
        timestamp = local_time(checkpoint.manifest.get("created"))
        yield Event(checkpoint.iteration, "save", f"global_step{checkpoint.iteration}{loss_text}", timestamp)


def _skipped_steps(run: Run) -> Iterator[Event]:
    for name, kind, reason in (
        ("train/skipped_steps", "skipped", "loss or gradients not finite"),
        ("train/untrained_steps", "skipped", "no token to train on"),
        ("train/spikes", "spike", "loss far above the recent ones (skip_step_above_sigma)"),
    ):
        for iteration, count in zip(*_columns(run.series.get(name)), strict=True):
            if count > 0:
                steps = "a step was" if count == 1 else f"{int(count)} steps were"
                yield Event(int(iteration), kind, f"{steps} skipped: {reason}")  # type: ignore[arg-type]


def _spikes(losses: Series | None) -> Iterator[Event]:
    """Yields an event for each step whose loss was far above the recent losses, but which was not skipped.

    Running sums give mean and deviation of the window in constant time, because a run may have 100,000
    rows."""
    window: deque[float] = deque(maxlen=WINDOW)
    total = squares = 0.0
    for iteration, loss in zip(*_columns(losses), strict=True):
        if not abs(loss) < _LARGEST:  # NaN too
            continue
        if len(window) >= MIN_LOSSES:
            mean = total / len(window)
            if loss > mean + SIGMA * math.sqrt(max(squares / len(window) - mean * mean, 0.0)):
                deviations = statistics.pstdev(
                    window
                )  # computed again, without the rounding errors of the running sums
                if loss > statistics.fmean(window) + SIGMA * deviations:
                    yield Event(int(iteration), "spike", f"loss {loss:.4g}; mean of the recent losses {mean:.4g}")
                    continue
        if len(window) == WINDOW:
            total, squares = total - window[0], squares - window[0] ** 2
        window.append(loss)
        total, squares = total + loss, squares + loss * loss


def _end(run: Run) -> Iterator[Event]:
    status = run.status.get("status")
    if status in ("finished", "stopped", "failed"):
        reason = f": {run.status['reason']}" if run.status.get("reason") else ""
        timestamp = local_time(run.status.get("time"))
        yield Event(int(run.status.get("iteration") or 0), "stop", f"{status}{reason}", timestamp)
