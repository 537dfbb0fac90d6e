"""A generation of answers: all that are written with the same weights, what they are worth, and the
micro-batches of the steps that they are shared out to."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.values.losses import writes_pairs
from megatron.objectives.advantages import beside_group, beside_history, best_and_worst, leave_one_out
from megatron.rollouts.answers import Answer

_WIDTHS = 64  # rows are cut to multiples of so many tokens: few shapes, and products are fast in them


@dataclass(frozen=True)
class Shares:
    """How the rows of a generation, its answers, are shared out: steps, of each so many micro-batches a data
    rank, of so many rows."""

    steps: int
    accumulation: int
    rows: int
    data_size: int

    @classmethod
    def of(cls, args: NeoXArgs, data_size: int) -> "Shares":
        """The shares of the generations of a configuration on so many data ranks."""
        assert args.rollout is not None and args.train_micro_batch_size_per_gpu is not None
        steps, accumulation = args.rollout["steps_per_generation"], args.gradient_accumulation_steps or 1
        answers = args.rollout["num_generations"] if writes_pairs(args) else 1  # of a sample
        return cls(steps, accumulation, args.train_micro_batch_size_per_gpu * answers, data_size)

    @property
    def of_step(self) -> int:
        """Rows of a step, on all ranks."""
        return self.accumulation * self.rows * self.data_size

    @property
    def total(self) -> int:
        """Rows of the generation."""
        return self.steps * self.of_step

    def micro_batches(self, data_rank: int) -> list[range]:
        """The rows of each micro-batch of a data rank, step after step."""
        starts = (
            step * self.of_step + (micro * self.data_size + data_rank) * self.rows
            for step in range(self.steps)
            for micro in range(self.accumulation)
        )
        return [range(start, start + self.rows) for start in starts]


@dataclass(frozen=True)
class Generation:
    """The answers of a generation in the order of its rows, the same on every rank.

    number: counted from the run's beginning; weights: that of the generation before whose first step the
    weights were that wrote them. old_logprobs: of the trainer before the first step, of each answer's tokens;
    None: nothing needs them, or one step takes them, and finds them itself. rewards: NaN for none.
    advantages: of pairs 1 for the chosen, -1 for the rejected answer, 0 for those that are not trained.
    """

    number: int
    weights: int
    answers: list[Answer]
    rewards: list[float]
    advantages: list[float]
    old_logprobs: list[list[float]] | None

    def as_json(self) -> dict[str, Any]:
        """The generation as values of JSON, of which `from_json` makes it again; numbers keep their bits."""
        answers = [{**vars(answer), "transcript": None} for answer in self.answers]  # is read before the first step
        return {**vars(self), "answers": answers}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> "Generation":
        """The generation that `as_json` described."""
        return cls(**{**state, "answers": [Answer(**answer) for answer in state["answers"]]})


def width_of(args: NeoXArgs, answers: Sequence[Answer]) -> int:
    """Tokens of the rows: as many as the longest of all answers needs, in steps; seq_length where shapes must
    stay (compiled blocks, `rollout.exact`)."""
    assert args.rollout is not None
    if args.compile or args.rollout["exact"]:
        return args.seq_length
    needed = max(1, *(len(answer.prompt) + len(answer.tokens) - 1 for answer in answers))
    step = math.lcm(_WIDTHS, args.tp) if args.sequence_parallel else _WIDTHS
    return min(args.seq_length, -(-needed // step) * step)


def penalties(args: NeoXArgs, answers: Sequence[Answer]) -> np.ndarray:
    """What is taken from the reward of each answer, `[answers]`: for its length up to 1 (DAPO, arXiv
    2503.14476, equation 13), and for want of an end `rollout.missing_eos_penalty`."""
    assert args.rollout is not None
    unfinished = np.array([not answer.finished for answer in answers], np.float64)
    taken = unfinished * (args.rollout["missing_eos_penalty"] or 0.0)
    if args.rl_overlong_buffer is None:
        return taken
    lengths = np.array([answer.length for answer in answers], np.float64)
    free = args.rollout["max_completion_length"] - args.rl_overlong_buffer
    return taken + np.clip((lengths - free) / args.rl_overlong_buffer, 0.0, 1.0)


def pairs_of(advantages: Sequence[float], group: int) -> list[int]:
    """The rows of the two answers to each prompt that are trained, in the order they were written; where
    there is no pair the first two, which then are not trained either. advantages: of a generation of
    pairs."""
    rows = []
    for first in range(0, len(advantages), group):
        chosen = [row for row in range(first, first + group) if advantages[row]]
        rows += chosen or [first, first + 1]
    return rows


def advantages_of(args: NeoXArgs, rewards: np.ndarray, history: Sequence[float]) -> list[float]:
    """The advantages of a generation's answers. history: rewards of earlier ones, the last ones."""
    assert args.rollout is not None
    group = args.rollout["num_generations"]
    if writes_pairs(args):
        found = best_and_worst(rewards, group)
    elif args.rl_loss_type == "rloo" or args.reinforce_leave_one_out:
        found = leave_one_out(rewards, group)
    elif args.rl_loss_type == "reinforce":
        found = beside_history(rewards, history)
    else:
        found = beside_group(rewards, group, args.rl_scale_rewards)
    return found.astype(np.float32).tolist()
