"""A generation: answers sampled with the same weights, their rewards and advantages, and how they are divided
into steps and micro-batches."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.methods.reinforcement.advantages import (
    best_and_worst,
    group_relative,
    leave_one_out,
    moving_average_baseline,
)
from megatron.methods.reinforcement.answers import Answer
from megatron.methods.reinforcement.keys import ReinforcementKeys
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.values.losses import writes_pairs

_WIDTH_MULTIPLE = 64  # of the row width in tokens: few shapes, and fast matrix products


@dataclass(frozen=True)
class Shares:
    """Divides the rows of a generation, its answers, into steps and micro-batches.

    accumulation: micro-batches per step and data rank; rows: per micro-batch; data_size: data ranks."""

    steps: int
    accumulation: int
    rows: int
    data_size: int

    @classmethod
    def from_args(cls, args: NeoXArgs, data_size: int) -> "Shares":
        """Returns the shares that a configuration gives on `data_size` data ranks."""
        keys = ReinforcementKeys.read_from(args)
        assert keys.rollout is not None and args.train_micro_batch_size_per_gpu is not None
        steps, accumulation = keys.rollout["steps_per_generation"], args.gradient_accumulation_steps or 1
        answers = keys.rollout["num_generations"] if writes_pairs(args) else 1  # of a sample
        return cls(steps, accumulation, args.train_micro_batch_size_per_gpu * answers, data_size)

    @property
    def rows_per_step(self) -> int:
        """Returns the number of rows in a step, over all ranks."""
        return self.accumulation * self.rows * self.data_size

    @property
    def total(self) -> int:
        """Returns the number of rows in a generation."""
        return self.steps * self.rows_per_step

    def micro_batches(self, data_rank: int) -> list[range]:
        """Returns the rows of each micro-batch of a data rank, step after step."""
        starts = (
            step * self.rows_per_step + (micro * self.data_size + data_rank) * self.rows
            for step in range(self.steps)
            for micro in range(self.accumulation)
        )
        return [range(start, start + self.rows) for start in starts]


@dataclass(frozen=True)
class Generation:
    """The answers of a generation in the order of its rows, the same on every rank.

    number: index of the generation, from the run's start.
    weights: version of the sampling weights: the number of the generation before whose first step they were
        current.
    old_logprobs: the trainer's log-probabilities before the first step, per token of each answer; None if
        nothing needs them, or if the only step computes them.
    rewards: NaN for answers without a reward.
    advantages: for pairs 1 (chosen), -1 (rejected), 0 (not trained).
    """

    number: int
    weights: int
    answers: list[Answer]
    rewards: list[float]
    advantages: list[float]
    old_logprobs: list[list[float]] | None

    def as_json(self) -> dict[str, Any]:
        """Returns the generation as JSON values, which `from_json` reads back bit for bit."""
        answers = [{**vars(answer), "transcript": None} for answer in self.answers]  # is read before the first step
        return {**vars(self), "answers": answers}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> "Generation":
        """Returns the generation that `as_json` described."""
        return cls(**{**state, "answers": [Answer(**answer) for answer in state["answers"]]})


def width_of(args: NeoXArgs, answers: Sequence[Answer]) -> int:
    """Returns the row width in tokens: the longest answer's, rounded up. It is seq_length where shapes must
    stay the same (compiled blocks, `rollout.exact`)."""
    keys = ReinforcementKeys.read_from(args)
    assert keys.rollout is not None
    if args.compile or keys.rollout["exact"]:
        return args.seq_length
    longest = max(1, *(len(answer.prompt) + len(answer.tokens) - 1 for answer in answers))
    step = math.lcm(_WIDTH_MULTIPLE, args.tp) if args.sequence_parallel else _WIDTH_MULTIPLE
    return min(args.seq_length, -(-longest // step) * step)


def penalties(args: NeoXArgs, answers: Sequence[Answer]) -> np.ndarray:
    """Returns the penalty that each reward is reduced by, `[answers]`. Long answers cost up to 1 (DAPO, arXiv
    2503.14476, equation 13), truncated ones `rollout.missing_eos_penalty`."""
    keys = ReinforcementKeys.read_from(args)
    assert keys.rollout is not None
    unfinished = np.array([not answer.finished for answer in answers], np.float64)
    penalty = unfinished * (keys.rollout["missing_eos_penalty"] or 0.0)
    if keys.rl_overlong_buffer is None:
        return penalty
    lengths = np.array([answer.length for answer in answers], np.float64)
    free = keys.rollout["max_completion_length"] - keys.rl_overlong_buffer
    return penalty + np.clip((lengths - free) / keys.rl_overlong_buffer, 0.0, 1.0)


def pairs_of(advantages: Sequence[float], group: int) -> list[int]:
    """Returns two rows per prompt: the chosen and the rejected answer, in the order they were written. A
    prompt without a pair gives its first two rows, whose advantages are 0. advantages: of a generation of
    pairs."""
    rows = []
    for start in range(0, len(advantages), group):
        chosen = [row for row in range(start, start + group) if advantages[row]]
        rows += chosen or [start, start + 1]
    return rows


def advantages_of(args: NeoXArgs, rewards: np.ndarray, history: Sequence[float]) -> list[float]:
    """Returns the advantages of a generation's answers. history: the latest rewards of earlier
    generations."""
    keys = ReinforcementKeys.read_from(args)
    assert keys.rollout is not None
    group = keys.rollout["num_generations"]
    if writes_pairs(args):
        advantages = best_and_worst(rewards, group)
    elif keys.rl_loss_type == "rloo" or keys.reinforce_leave_one_out:
        advantages = leave_one_out(rewards, group)
    elif keys.rl_loss_type == "reinforce":
        advantages = moving_average_baseline(rewards, history)
    else:
        advantages = group_relative(rewards, group, keys.rl_scale_rewards)
    return advantages.astype(np.float32).tolist()
