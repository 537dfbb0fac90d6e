"""Reads the measurements of a stage for its gate: metrics.jsonl of its run, and the scores of its
evaluation."""

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
from megatron.process.score_files import score_rows

SCORES = "scores.json"
_TASK_PREFIX = "eval_tasks/"


class MissingError(Exception):
    """Raised if a gate cannot judge a metric. The message gives the cause.

    The metric was never logged, was measured on older weights, or does not fit the requirement."""


@dataclass(frozen=True)
class Measured:
    """The measured value of a metric, with its standard error.

    stderr: standard error; None if unknown.
    window: `first` and `last` iteration and number (`rows`) of the rows from which the value was computed;
        None for a score of an evaluation.
    """

    value: float
    stderr: float | None = None
    window: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Measurements:
    """The logged metrics and the evaluation scores of one run.

    rows: rows of metrics.jsonl, one per iteration, in order.
    scores: eval.py's scores by `eval_tasks/<task>_<metric>`, and their standard errors by
        `eval_tasks/<task>_<metric>_stderr`.
    iteration: iteration at which the judged weights were saved; None: that of the last row.
    """

    rows: Sequence[Mapping[str, Any]] = ()
    scores: Mapping[str, float] = field(default_factory=dict)
    iteration: int | None = None

    def measure(self, metric: str, window: int | float | None = None, aggregate: str = "mean") -> Measured:
        """Returns the last value of a metric, or its values in a window of last steps combined into one.

        window: number of steps (int), or a share of the run between 0 and 1 (float); None: the last value.
        aggregate: mean, min, max or last. Only mean has a standard error, computed as if the rows were
            independent.

        Raises MissingError if the metric is missing, or the run is shorter than the window.
        """
        if metric in self.scores:
            if window is not None:
                raise MissingError(
                    f"{metric} is a score of the evaluation, a single value; remove window from the gate"
                )
            return Measured(self.scores[metric], self.scores.get(f"{metric}_stderr"))
        if not any(metric in row for row in self.rows):
            raise MissingError(f"no metric {metric} was logged or evaluated; {_nearest(metric, self.names())}")
        rows, last = self._rows_of_kind(metric)
        if window is None:
            iteration = rows[-1]["iteration"]
            self._need(metric, rows[-1:])
            error = self._logged_error(metric, iteration)
            return Measured(_number(rows[-1][metric]), error, {"first": iteration, "last": iteration, "rows": 1})
        steps = max(1, math.ceil(round(window * last, 6))) if isinstance(window, float) else window
        if steps > last:
            raise MissingError(f"{metric}: the window is {steps} steps, but the run has only {last} steps")
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
        """Returns (rows with metrics of the same prefix, such as train/, as `metric`; iteration of the
        weights).

        Raises MissingError if the last of these rows was measured before the weights were saved, so on other
        weights. Training metrics are logged every few steps, so they may be older by less than that interval.
        """
        kind = metric.partition("/")[0] + "/" if "/" in metric else ""
        rows = [row for row in self.rows if any(name.startswith(kind) for name in row)]
        last = self.iteration if self.iteration is not None else self.rows[-1]["iteration"]
        newest = rows[-1]["iteration"]
        # Training metrics are logged only every few steps; validation always also runs after the last step.
        spacing = newest - rows[-2]["iteration"] if len(rows) > 1 else newest
        if last - newest >= (max(1, spacing) if kind in ("train/", "") else 1):
            raise MissingError(
                f"{kind or 'other '}metrics were last logged at iteration {newest}, but the weights are of iteration "
                f"{last}; log or evaluate {metric} at the last iteration"
            )
        return rows, last

    def _need(self, metric: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Raises MissingError if one of the rows lacks the metric. Training may leave NaN out of a row."""
        missing = [row["iteration"] for row in rows if metric not in row]
        if missing:
            raise MissingError(
                f"{metric} has no value at iteration {missing[-1]}: it was not measured then, or was NaN"
            )

    def _logged_error(self, metric: str, iteration: int) -> float | None:
        """Returns the standard error that was logged with an `eval_tasks` score at this iteration; None
        without."""
        if not metric.startswith(_TASK_PREFIX):
            return None
        errors = [row.get(f"{metric}_stderr") for row in self.rows if row["iteration"] == iteration]
        return _number(errors[-1]) if errors and errors[-1] is not None else None

    def names(self) -> set[str]:
        """Returns the names of all logged metrics that are numbers, and of all evaluation scores."""
        return {name for row in self.rows for name, value in row.items() if _is_number(value)} | set(self.scores)


def read_measurements(logs: Path, scores: Path | None = None, iteration: int | None = None) -> Measurements:
    """Reads the metrics in a log folder and the scores of an evaluation.

    scores: file with the scores; None: no evaluation.
    iteration: iteration at which the weights were saved; later rows are left out. None: use all rows.

    Raises PipelineError if the file with the scores cannot be read.
    """
    rows_by_step: dict[int, dict[str, Any]] = {}
    file = logs / METRICS_FILE
    if file.is_file():
        # `read_metrics` drops values that are no numbers, so a gate finds them missing. The rows of a step
        # that was logged twice, before and after a restart, are merged.
        for row in read_metrics(file, Problems()):
            rows_by_step[row["iteration"]] = {**rows_by_step.get(row["iteration"], {}), **row}
    score_values: dict[str, float] = {}
    if scores is not None and scores.is_file():
        try:
            score_values = {name: float(value) for name, value in map_of(number)(read_object(scores)).items()}
        except (OSError, ValueError, Unfit) as problem:
            raise PipelineError(
                f"{scores}: the evaluation's scores cannot be read ({problem}); remove the file, and run `resume` to "
                "evaluate again"
            ) from None
    steps = sorted(step for step in rows_by_step if iteration is None or step <= iteration)
    return Measurements(tuple(rows_by_step[step] for step in steps), score_values, iteration)


def scores_of_results(file: Path) -> dict[str, float]:
    """Returns the scores in a result file of eval.py by `eval_tasks/<task>_<metric>`, the name in
    metrics.jsonl.

    For results of an lm-eval filter other than `none`, `_<filter>` is appended. Standard errors end in
    _stderr.
    """
    scores = {}
    for row in score_rows(read_object(file)):
        scores[_TASK_PREFIX + row.name] = row.value
        if row.stderr is not None:
            scores[f"{_TASK_PREFIX}{row.name}_stderr"] = row.stderr
    return scores


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any) -> float:
    """Returns a logged value as a float. A value that is no number, such as null, becomes NaN, which fails a
    gate."""
    return float(value) if _is_number(value) else math.nan


def _nearest(metric: str, names: set[str]) -> str:
    close = difflib.get_close_matches(metric, sorted(names), 3, 0.5)
    return f"nearest: {', '.join(close)}" if close else f"there are {len(names)} metrics" if names else "no metrics yet"
