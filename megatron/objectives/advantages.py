"""From the rewards of answers to their advantages: how much better each was than expected.

Rewards are float64 `[answers]`, the answers to one prompt beside each other; NaN is no reward: such an answer
is left out of all means, and its advantage is 0 (as in TRL 1.16).
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

HISTORY = 100
"""Rewards that GPT-NeoX's moving average is of."""
_LEAST = 1e-4  # TRL's, added to standard deviations


def _mean(values: np.ndarray) -> np.ndarray:
    """The mean over the last axis of what is there, kept as an axis; NaN where nothing is."""
    there = ~np.isnan(values)
    count = there.sum(-1, keepdims=True)
    return np.divide(np.nansum(values, -1, keepdims=True), count, out=np.full(count.shape, np.nan), where=count > 0)


def deviation(values: np.ndarray) -> np.ndarray:
    """The standard deviation over the last axis, of a sample, of what is there; NaN of fewer than two."""
    count = (~np.isnan(values)).sum(-1, keepdims=True)
    squares = np.nansum((values - _mean(values)) ** 2, -1, keepdims=True)
    return np.sqrt(np.divide(squares, count - 1, out=np.full(count.shape, np.nan), where=count > 1))


def beside_group(rewards: np.ndarray, group: int, scale: Literal["group", "batch", "none"]) -> np.ndarray:
    """Reward minus the mean of the prompt's `group` answers (GRPO), divided by the standard deviation of
    these, of all rewards, or not at all."""
    grouped = rewards.reshape(-1, group)
    advantages = grouped - _mean(grouped)
    if scale != "none":
        advantages = advantages / (deviation(grouped if scale == "group" else rewards) + _LEAST)
    return np.nan_to_num(advantages.ravel(), nan=0.0)


def leave_one_out(rewards: np.ndarray, group: int) -> np.ndarray:
    """Reward minus the mean of the prompt's other answers (RLOO, arXiv 2402.14740)."""
    grouped = rewards.reshape(-1, group)
    others = (~np.isnan(grouped)).sum(-1, keepdims=True) - 1
    sums = np.nansum(grouped, -1, keepdims=True) - grouped
    baseline = np.divide(sums, others, out=np.full(grouped.shape, np.nan), where=others > 0)
    return np.nan_to_num((grouped - baseline).ravel(), nan=0.0)


def beside_history(rewards: np.ndarray, before: Sequence[float]) -> np.ndarray:
    """Reward minus the mean of the last `HISTORY` ones, these rewards included (GPT-NeoX's moving average).
    before: earlier rewards in order."""
    last = np.concatenate([np.asarray(before, np.float64), rewards[~np.isnan(rewards)]])[-HISTORY:]
    return np.nan_to_num(rewards - _mean(last), nan=0.0)


def best_and_worst(rewards: np.ndarray, group: int) -> np.ndarray:
    """The pair of each prompt's `group` answers: 1 for the best, -1 for the worst (of equal ones the first),
    0 for all others; 0 for all where fewer than two have a reward, or all the same."""
    grouped = rewards.reshape(-1, group)
    high, low = (np.where(np.isnan(grouped), never, grouped) for never in (-np.inf, np.inf))
    found, rows = np.zeros(grouped.shape), np.flatnonzero(high.max(1) > low.min(1))
    found[rows, high.argmax(1)[rows]], found[rows, low.argmin(1)[rows]] = 1.0, -1.0
    return found.ravel()


def groups_without_signal(rewards: np.ndarray, group: int) -> float:
    """The share of prompts whose answers all have the same reward, or too few a reward, so that nothing is
    learned from them."""
    spread = np.nan_to_num(deviation(rewards.reshape(-1, group)), nan=0.0)
    return float(np.isclose(spread, 0.0).mean())
