"""Tests whether a difference between two scores may be chance, and Holm's correction for many tests."""

import math
import statistics
from collections.abc import Sequence

_STEPS, _PRECISION = 10_000, 1e-15  # of the continued fraction


def z_test(difference: float, stderr: float) -> float:
    """Returns the two-sided p-value of a difference with a known standard error above 0."""
    return math.erfc(abs(difference) / stderr / math.sqrt(2))


def mcnemar_test(only_first: int, only_second: int) -> float:
    """Returns the exact two-sided p-value of McNemar's test (a sign test).

    only_first, only_second: documents that only the first, or only the second, answers correctly.
    """
    larger, smaller = max(only_first, only_second), min(only_first, only_second)
    # Twice the share of `smaller` or fewer heads among so many throws of a coin
    return min(1.0, 2 * _incomplete_beta(larger, smaller + 1, 0.5)) if larger else 1.0


def paired_t_test(differences: Sequence[float]) -> float | None:
    """Returns the two-sided p-value of the paired t-test. None if all differences are equal, or there is only
    one."""
    count = len(differences)
    deviation = statistics.stdev(differences) if count > 1 else 0.0
    if deviation == 0.0:
        return None
    t = statistics.fmean(differences) / deviation * math.sqrt(count)
    freedom = count - 1
    return _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns p-values corrected for their number (Holm 1979, A simple sequentially rejective multiple test
    procedure), in the given order."""
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, (len(p_values) - rank) * p_values[index])
        corrected[index] = min(1.0, largest)
    return corrected


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Returns the regularized incomplete beta function I_x(a, b), by Lentz's continued fraction (Numerical
    Recipes, section 6.4)."""
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly
        return 1.0 - _incomplete_beta(b, a, 1.0 - x)
    if x == 0.0:
        return 0.0
    d = 1.0 / (1.0 - (a + b) * x / (a + 1))
    c, fraction = 1.0, d
    for m in range(1, _STEPS):
        for factor in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 / (1.0 + factor * d)
            c = 1.0 + factor / c
            fraction *= c * d
        if abs(c * d - 1.0) < _PRECISION:
            break
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) * fraction / a
