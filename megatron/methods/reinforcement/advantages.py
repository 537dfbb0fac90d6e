"""Computes advantages of answers from their rewards: how much better each answer was than expected.

Rewards are float64 `[answers]`; the answers to one prompt are adjacent. An answer without a reward has NaN:
it does not count in any mean, and its advantage is 0 (as in TRL 1.16).
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

HISTORY = 100
"""Number of latest rewards in GPT-NeoX's moving average."""
_EPSILON = 1e-4  # TRL's, added to standard deviations


def _mean(values: np.ndarray) -> np.ndarray:
    """Returns the mean over the last axis, which stays with size 1. NaN values are ignored; NaN if all are
    NaN."""
    is_present = ~np.isnan(values)
    count = is_present.sum(-1, keepdims=True)
    return np.divide(np.nansum(values, -1, keepdims=True), count, out=np.full(count.shape, np.nan), where=count > 0)


def deviation(values: np.ndarray) -> np.ndarray:
    """Returns the sample standard deviation (n - 1) over the last axis, which stays with size 1.

    NaN values are ignored. The result is NaN if fewer than two values remain.
    """
    count = (~np.isnan(values)).sum(-1, keepdims=True)
    squares = np.nansum((values - _mean(values)) ** 2, -1, keepdims=True)
    return np.sqrt(np.divide(squares, count - 1, out=np.full(count.shape, np.nan), where=count > 1))


def group_relative(rewards: np.ndarray, group: int, scale: Literal["group", "batch", "none"]) -> np.ndarray:
    """Returns each reward minus the mean reward of the same prompt's answers (GRPO), `[answers]`.

    group: number of answers per prompt.
    scale: divide by the standard deviation of the prompt's rewards ("group"), of all rewards ("batch"), or
        not at all ("none").
    """
    grouped = rewards.reshape(-1, group)
    advantages = grouped - _mean(grouped)
    if scale != "none":
        advantages = advantages / (deviation(grouped if scale == "group" else rewards) + _EPSILON)
    return np.nan_to_num(advantages.ravel(), nan=0.0)


def leave_one_out(rewards: np.ndarray, group: int) -> np.ndarray:
    """Returns each reward minus the mean reward of the prompt's other answers (RLOO, arXiv 2402.14740),
    `[answers]`.

    group: number of answers per prompt.
    """
    grouped = rewards.reshape(-1, group)
    num_others = (~np.isnan(grouped)).sum(-1, keepdims=True) - 1
    sums = np.nansum(grouped, -1, keepdims=True) - grouped
    baseline = np.divide(sums, num_others, out=np.full(grouped.shape, np.nan), where=num_others > 0)
    return np.nan_to_num((grouped - baseline).ravel(), nan=0.0)


def moving_average_baseline(rewards: np.ndarray, history: Sequence[float]) -> np.ndarray:
    """Returns each reward minus the mean of the last `HISTORY` rewards (GPT-NeoX's moving average),
    `[answers]`.

    The last rewards include `rewards` themselves. history: earlier rewards, oldest first.
    """
    last = np.concatenate([np.asarray(history, np.float64), rewards[~np.isnan(rewards)]])[-HISTORY:]
    return np.nan_to_num(rewards - _mean(last), nan=0.0)


def best_and_worst(rewards: np.ndarray, group: int) -> np.ndarray:
    """Returns labels of answers, `[answers]`: for each prompt 1 for the best, -1 for the worst, 0 for the
    rest.

    Among equal rewards the first answer is taken. All labels of a prompt are 0 if fewer than two of its
    answers have a reward, or all rewards are equal. group: number of answers per prompt.
    """
    grouped = rewards.reshape(-1, group)
    high, low = (np.where(np.isnan(grouped), fill, grouped) for fill in (-np.inf, np.inf))
    labels, rows = np.zeros(grouped.shape), np.flatnonzero(high.max(1) > low.min(1))
    labels[rows, high.argmax(1)[rows]], labels[rows, low.argmin(1)[rows]] = 1.0, -1.0
    return labels.ravel()


def groups_without_signal(rewards: np.ndarray, group: int) -> float:
    """Returns the share of prompts that teach nothing, because all their answers have the same reward.

    Prompts with fewer than two rewarded answers count too. group: number of answers per prompt.
    """
    spread = np.nan_to_num(deviation(rewards.reshape(-1, group)), nan=0.0)
    return float(np.isclose(spread, 0.0).mean())
