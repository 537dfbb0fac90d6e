"""What is known of a stage's result: the rows of its metrics.jsonl, and the scores of its evaluation."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.pipelines.errors import PipelineError
from megatron.process.metrics_file import METRICS_FILE, read_metrics
from megatron.process.run_files import Problems, Unfit, each, number, read_object

SCORES = "scores.json"
_OF_TASKS = "eval_tasks/"


class MissingError(Exception):
    """A metric that is not there; the message says what is instead."""


@dataclass(frozen=True)
class Measured:
    """A value, its standard error where there is one, and the window that it was made of: first and last
    iteration, number of rows."""

    value: float
    stderr: float | None = None
    window: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Measurements:
    """iteration: of the weights; None: of the newest row. rows: of metrics.jsonl, in order of their steps.
    scores: of eval.py, by `eval_tasks/<task>_<metric>`, and standard errors by
    `eval_tasks/<task>_<metric>_stderr`."""

    rows: Sequence[Mapping[str, Any]] = ()
    scores: Mapping[str, float] = field(default_factory=dict)
    iteration: int | None = None

    def measure(self, metric: str, window: int | float | None = None, aggregate: str = "mean") -> Measured:
        """The value of a metric: the last one, or what those of a window become.

        window: last steps, as an int, or as a share of the run's steps between 0 and 1. The standard error of
        a window's mean is that of its rows, taken for independent. Raises MissingError for a metric that is
        not there, and for a run that is shorter than the window."""
        if metric in self.scores:
            if window is not None:
                raise MissingError(f"{metric} is a score of the result, which has no window")
            return Measured(self.scores[metric], self.scores.get(f"{metric}_stderr"))
        if not any(metric in row for row in self.rows):
            raise MissingError(f"there is no {metric}; {_nearest(metric, self.names())}")
        rows, last = self._rows_beside(metric)
        if window is None:
            iteration = rows[-1]["iteration"]
            self._need(metric, rows[-1:])
            error = self.rows_error(metric, iteration)
            return Measured(_number(rows[-1][metric]), error, {"first": iteration, "last": iteration, "rows": 1})
        steps = max(1, math.ceil(round(window * last, 6))) if isinstance(window, float) else window
        if steps > last:
            raise MissingError(f"{metric}: the window is {steps} steps, the run has {last}")
        inside = [row for row in rows if row["iteration"] > last - steps]
        if not inside:
            raise MissingError(f"{metric} was not logged in the last {steps} steps")
        self._need(metric, inside)
        values = [(row["iteration"], _number(row[metric])) for row in inside]
        numbers = [value for _, value in values]
        error = None
        if aggregate == "mean" and len(numbers) > 1:
            error = statistics.stdev(numbers) / math.sqrt(len(numbers)) if _finite(numbers) else math.nan
        made = {"mean": _mean, "min": _least, "max": _most, "last": lambda all_of_them: all_of_them[-1]}[aggregate]
        seen = {
            "first": values[0][0],
            "last": values[-1][0],
            "rows": len(values),
            "steps": steps,
            "aggregate": aggregate,
        }
        return Measured(made(numbers), error, seen)

    def _rows_beside(self, metric: str) -> tuple[list[Mapping[str, Any]], int]:
        """The rows that have metrics of its kind (train/, validation/), and the iteration of the weights.

        Raises MissingError where the newest of them is older than the weights: what is known is of others.
        """
        kind = metric.partition("/")[0] + "/" if "/" in metric else ""
        rows = [row for row in self.rows if any(name.startswith(kind) for name in row)]
        last = self.iteration if self.iteration is not None else self.rows[-1]["iteration"]
        newest = rows[-1]["iteration"]
        # Training is logged every so many steps, validation is done after the last one too.
        spacing = newest - rows[-2]["iteration"] if len(rows) > 1 else newest
        if last - newest >= (max(1, spacing) if kind in ("train/", "") else 1):
            raise MissingError(f"{metric} was measured at iteration {newest} the last time, the weights are of {last}")
        return rows, last

    def _need(self, metric: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Raises MissingError where one of the rows has not the metric: training leaves out what was NaN."""
        without = [row["iteration"] for row in rows if metric not in row]
        if without:
            raise MissingError(f"{metric} is not in the row of iteration {without[-1]}: not measured then, or NaN")

    def rows_error(self, metric: str, iteration: int) -> float | None:
        """The standard error that a task's score has in the row of its iteration."""
        if not metric.startswith(_OF_TASKS):
            return None
        found = [row.get(f"{metric}_stderr") for row in self.rows if row["iteration"] == iteration]
        return _number(found[-1]) if found and found[-1] is not None else None

    def names(self) -> set[str]:
        """The names of all metrics and scores that are known."""
        return {name for row in self.rows for name, value in row.items() if _is_number(value)} | set(self.scores)


def read_measurements(logs: Path, scores: Path | None = None, iteration: int | None = None) -> Measurements:
    """The measurements of a run that logs into a folder; scores: the file of its result's scores.
    iteration: of the weights.

    Raises PipelineError for a file of scores that cannot be read.
    """
    by_step: dict[int, dict[str, Any]] = {}
    file = logs / METRICS_FILE
    if file.is_file():
        # A value that is no number is dropped: a gate on it finds it missing. A step that was logged twice,
        # before and after a restart, counts once.
        for row in read_metrics(file, Problems()):
            by_step[row["iteration"]] = {**by_step.get(row["iteration"], {}), **row}
    found: dict[str, float] = {}
    if scores is not None and scores.is_file():
        try:
            found = {name: float(value) for name, value in each(number)(read_object(scores)).items()}
        except (OSError, ValueError, Unfit) as problem:
            raise PipelineError(
                f"{scores}: cannot be read ({problem}); remove it, and resume evaluates again"
            ) from None
    steps = sorted(step for step in by_step if iteration is None or step <= iteration)
    return Measurements(tuple(by_step[step] for step in steps), found, iteration)


def scores_of_results(file: Path) -> dict[str, float]:
    """The scores in a file of eval.py, as a run's metrics name them: `eval_tasks/<task>_<metric>`, with the
    filter behind it unless it is lm-eval's `none`."""
    scores = {}
    for task, values in read_object(file).get("results", {}).items():
        for name, value in values.items():
            metric, comma, kind = name.partition(",")
            if comma and _is_number(value):
                metric, error = metric.removesuffix("_stderr"), "_stderr" if metric.endswith("_stderr") else ""
                scores[f"{_OF_TASKS}{task}_{metric}" + ("" if kind == "none" else f"_{kind}") + error] = float(value)
    return scores


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any) -> float:
    """A logged value; what is there and no number (null) counts as NaN, which passes no gate."""
    return float(value) if _is_number(value) else math.nan


def _finite(values: Sequence[float]) -> bool:
    return all(map(math.isfinite, values))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if _finite(values) else math.nan


def _least(values: Sequence[float]) -> float:
    return min(values) if not any(map(math.isnan, values)) else math.nan


def _most(values: Sequence[float]) -> float:
    return max(values) if not any(map(math.isnan, values)) else math.nan


def _nearest(metric: str, names: set[str]) -> str:
    import difflib

    close = difflib.get_close_matches(metric, sorted(names), 3, 0.5)
    return (
        f"nearest: {', '.join(close)}" if close else f"there are {len(names)} metrics" if names else "nothing is known"
    )
