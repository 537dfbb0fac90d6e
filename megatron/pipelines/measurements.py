"""Reads the measurements of a stage's result: its metrics.jsonl and the scores of its evaluation."""

import difflib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.pipelines.errors import PipelineError
from megatron.process.metrics_file import METRICS_FILE, read_metrics
from megatron.process.run_files import Problems, Unfit, map_of, number, read_object

SCORES = "scores.json"
_TASK_PREFIX = "eval_tasks/"


class MissingError(Exception):
    """Raised if a gate cannot judge a metric: it was never logged, is older than the weights, or does not fit
    the requirement. The message gives the cause."""


@dataclass(frozen=True)
class Measured:
    """A measured value.

    stderr: its standard error; None if unknown.
    window: the rows it was computed from (first and last iteration, number of rows); None for a score of an
        evaluation.
    """

    value: float
    stderr: float | None = None
    window: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Measurements:
    """The logged metrics and the evaluation scores of one run.

    rows: rows of metrics.jsonl in order of their iterations.
    scores: eval.py's scores by `eval_tasks/<task>_<metric>`, and their standard errors by
        `eval_tasks/<task>_<metric>_stderr`.
    iteration: the iteration of the weights; None: that of the last row.
    """

    rows: Sequence[Mapping[str, Any]] = ()
    scores: Mapping[str, float] = field(default_factory=dict)
    iteration: int | None = None

    def measure(self, metric: str, window: int | float | None = None, aggregate: str = "mean") -> Measured:
        """Returns the last value of a metric, or an aggregate of its values in a window.

        window: how many of the last steps: a number (int), or a share of the run between 0 and 1 (float).
            None: the last value alone.
        aggregate: mean, min, max or last. Of these only the mean has a standard error, which takes the rows
            as independent.

        Raises MissingError if the metric is missing, or the run is shorter than the window.
        """
        if metric in self.scores:
            if window is not None:
                raise MissingError(f"{metric} is a score of the evaluation, a single value; remove window")
            return Measured(self.scores[metric], self.scores.get(f"{metric}_stderr"))
        if not any(metric in row for row in self.rows):
            raise MissingError(f"there is no metric {metric}; {_nearest(metric, self.names())}")
        rows, last = self._rows_of_kind(metric)
        if window is None:
            iteration = rows[-1]["iteration"]
            self._need(metric, rows[-1:])
            error = self._logged_error(metric, iteration)
            return Measured(_number(rows[-1][metric]), error, {"first": iteration, "last": iteration, "rows": 1})
        steps = max(1, math.ceil(round(window * last, 6))) if isinstance(window, float) else window
        if steps > last:
            raise MissingError(f"{metric}: the window is {steps} steps, but the run has only {last}")
        window_rows = [row for row in rows if row["iteration"] > last - steps]
        if not window_rows:
            raise MissingError(f"{metric} was not logged in the last {steps} steps")
        self._need(metric, window_rows)
        numbers = [_number(row[metric]) for row in window_rows]
        is_finite, has_nan = all(map(math.isfinite, numbers)), any(map(math.isnan, numbers))
        value, error = numbers[-1], None
        if aggregate == "mean":
            value = statistics.fmean(numbers) if is_finite else math.nan
            if len(numbers) > 1:
                error = statistics.stdev(numbers) / math.sqrt(len(numbers)) if is_finite else math.nan
        elif aggregate != "last":
            value = {"min": min, "max": max}[aggregate](numbers) if not has_nan else math.nan
        used_window = {
            "first": window_rows[0]["iteration"], "last": window_rows[-1]["iteration"], "rows": len(numbers),
            "steps": steps, "aggregate": aggregate,
        }  # fmt: skip
        return Measured(value, error, used_window)

    def _rows_of_kind(self, metric: str) -> tuple[list[Mapping[str, Any]], int]:
        """Returns the rows that have metrics with the prefix of `metric` (train/, validation/), and the
        iteration of the weights.

        Raises MissingError if the last of these rows is older than the weights, because it measures other
        weights. Training metrics are logged every few steps, so they may be older by less than that interval.
        """
        kind = metric.partition("/")[0] + "/" if "/" in metric else ""
        rows = [row for row in self.rows if any(name.startswith(kind) for name in row)]
        last = self.iteration if self.iteration is not None else self.rows[-1]["iteration"]
        newest = rows[-1]["iteration"]
        # Training is logged every so many steps, validation is done after the last one too.
        spacing = newest - rows[-2]["iteration"] if len(rows) > 1 else newest
        if last - newest >= (max(1, spacing) if kind in ("train/", "") else 1):
            raise MissingError(f"{metric} was last measured at iteration {newest}; the weights are of iteration {last}")
        return rows, last

    def _need(self, metric: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Raises MissingError if a row lacks the metric. Training leaves NaN out of its rows."""
        missing = [row["iteration"] for row in rows if metric not in row]
        if missing:
            raise MissingError(f"{metric} has no value at iteration {missing[-1]}: not measured then, or NaN")

    def _logged_error(self, metric: str, iteration: int) -> float | None:
        """Returns the standard error that was logged with a task's score at this iteration; None if there is
        none."""
        if not metric.startswith(_TASK_PREFIX):
            return None
        errors = [row.get(f"{metric}_stderr") for row in self.rows if row["iteration"] == iteration]
        return _number(errors[-1]) if errors and errors[-1] is not None else None

    def names(self) -> set[str]:
        """Returns the names of all metrics and scores."""
        return {name for row in self.rows for name, value in row.items() if _is_number(value)} | set(self.scores)


def read_measurements(logs: Path, scores: Path | None = None, iteration: int | None = None) -> Measurements:
    """Returns the metrics in a log folder and the scores of an evaluation.

    scores: the file of scores; None: no evaluation.
    iteration: the iteration of the weights; later rows are left out.

    Raises PipelineError if the file of scores cannot be read.
    """
    rows_by_step: dict[int, dict[str, Any]] = {}
    file = logs / METRICS_FILE
    if file.is_file():
        # A value that is no number is dropped: a gate on it finds it missing. A step that was logged twice,
        # before and after a restart, counts once.
        for row in read_metrics(file, Problems()):
            rows_by_step[row["iteration"]] = {**rows_by_step.get(row["iteration"], {}), **row}
    score_values: dict[str, float] = {}
    if scores is not None and scores.is_file():
        try:
            score_values = {name: float(value) for name, value in map_of(number)(read_object(scores)).items()}
        except (OSError, ValueError, Unfit) as problem:
            raise PipelineError(
                f"{scores}: cannot be read ({problem}); remove it; `resume` then evaluates again"
            ) from None
    steps = sorted(step for step in rows_by_step if iteration is None or step <= iteration)
    return Measurements(tuple(rows_by_step[step] for step in steps), score_values, iteration)


def scores_of_results(file: Path) -> dict[str, float]:
    """Returns the scores in a result file of eval.py, by the name `eval_tasks/<task>_<metric>` that training
    uses too.

    If lm-eval applied a filter (other than `none`), its name is appended.
    """
    scores = {}
    for task, values in read_object(file).get("results", {}).items():
        for name, value in values.items():
            metric, comma, kind = name.partition(",")
            if comma and _is_number(value):
                metric, error = metric.removesuffix("_stderr"), "_stderr" if metric.endswith("_stderr") else ""
                scores[f"{_TASK_PREFIX}{task}_{metric}" + ("" if kind == "none" else f"_{kind}") + error] = float(value)
    return scores


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any) -> float:
    """Returns a logged value as a float. null, or another value that is no number, becomes NaN, which passes
    no gate."""
    return float(value) if _is_number(value) else math.nan


def _nearest(metric: str, names: set[str]) -> str:
    close = difflib.get_close_matches(metric, sorted(names), 3, 0.5)
    return f"nearest: {', '.join(close)}" if close else f"there are {len(names)} metrics" if names else "no metrics yet"
