"""What happened to a run beside its steps: starts, saves, steps left out, spikes of the loss, its end."""

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
# A spike is a loss so many standard deviations above the mean of the last ones, once some are known: the
# rule of skip_step_above_sigma, at its usual value.
SIGMA, WINDOW, LEAST = 6.0, 128, 32
_LARGEST = 1e100  # losses beyond have no square


@dataclass(frozen=True)
class Event:
    """What happened after `iteration` steps. when: local time as text, "" where no file says it."""

    iteration: int
    kind: Kind
    text: str
    when: str = ""


def events_of(run: Run) -> list[Event]:
    """All that the files of a run tell, in order of iterations."""
    found = [*_starts(run), *_saves(run), *_left_out(run), *_spikes(run.series.get("train/lm_loss")), *_end(run)]
    return sorted(found, key=lambda event: event.iteration)


def _starts(run: Run) -> Iterator[Event]:
    """From when the start of each row began; of older runs, whose rows do not say it, from the number of
    deepy.py's restart. A start whose rows were all cut, since a later one went on before them, has left
    none."""
    begun = run.series.get("runtime/start_time") or run.series.get("runtime/restarts")
    if begun is None:
        return
    restarts = dict(zip(*_columns(run.series.get("runtime/restarts")), strict=True))
    has_time, before, last = "runtime/start_time" in run.series, None, 0.0
    for iteration, value in zip(*_columns(begun), strict=True):
        if value != before:
            when = _local(value) if has_time else ""
            number = int(restarts.get(iteration, 0))
            how = f"restart {number} of deepy.py, " if number else "started again, " if before is not None else ""
            if before is None and last == 0 and not number:
                yield Event(0, "start", "first start", when)
            else:
                yield Event(int(last), "restart", f"{how}goes on after its row of iteration {int(last)}", when)
        before, last = value, iteration


def _columns(series: Series | None) -> tuple[list[float], list[float]]:
    return ([], []) if series is None else (series.iterations.tolist(), series.values.tolist())


def _saves(run: Run) -> Iterator[Event]:
    for checkpoint in run.checkpoints:
        loss = checkpoint.manifest.get("validation_loss")
        more = f", validation loss {loss:.4f}" if loss is not None else ""
        when = local_time(checkpoint.manifest.get("created"))
        yield Event(checkpoint.iteration, "save", f"global_step{checkpoint.iteration}{more}", when)


def _left_out(run: Run) -> Iterator[Event]:
    for name, kind, why in (
        ("train/skipped_steps", "skipped", "not finite"),
        ("train/untrained_steps", "skipped", "without a trained token"),
        ("train/spikes", "spike", "loss far above the recent ones (skip_step_above_sigma)"),
    ):
        for iteration, count in zip(*_columns(run.series.get(name)), strict=True):
            if count > 0:
                steps = "a step was" if count == 1 else f"{int(count)} steps were"
                yield Event(int(iteration), kind, f"{steps} left out: {why}")  # type: ignore[arg-type]


def _spikes(losses: Series | None) -> Iterator[Event]:
    """Losses that were trained on all the same. Means over the window are kept as sums: a run may have
    100,000 rows."""
    window: deque[float] = deque(maxlen=WINDOW)
    total = squares = 0.0
    for iteration, loss in zip(*_columns(losses), strict=True):
        if not abs(loss) < _LARGEST:  # NaN too
            continue
        if len(window) >= LEAST:
            mean = total / len(window)
            if loss > mean + SIGMA * math.sqrt(max(squares / len(window) - mean * mean, 0.0)):
                deviations = statistics.pstdev(window)  # once more without what sums have rounded
                if loss > statistics.fmean(window) + SIGMA * deviations:
                    yield Event(int(iteration), "spike", f"loss {loss:.4g}, {mean:.4g} on average before")
                    continue
        if len(window) == WINDOW:
            total, squares = total - window[0], squares - window[0] ** 2
        window.append(loss)
        total, squares = total + loss, squares + loss * loss


def _end(run: Run) -> Iterator[Event]:
    status = run.status.get("status")
    if status in ("finished", "stopped", "failed"):
        reason = f": {run.status['reason']}" if run.status.get("reason") else ""
        when = local_time(run.status.get("time"))
        yield Event(int(run.status.get("iteration") or 0), "stop", f"{status}{reason}", when)


def _local(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
