"""Reads the curves of several runs at common points: of steps, tokens or FLOPs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from megatron.experiments.errors import RunError
from megatron.operations.report.run_data import Numbers, Run, Series

Axis = Literal["step", "tokens", "flops"]
POINTS = 6  # common points of a table


@dataclass(frozen=True)
class Value:
    """The value of a metric at a point. interpolated: computed from its two logged neighbours."""

    value: float
    interpolated: bool


@dataclass(frozen=True)
class AlignedCurve:
    """The values of a metric in several runs at common points.

    points: of the axis. values: for each point a value per run; None outside of what the run has logged.
    ends: for each run its last point and value; None if it has no finite value.
    not_finite: for each run, how many logged values are NaN or infinite, and left out.
    """

    metric: str
    points: Sequence[float]
    values: Sequence[Sequence[Value | None]]
    ends: Sequence[tuple[float, float] | None]
    not_finite: Sequence[int]


def on_axis(run: Run, axis: Axis) -> Run:
    """Returns the run with the positions of all series on this axis in place of iterations.

    FLOPs are those of the model for each token, forward and backward, at the full sequence length. Points
    without a number of tokens are left out. Raises RunError if FLOPs are asked for, and the run's
    configuration is unknown.
    """
    if axis == "step":
        return run
    scale = _flops_per_token(run) if axis == "flops" else 1.0
    series = {}
    for name, points in run.series.items():
        has_tokens = np.isfinite(points.tokens)
        if has_tokens.any():
            tokens = points.tokens[has_tokens]
            series[name] = Series(tokens * scale, tokens, points.values[has_tokens])
    return replace(run, series=series)


def align(runs: Sequence[Run], metric: str) -> AlignedCurve:
    """Returns the values of a metric in each run, at POINTS points or fewer that at least two runs reach.

    Points that many runs have logged are preferred. Between two logged points, values are interpolated on a
    straight line; outside of the logged range there are none. runs: as `on_axis` returns them.
    """
    curves = [_finite(run.series.get(metric)) for run in runs]
    logged = [curve for curve, _ in curves if len(curve.iterations)]
    points: list[float] = []
    if len(logged) > 1:
        start = sorted(curve.iterations[0] for curve in logged)[1]
        end = sorted(curve.iterations[-1] for curve in logged)[-2]
        points = _common_points(logged, start, end) if start <= end else []
    ends = [(float(x.iterations[-1]), float(x.values[-1])) if len(x.values) else None for x, _ in curves]
    values = [[_value(curve, point) for curve, _ in curves] for point in points]
    return AlignedCurve(metric, points, values, ends, [count for _, count in curves])


def _common_points(logged: Sequence[Series], start: float, end: float) -> list[float]:
    """Returns points from `start` to `end` at about equal distances, each logged by as many runs as
    possible."""
    xs, counts = np.unique(np.concatenate([np.unique(curve.iterations) for curve in logged]), return_counts=True)
    in_range = (xs >= start) & (xs <= end)
    xs, counts = xs[in_range], counts[in_range]
    targets = np.linspace(start, end, POINTS)
    reach = (end - start) / (POINTS - 1) / 2
    chosen = []
    for target in targets:
        distance = np.abs(xs - target)
        candidates = np.flatnonzero(distance <= reach)
        if len(candidates):
            chosen.append(float(xs[min(candidates, key=lambda index: (-counts[index], distance[index]))]))
    return sorted(set(chosen))


def _finite(series: Series | None) -> tuple[Series, int]:
    """Returns (the finite values of a series, number of values left out)."""
    if series is None:
        empty: Numbers = np.empty(0)
        return Series(empty, empty, empty), 0
    finite = np.isfinite(series.values)
    return Series(series.iterations[finite], series.tokens[finite], series.values[finite]), int((~finite).sum())


def _value(curve: Series, point: float) -> Value | None:
    xs, values = curve.iterations, curve.values
    if not len(xs) or not xs[0] <= point <= xs[-1]:
        return None
    index = int(np.searchsorted(xs, point, side="right")) - 1  # of several values at one point, the last
    if xs[index] == point:
        return Value(float(values[index]), interpolated=False)
    share = (point - xs[index]) / (xs[index + 1] - xs[index])
    return Value(float(values[index] + share * (values[index + 1] - values[index])), interpolated=True)


def _flops_per_token(run: Run) -> float:
    configs = [checkpoint.manifest.get("config") or {} for checkpoint in reversed(run.checkpoints)]
    size = next((config["padded_vocab_size"] for config in configs if config.get("padded_vocab_size")), None)
    if run.args is None or size is None:
        missing = "checkpoint with the size of its vocabulary" if run.args is not None else "readable configuration"
        raise RunError(f"{run.name}: has no {missing}, so the FLOPs of a token are unknown; use --by tokens")
    from megatron.data import rows_per_sample  # these import torch
    from megatron.training.metrics.flops import model_flops

    args = run.args.replace(padded_vocab_size=size)
    return model_flops(args) / (args.train_batch_size * rows_per_sample(args) * args.seq_length)
