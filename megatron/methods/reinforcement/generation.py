"""A generation: answers sampled with the same weights, their rewards and advantages, and how they are divided
into steps and micro-batches. Files of generations for a run that is interrupted between its steps."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.checkpointing import replace_file
from megatron.checkpointing.layout import list_checkpoints, step_of
from megatron.data import DataError
from megatron.methods.reinforcement.advantages import (
    best_and_worst,
    group_relative,
    leave_one_out,
    moving_average_baseline,
)
from megatron.methods.reinforcement.answers import Answer
from megatron.methods.reinforcement.keys import ReinforcementKeys, rollout_keys
from megatron.neox_arguments import ModelArgs, NeoXArgs
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
        rollout = rollout_keys(args)
        assert args.train_micro_batch_size_per_gpu is not None
        steps, accumulation = rollout["steps_per_generation"], args.gradient_accumulation_steps or 1
        answers = rollout["num_generations"] if writes_pairs(args) else 1  # of a sample
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


def width_of(args: ModelArgs, answers: Sequence[Answer]) -> int:
    """Returns the row width in tokens: the longest answer's, rounded up. It is seq_length where shapes must
    stay the same (compiled blocks, `rollout.exact`)."""
    if args.compile or rollout_keys(args)["exact"]:
        return args.seq_length
    longest = max(1, *(len(answer.prompt) + len(answer.tokens) - 1 for answer in answers))
    step = math.lcm(_WIDTH_MULTIPLE, args.tp) if args.sequence_parallel else _WIDTH_MULTIPLE
    return min(args.seq_length, -(-longest // step) * step)


def penalties(args: ModelArgs, answers: Sequence[Answer]) -> np.ndarray:
    """Returns the penalty that each reward is reduced by, `[answers]`. Long answers cost up to 1 (DAPO, arXiv
    2503.14476, equation 13), truncated ones `rollout.missing_eos_penalty`."""
    keys, rollout = ReinforcementKeys.read_from(args), rollout_keys(args)
    unfinished = np.array([not answer.finished for answer in answers], np.float64)
    penalty = unfinished * (rollout["missing_eos_penalty"] or 0.0)
    if keys.rl_overlong_buffer is None:
        return penalty
    lengths = np.array([answer.length for answer in answers], np.float64)
    free = rollout["max_completion_length"] - keys.rl_overlong_buffer
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
    keys, group = ReinforcementKeys.read_from(args), rollout_keys(args)["num_generations"]
    if writes_pairs(args):
        advantages = best_and_worst(rewards, group)
    elif keys.rl_loss_type == "rloo" or keys.reinforce_leave_one_out:
        advantages = leave_one_out(rewards, group)
    elif keys.rl_loss_type == "reinforce":
        advantages = moving_average_baseline(rewards, history)
    else:
        advantages = group_relative(rewards, group, keys.rl_scale_rewards)
    return advantages.astype(np.float32).tolist()


@dataclass(frozen=True)
class GenerationFiles:
    """Writes and reads `NUMBER.json` of a run's generations, on rank 0.

    folder: of the files; None: nothing is written.
    steps: number of steps per generation.
    answers: number of answers per generation.
    save_dir: folder of the run's checkpoints; None if this machine has none.
    """

    folder: Path | None
    steps: int
    answers: int
    save_dir: str | None

    def write(self, generation: Generation, saved: Sequence[int]) -> None:
        """Writes the generation, and deletes earlier ones that no checkpoint can resume within.

        saved: the steps after which this process has written checkpoints."""
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_file(self.folder / f"{generation.number}.json", json.dumps(generation.as_json()).encode())
        first_step = self.steps * (generation.number - 1)
        if not any(first_step < step < first_step + self.steps for step in saved):
            (self.folder / f"{generation.number - 1}.json").unlink(missing_ok=True)
        checkpoints = [] if self.save_dir is None else list_checkpoints(self.save_dir)
        oldest = min(map(step_of, checkpoints), default=0) // self.steps
        for file in self.folder.glob("*.json"):
            if file.stem.isdecimal() and int(file.stem) < oldest:
                file.unlink()

    def read(self, number: int) -> Generation:
        """Reads a generation. Raises DataError where its file is missing or another run's."""
        file = None if self.folder is None else self.folder / f"{number}.json"
        if file is None or not file.is_file():
            raise DataError(
                f"{file}: missing; the run goes on between the steps of a generation, whose answers it held: set "
                f"iteration to a checkpoint at a multiple of {self.steps}"
            )
        generation = Generation.from_json(json.loads(file.read_bytes()))
        if (generation.number, len(generation.answers)) != (number, self.answers):
            raise DataError(
                f"{file}: holds {len(generation.answers)} answers of generation {generation.number}, not "
                f"{self.answers} of {number}: of another run; set log_dir to this run's"
            )
        return generation
