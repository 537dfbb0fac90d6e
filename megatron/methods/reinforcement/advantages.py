"""Computes advantages of answers from their rewards: how much better each answer was than expected.

Rewards are float64 `[answers]`; the answers to one prompt are adjacent. An answer without a reward has NaN:
it is left out of all means, and its advantage is 0 (as in TRL 1.16).
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

HISTORY = 100
"""Rewards that GPT-NeoX's moving average is of."""
_EPSILON = 1e-4  # TRL's, added to standard deviations


def _mean(values: np.ndarray) -> np.ndarray:
    """Returns the mean of the values that are not NaN over the last axis, which is kept; NaN if all are."""
    is_present = ~np.isnan(values)
    count = is_present.sum(-1, keepdims=True)
    return np.divide(np.nansum(values, -1, keepdims=True), count, out=np.full(count.shape, np.nan), where=count > 0)


def deviation(values: np.ndarray) -> np.ndarray:
    """Returns the sample standard deviation (n - 1) over the last axis, which is kept.

    NaN values are left out. The result is NaN for fewer than two others.
    """
    count = (~np.isnan(values)).sum(-1, keepdims=True)
    squares = np.nansum((values - _mean(values)) ** 2, -1, keepdims=True)
    return np.sqrt(np.divide(squares, count - 1, out=np.full(count.shape, np.nan), where=count > 1))


def group_relative(rewards: np.ndarray, group: int, scale: Literal["group", "batch", "none"]) -> np.ndarray:
    """Returns each reward minus the mean of its prompt's `group` answers (GRPO).

    scale: divide by the standard deviation of the prompt's rewards ("group"), of all rewards ("batch"), or
    not at all ("none").
    """
    grouped = rewards.reshape(-1, group)
    advantages = grouped - _mean(grouped)
    if scale != "none":
        advantages = advantages / (deviation(grouped if scale == "group" else rewards) + _EPSILON)
    return np.nan_to_num(advantages.ravel(), nan=0.0)


def leave_one_out(rewards: np.ndarray, group: int) -> np.ndarray:
    """Reward minus the mean of the prompt's other answers (RLOO, arXiv 2402.14740)."""
    grouped = rewards.reshape(-1, group)
    num_others = (~np.isnan(grouped)).sum(-1, keepdims=True) - 1
    sums = np.nansum(grouped, -1, keepdims=True) - grouped
    baseline = np.divide(sums, num_others, out=np.full(grouped.shape, np.nan), where=num_others > 0)
    return np.nan_to_num((grouped - baseline).ravel(), nan=0.0)


def moving_average_baseline(rewards: np.ndarray, history: Sequence[float]) -> np.ndarray:
    """Returns each reward minus the mean of the last `HISTORY` rewards, these included (GPT-NeoX's moving
    average). history: earlier rewards in order."""
    last = np.concatenate([np.asarray(history, np.float64), rewards[~np.isnan(rewards)]])[-HISTORY:]
    return np.nan_to_num(rewards - _mean(last), nan=0.0)


def best_and_worst(rewards: np.ndarray, group: int) -> np.ndarray:
    """Labels of each prompt's `group` answers: 1 for the best, -1 for the worst, 0 for the rest.

    Of equal answers the first counts. All are 0 where fewer than two have a reward, or all have the same.
    """
    grouped = rewards.reshape(-1, group)
    high, low = (np.where(np.isnan(grouped), fill, grouped) for fill in (-np.inf, np.inf))
    labels, rows = np.zeros(grouped.shape), np.flatnonzero(high.max(1) > low.min(1))
    labels[rows, high.argmax(1)[rows]], labels[rows, low.argmin(1)[rows]] = 1.0, -1.0
    return labels.ravel()


def groups_without_signal(rewards: np.ndarray, group: int) -> float:
    """Returns the share of prompts that teach nothing: all answers have the same reward, or fewer than two
    have one."""
    spread = np.nan_to_num(deviation(rewards.reshape(-1, group)), nan=0.0)
    return float(np.isclose(spread, 0.0).mean())
