"""A generation: answers sampled with the same weights, with their rewards and advantages.

Also divides a generation's answers into steps and micro-batches, and saves generations to files, so that a
run that was interrupted within one can resume.
"""

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
from megatron.neox_arguments.values.json_text import parse_json
from megatron.neox_arguments.values.losses import writes_pairs

_WIDTH_MULTIPLE = 64  # row widths are multiples of this: few shapes, and fast matrix products


@dataclass(frozen=True)
class Shares:
    """Divides the rows of a generation (one per answer) into steps and micro-batches.

    steps: steps per generation. accumulation: micro-batches per step and data rank.
    rows: rows per micro-batch. data_size: number of data ranks.
    """

    steps: int
    accumulation: int
    rows: int
    data_size: int

    @classmethod
    def from_args(cls, args: NeoXArgs, data_size: int) -> "Shares":
        """Returns how a configuration divides a generation over `data_size` data ranks."""
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
        """Returns the row numbers of each micro-batch of a data rank, for all steps in order."""
        starts = (
            step * self.rows_per_step + (micro * self.data_size + data_rank) * self.rows
            for step in range(self.steps)
            for micro in range(self.accumulation)
        )
        return [range(start, start + self.rows) for start in starts]


@dataclass(frozen=True)
class Generation:
    """The answers of a generation in the order of its rows; every rank has all of them.

    number: index of the generation since the run's start.
    weights: version of the weights that sampled: the number of the generation at whose start they were
        current.
    rewards: one per answer; NaN for answers without a reward.
    advantages: one per answer; for online DPO 1 (chosen), -1 (rejected) or 0 (not trained).
    old_logprobs: for each answer, log-probabilities of its tokens by the trainer before the first step. None
        if nothing needs them, or if the only step on the generation computes them itself.
    """

    number: int
    weights: int
    answers: list[Answer]
    rewards: list[float]
    advantages: list[float]
    old_logprobs: list[list[float]] | None

    def as_json(self) -> dict[str, Any]:
        """Returns the generation as JSON values, from which `from_json` restores it exactly."""
        answers = [{**vars(answer), "transcript": None} for answer in self.answers]  # not read after the first step
        return {**vars(self), "answers": answers}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> "Generation":
        """Returns the generation from JSON values that `as_json` returned."""
        return cls(**{**state, "answers": [Answer(**answer) for answer in state["answers"]]})


def width_of(args: ModelArgs, answers: Sequence[Answer]) -> int:
    """Returns the row width in tokens for these answers: the longest one's, rounded up.

    It is always seq_length where shapes must not change (compiled blocks, `rollout.exact`).
    """
    if args.compile or rollout_keys(args)["exact"]:
        return args.seq_length
    longest = max(1, *(len(answer.prompt) + len(answer.tokens) - 1 for answer in answers))
    step = math.lcm(_WIDTH_MULTIPLE, args.tp) if args.sequence_parallel else _WIDTH_MULTIPLE
    return min(args.seq_length, -(-longest // step) * step)


def penalties(args: ModelArgs, answers: Sequence[Answer], kl: np.ndarray | None = None) -> np.ndarray:
    """Returns the penalty to subtract from each answer's reward, `[answers]`.

    Long answers cost up to 1 (`rl_overlong_buffer`; DAPO, arXiv 2503.14476, equation 13), truncated ones cost
    `rollout.missing_eos_penalty`.
    kl: each answer's KL to the reference, `[answers]`, to subtract `kl_div_beta` times (`rl_kl_in_reward`).
    """
    keys, rollout = ReinforcementKeys.read_from(args), rollout_keys(args)
    unfinished = np.array([not answer.finished for answer in answers], np.float64)
    penalty = unfinished * (rollout["missing_eos_penalty"] or 0.0) + (0.0 if kl is None else keys.kl_div_beta * kl)
    if keys.rl_overlong_buffer is None:
        return penalty
    lengths = np.array([answer.length for answer in answers], np.float64)
    free = rollout["max_completion_length"] - keys.rl_overlong_buffer
    return penalty + np.clip((lengths - free) / keys.rl_overlong_buffer, 0.0, 1.0)


def pairs_of(advantages: Sequence[float], group: int) -> list[int]:
    """Returns the rows to train in online DPO: for each prompt its chosen and its rejected answer, in row
    order.

    For a prompt without such a pair they are its first two rows, whose advantages are 0.
    advantages: 1 (chosen), -1 (rejected) or 0, one per row. group: number of answers per prompt.
    """
    rows = []
    for start in range(0, len(advantages), group):
        chosen = [row for row in range(start, start + group) if advantages[row]]
        rows += chosen or [start, start + 1]
    return rows


def advantages_of(args: NeoXArgs, rewards: np.ndarray, history: Sequence[float]) -> list[float]:
    """Returns the advantages of a generation's answers, computed as the run's loss demands.

    rewards: with penalties subtracted, NaN for none. history: the latest rewards of earlier generations.
    """
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
    """Writes and reads generations of a run as files `NUMBER.json`, on rank 0.

    folder: folder of the files; None: nothing is written.
    steps: number of steps per generation.
    answers: number of answers per generation.
    save_dir: folder of the run's checkpoints; None if this machine has none.
    """

    folder: Path | None
    steps: int
    answers: int
    save_dir: str | None

    def write(self, generation: Generation, saved: Sequence[int]) -> None:
        """Writes the generation to its file, and deletes files of earlier ones that no checkpoint needs to
        resume.

        saved: the steps after which this process has written checkpoints.
        """
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
        """Reads a generation from its file. Raises DataError if the file is missing or belongs to another
        run."""
        file = None if self.folder is None else self.folder / f"{number}.json"
        if file is None or not file.is_file():
            raise DataError(
                f"{file}: missing, but the checkpoint lies between two steps of a generation, whose answers are in "
                f"this file; restore the file, or set iteration to a checkpoint at a multiple of {self.steps}"
            )
        try:
            generation = Generation.from_json(parse_json(file.read_bytes()))
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise DataError(
                f"{file}: damaged ({problem}); restore the file, or set iteration to a checkpoint at a multiple of "
                f"{self.steps}"
            ) from problem
        if (generation.number, len(generation.answers)) != (number, self.answers):
            raise DataError(
                f"{file}: holds {len(generation.answers)} answers of generation {generation.number}, but expected "
                f"{self.answers} answers of generation {number}: the file is of another run; set log_dir to this run's "
                "folder"
            )
        return generation
