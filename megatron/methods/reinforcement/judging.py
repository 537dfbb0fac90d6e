"""Judges answers by reward functions, a pairwise judge (`rollout.judge`), or a reward model."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from megatron.callbacks import TrainingRun
from megatron.checkpointing import CheckpointError
from megatron.checkpointing.huggingface import is_hf, reads_same_tokens
from megatron.distributed import on_rank_zero
from megatron.generation.batching.memory_budget import forward_budget
from megatron.generation.model import load_model
from megatron.generation.scoring.reward_file import reward_model_args
from megatron.generation.scoring.rewards import score_documents
from megatron.methods.reinforcement.answers import Answer
from megatron.methods.reinforcement.conversations import ENVIRONMENT
from megatron.methods.reinforcement.keys import ReinforcementKeys, rollout_keys
from megatron.methods.reinforcement.rewards.functions import Completion, Failure, RewardError, RewardFunctions, Scores
from megatron.methods.reinforcement.sampler import AnswerRequest
from megatron.mpu import mix_seed
from megatron.neox_arguments import ModelArgs, NeoXArgs

T = TypeVar("T")
REWARD_MODEL = "reward_model"
"""The name of the reward model's score among the parts of an answer's reward."""


def judge_key(args: ModelArgs) -> str:
    """Returns the configuration key that names what judges answers: `reward_functions` or `rollout.judge`."""
    return "reward_functions" if rollout_keys(args)["judge"] is None else "rollout.judge"


def reported(args: ModelArgs, work: Callable[[], T], key: str | None = None) -> T:
    """Returns `work()`. Converts a RewardError into a ConfigError that names the key and where it was set.

    key: the configuration key; None: `judge_key(args)`.
    """
    try:
        return work()
    except RewardError as problem:
        raise args.error(key or judge_key(args), str(problem)) from problem


def reward_functions(args: NeoXArgs) -> RewardFunctions:
    """Returns an object for the run's reward functions, or for its judge. Their files are loaded later."""
    keys, rollout = ReinforcementKeys.read_from(args), rollout_keys(args)
    judge = rollout["judge"]
    functions = keys.reward_functions or () if judge is None else (judge,)
    other_parts = {REWARD_MODEL: keys.reward_model, ENVIRONMENT: rollout["environment"]}
    for name, entry_name in other_parts.items():
        if entry_name is not None and any(entry.endswith(f":{name}") for entry in functions):
            raise args.error(
                "reward_functions",
                f"a function is called {name}, which is the name of another part of the reward; rename the function",
            )
    make = partial(
        RewardFunctions, functions, timeout_s=keys.reward_timeout_s, workers=keys.reward_workers,
        pairwise=judge is not None, variables=keys.reward_variables or (), hidden=_hidden(args),
    )  # fmt: skip
    return reported(args, make)


def _hidden(args: NeoXArgs) -> list[str]:
    """Returns the folders that programs in answers may not read: prompts with solutions, and earlier
    answers."""
    folders = {Path.cwd(), *(Path(name).resolve().parent for name in rollout_keys(args)["prompts"])}
    if args.save is not None:
        folders.add(Path(args.save).resolve())
    return sorted(map(str, folders))


def check_variables(args: ModelArgs) -> None:
    """Checks that all variables in `reward_variables` are set on rank 0, which starts reward functions.

    Raises ConfigError for an unset one.
    """
    for name in ReinforcementKeys.read_from(args).reward_variables or ():
        if name not in os.environ:
            raise args.error("reward_variables", f"{name} is not set in the environment of rank 0; export it")


def draw_swaps(seed: int, requests: Sequence[AnswerRequest]) -> list[bool]:
    """Draws at random for each prompt whether the judge sees its second answer first.

    Half of the prompts are swapped, because judges prefer a position. requests: two adjacent answers per
    prompt.
    """
    return [mix_seed(seed, "judge", prompt.number) % 2 == 1 for prompt, _ in requests[::2]]


def compare(
    completions: Sequence[Completion], swapped: Sequence[bool], judge: Callable[[Sequence[Completion]], Scores]
) -> Scores:
    """Has pairs of completions judged, and returns the verdicts as rewards: 1 for the better one, 0 for the
    other.

    Without a verdict both rewards are None.
    completions: two adjacent ones per prompt.
    swapped: for each prompt, whether the judge sees the second completion first.
    judge: function from pairs to scores: the index (0 or 1) of the better completion.
    A failure in the result has the row of its pair's first completion.
    """
    pairs = []
    for left, right, swap in zip(completions[::2], completions[1::2], swapped, strict=True):
        assert isinstance(left.completion, str) and isinstance(right.completion, str)
        texts = (right.completion, left.completion) if swap else (left.completion, right.completion)
        pairs.append(replace(left, completion=texts, completion_ids=[]))
    verdicts = judge(pairs)
    parts: dict[str, list[float | None]] = {}
    for name, winners in verdicts.parts.items():
        parts[name] = []
        for winner, swap in zip(winners, swapped, strict=True):
            second_wins = None if winner is None else (winner == 1.0) != swap
            parts[name] += [None, None] if second_wins is None else [float(not second_wins), float(second_wins)]
    failures = [
        failure if failure.row is None else replace(failure, row=2 * failure.row) for failure in verdicts.failures
    ]
    return Scores(parts, failures)


def failure_of_all(failures: Sequence[Failure], rewards: np.ndarray, answers_each: int = 1) -> Failure | None:
    """Returns the first failure if every answer failed and none has a reward, else None.

    rewards: `[answers]`, NaN for none.
    answers_each: number of answers that each failure covers, from its row on: 2 for a pairwise judge.
    """
    failed = {
        row for failure in failures if failure.row is not None for row in range(failure.row, failure.row + answers_each)
    }
    if not np.isnan(rewards).all() or len(failed) < len(rewards):
        return None
    return next(failure for failure in failures if failure.row is not None)


class RewardModel:
    """Scores each answer by a reward model, which reads prompt and answer. All ranks must call it
    together."""

    def __init__(self, run: TrainingRun) -> None:
        """Loads the reward model in the run's parallel layout.

        Raises ConfigError if the model cannot be read, is a language model, has another tokenizer, or reads
        fewer tokens than a row of the run has.
        """
        name = str(ReinforcementKeys.read_from(run.args).reward_model)
        groups = run.groups.with_replicated_experts()
        try:
            args = reward_model_args(name, tensor=groups.size("tensor"), pipe=groups.size("pipe"))
            folder = Path(str(args.load))  # a native checkpoint names its tokenizer, which load_model compares
            if is_hf(folder) and not on_rank_zero(groups, lambda: reads_same_tokens(folder, run.tokenizer)):
                vocab = run.args.cite("vocab_file")
                raise run.args.error(
                    "reward_model",
                    f"{name} has another tokenizer than this run's vocab_file {vocab}; use a reward model with the "
                    "same one",
                )
            self.model = load_model(args.for_inference(groups.world_size), groups, run.tokenizer, run.logger)
        except CheckpointError as problem:
            raise run.args.error("reward_model", str(problem)) from problem
        if self.model.positions < run.args.seq_length:
            raise run.args.error(
                "reward_model",
                f"{name} reads at most {self.model.positions} tokens, but a prompt with its answer may have seq_length "
                f"{run.args.cite('seq_length')}; lower seq_length, or use another reward model",
            )

    def __call__(self, judged: Scores, answers: Sequence[Answer]) -> Scores:
        """Returns `judged` with the model's score of each answer as one more part.

        A score that is NaN or infinite becomes None and a failure.
        """
        documents = [np.array(answer.prompt + answer.tokens, np.int64) for answer in answers]
        scores = score_documents(self.model, documents, forward_budget(self.model))  # budget: memory free now
        dtype = self.model.args.params_dtype
        failures = [
            Failure(REWARD_MODEL, row, f"its score is {'NaN' if math.isnan(score) else score} in {dtype}")
            for row, score in enumerate(scores)
            if not math.isfinite(score)
        ]
        finite = [score if math.isfinite(score) else None for score in scores]
        return Scores({**judged.parts, REWARD_MODEL: finite}, [*judged.failures, *failures])
