"""Fits a scaling law to finished cells: L(N, D) = E + A / N^alpha + B / D^beta.

N: parameters of the model, D: tokens of training. As in Hoffmann et al. 2022 (arXiv 2203.15556, section 3.3),
the fit minimises the Huber loss (delta 1e-3) of log L from several starts.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.data.files import write_json
from megatron.experiments.errors import RunError
from megatron.experiments.sweep_table import Row, metric_of

Array = NDArray[np.float64]
FIT, FIT_PICTURE = "scaling.json", "scaling.png"
_FEWEST, _FEWEST_VALUES, _SMALLEST_RATIO, _LARGEST_CORRELATION = 8, 3, 2.0, 0.98
_DELTA = 1e-3  # of the Huber loss
_RESAMPLES, _LEVEL = 200, 0.95
_STARTS = (0.1, 0.3, 0.6, 1.0)  # alpha, and beta
_MOST_STEPS, _SMALLEST_GAIN = 2000, 1e-12
_NAMES = ("E", "A", "alpha", "B", "beta")


class Point(NamedTuple):
    """A finished run. n: parameters, d: tokens."""

    cell: str
    n: int
    d: int
    loss: float


@dataclass(frozen=True)
class ScalingFit:
    """A fitted law.

    intervals: of each number, 95 % by bootstrap over cells. points: number of cells in the fit.
    """

    E: float
    A: float
    alpha: float
    B: float
    beta: float
    intervals: dict[str, tuple[float, float]]
    points: int
    largest_error: float

    def loss(self, n: float, d: float) -> float:
        """Returns the predicted loss of a model with n parameters after d tokens."""
        return self.E + self.A / n**self.alpha + self.B / d**self.beta

    def best_size(self, flops: float) -> tuple[float, float]:
        """Returns (N, D) with the lowest loss for this compute, by C = 6 N D."""
        ratio = (self.alpha * self.A / (self.beta * self.B)) ** (1.0 / (self.alpha + self.beta))
        n = ratio * (flops / 6.0) ** (self.beta / (self.alpha + self.beta))
        return n, flops / 6.0 / n

    def lines(self, metric: str) -> Iterator[str]:
        """Yields the fit as text. metric: the loss it was fitted to."""
        yield f"L(N, D) = E + A/N^alpha + B/D^beta, fitted to {metric} of {self.points} cells; 95 % by bootstrap"
        for name in _NAMES:
            low, high = self.intervals[name]
            yield f"  {name:<5} {getattr(self, name):.5g}  [{low:.5g}, {high:.5g}]"
        yield f"  largest error of a cell {self.largest_error:.2%}"
        share = self.beta / (self.alpha + self.beta)
        yield f"  best for compute C: N grows as C^{share:.3f}, D as C^{1 - share:.3f}"


def points_of(rows: Sequence[Row]) -> tuple[list[Point], str]:
    """Returns the finished cells of a sweep that have all three numbers, and the name of the loss."""
    metric = metric_of(rows)
    return [
        Point(row.cell.name, row.parameters, row.tokens, row.losses[metric])
        for row in rows
        if row.is_finished and row.parameters and row.tokens and 0.0 < row.losses.get(metric, math.nan) < math.inf
    ], metric


def refuse_unfit(points: Sequence[Point]) -> None:
    """Raises RunError if the points are too few, or too close, to determine the law."""
    if len(points) < _FEWEST:
        raise RunError(f"--fit scaling: {len(points)} cells have finished, and the fit needs {_FEWEST}; add runs")
    for name, meaning, values in (
        ("N", "parameters", [point.n for point in points]),
        ("D", "tokens", [point.d for point in points]),
    ):
        if len(set(values)) < _FEWEST_VALUES or max(values) < _SMALLEST_RATIO * min(values):
            raise RunError(
                f"--fit scaling: the cells have {len(set(values))} values of {name} ({meaning}), from {min(values):,} "
                f"to {max(values):,}; the fit needs {_FEWEST_VALUES}, the largest at least {_SMALLEST_RATIO:g} times "
                "the smallest; vary it more"
            )
    correlation = np.corrcoef(np.log([point.n for point in points]), np.log([point.d for point in points]))[0, 1]
    if abs(correlation) > _LARGEST_CORRELATION:
        raise RunError(
            f"--fit scaling: N and D vary together (correlation {correlation:.3f} of their logarithms), so that their "
            "effects cannot be told apart; train each size on several numbers of tokens"
        )


def fit_scaling(points: Sequence[Point], resamples: int = _RESAMPLES) -> ScalingFit:
    """Fits the law. Raises RunError if the points cannot determine it.

    resamples: of the bootstrap, with a fixed seed.
    """
    refuse_unfit(points)
    n, d, loss = (np.array([point[i] for point in points], dtype=np.float64) for i in (1, 2, 3))
    data = np.log(n), np.log(d), np.log(loss)
    parameters = min((_descend(start, *data) for start in _starts(n, d, loss)), key=lambda minimum: minimum[0])[1]
    generator = np.random.default_rng(0)
    samples = []
    for _ in range(resamples):
        chosen = generator.integers(len(points), size=len(points))
        if len(set(n[chosen])) > 1 and len(set(d[chosen])) > 1:
            samples.append(_numbers(_descend(parameters, *(values[chosen] for values in data))[1]))
    edges = np.quantile(np.array(samples), [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2], axis=0)
    intervals = {name: (float(edges[0, i]), float(edges[1, i])) for i, name in enumerate(_NAMES)}
    error = float(np.abs(np.expm1(_residuals(parameters, *data)[0])).max())
    return ScalingFit(*_numbers(parameters), intervals, len(points), error)


def _starts(n: Array, d: Array, loss: Array) -> Iterator[Array]:
    """Yields starts: A and B fit best for each pair of exponents and each share of the least loss as E."""
    for alpha, beta, share in product(_STARTS, _STARTS, (0.3, 0.7, 0.95)):
        e = share * loss.min()
        matrix = np.stack([n**-alpha, d**-beta], axis=1)
        scale = matrix.max(axis=0)
        solution = np.linalg.lstsq(matrix / scale, loss - e, rcond=None)[0]
        a, b = np.maximum(solution, 1e-3 * loss.min()) / scale
        yield np.array([math.log(e), math.log(a), alpha, math.log(b), beta])


def _residuals(parameters: Array, log_n: Array, log_d: Array, log_loss: Array) -> tuple[Array, Array]:
    """Returns the errors of log L [points], and their derivatives [points, 5].

    parameters: log E, log A, alpha, log B, beta."""
    e, a, alpha, b, beta = parameters
    terms = np.stack([np.full_like(log_n, e), a - alpha * log_n, b - beta * log_d])
    largest = terms.max(axis=0)
    log_sum = largest + np.log(np.exp(terms - largest).sum(axis=0))
    shares = np.exp(terms - log_sum)
    derivatives = np.stack([shares[0], shares[1], -log_n * shares[1], shares[2], -log_d * shares[2]], axis=1)
    return log_sum - log_loss, derivatives


def _huber(residuals: Array) -> float:
    size = np.abs(residuals)
    return float(np.where(size <= _DELTA, 0.5 * size**2, _DELTA * (size - 0.5 * _DELTA)).sum())


def _descend(start: Array, log_n: Array, log_d: Array, log_loss: Array) -> tuple[float, Array]:
    """Returns (Huber loss, parameters) at a minimum near `start`, by Levenberg and Marquardt's method.

    Large errors count less in each step (iteratively reweighted least squares). The parameters are scaled by
    the diagonal, and E stays positive because its logarithm is fitted.
    """
    parameters, damping = start, 1e-3
    residuals, derivatives = _residuals(parameters, log_n, log_d, log_loss)
    value = _huber(residuals)
    for _ in range(_MOST_STEPS):
        weights = _DELTA / np.maximum(np.abs(residuals), _DELTA)
        matrix = derivatives.T @ (weights[:, None] * derivatives)
        slope = derivatives.T @ (weights * residuals)
        step = np.linalg.solve(matrix + damping * np.diag(np.diag(matrix) + 1e-12), -slope)
        new = parameters + np.clip(step, -2.0, 2.0)
        new_residuals, new_derivatives = _residuals(new, log_n, log_d, log_loss)
        new_value = _huber(new_residuals)
        if new_value < value:
            gain, damping = value - new_value, max(damping / 4.0, 1e-12)
            parameters, residuals, derivatives, value = new, new_residuals, new_derivatives, new_value
            if gain < _SMALLEST_GAIN * value or value < 1e-24:
                break
        else:
            damping *= 4.0
            if damping > 1e9:
                break
    return value, parameters


def _numbers(parameters: Array) -> tuple[float, float, float, float, float]:
    e, a, alpha, b, beta = (float(value) for value in parameters)
    return math.exp(e), math.exp(min(a, 700.0)), alpha, math.exp(min(b, 700.0)), beta


def write_fit(fit: ScalingFit, points: Sequence[Point], metric: str, folder: Path) -> list[Path]:
    """Writes the fit as JSON, and as a picture. Returns the files."""
    paths = [folder / FIT, folder / FIT_PICTURE]
    cells = [{**point._asdict(), "predicted": fit.loss(point.n, point.d)} for point in points]
    write_json(paths[0], {"metric": metric, **asdict(fit), "cells": cells})
    _draw(fit, points, metric, paths[1])
    return paths


def _draw(fit: ScalingFit, points: Sequence[Point], metric: str, path: Path) -> None:
    """Draws the losses over tokens, a curve for each size, and the predicted over the measured losses."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, errors) = pyplot.subplots(1, 2, figsize=(11, 5), layout="constrained")
    sizes = sorted({point.n for point in points})
    tokens = np.geomspace(min(point.d for point in points), max(point.d for point in points), 50)
    for i, size in enumerate(sizes):
        color = pyplot.get_cmap("viridis")(i / max(1, len(sizes) - 1))
        chosen = [point for point in points if point.n == size]
        curves.plot(tokens, [fit.loss(size, d) for d in tokens], color=color, linewidth=1)
        curves.plot([p.d for p in chosen], [p.loss for p in chosen], "o", color=color, label=f"{size:.3g} parameters")
        errors.plot([p.loss for p in chosen], [fit.loss(p.n, p.d) for p in chosen], "o", color=color)
    curves.set_xscale("log")
    curves.set_xlabel("tokens")
    curves.set_ylabel(f"{metric} (nats per token)")
    curves.set_title(f"E {fit.E:.3g} + {fit.A:.3g}/N^{fit.alpha:.3f} + {fit.B:.3g}/D^{fit.beta:.3f}", fontsize=10)
    if len(sizes) <= 12:
        curves.legend(fontsize=7)
    ends = min(point.loss for point in points), max(point.loss for point in points)
    errors.plot(ends, ends, color="grey", linewidth=1)
    errors.set_xlabel("measured loss")
    errors.set_ylabel("predicted loss")
    for axes in (curves, errors):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
