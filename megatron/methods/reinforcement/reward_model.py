"""A reward model (`reward_model`) that runs on the same ranks as the model under training."""

import math
from collections.abc import Sequence
from pathlib import Path

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
from megatron.methods.reinforcement.keys import ReinforcementKeys
from megatron.methods.reinforcement.rewards import Failure

NAME = "reward_model"  # as metrics and failures call it


class RewardModel:
    """Scores each answer at its last token, after its prompt. All ranks call it together."""

    def __init__(self, run: TrainingRun) -> None:
        """Loads the model in the run's layout. Raises ConfigError if it cannot be read, is a language model,
        has another tokenizer, or reads fewer tokens than a row of the run has."""
        keys = ReinforcementKeys.read_from(run.args)
        name, groups = str(keys.reward_model), run.groups.with_replicated_experts()
        try:
            args = reward_model_args(name, tensor=groups.size("tensor"), pipe=groups.size("pipe"))
            folder = Path(str(args.load))  # one of ours names its tokenizer itself, which is compared as it is loaded
            if is_hf(folder) and not on_rank_zero(groups, lambda: reads_same_tokens(folder, run.tokenizer)):
                vocab = run.args.cite("vocab_file")
                raise run.args.error("reward_model", f"{name} has another tokenizer than this run's vocab_file {vocab}")
            self.model = load_model(args.for_inference(groups.world_size), groups, run.tokenizer, run.logger)
        except CheckpointError as problem:
            raise run.args.error("reward_model", str(problem)) from problem
        if self.model.positions < run.args.seq_length:
            raise run.args.error(
                "reward_model",
                f"{name} reads {self.model.positions} tokens, and a prompt with its answer may have "
                f"{run.args.cite('seq_length')}; lower that",
            )

    def __call__(self, answers: Sequence[Answer]) -> tuple[list[float | None], list[Failure]]:
        """Returns the score of each answer. A non-finite score becomes None and a failure."""
        documents = [np.array(answer.prompt + answer.tokens, np.int64) for answer in answers]
        scores = score_documents(self.model, documents, forward_budget(self.model))  # of what is free now
        failures = [
            Failure(NAME, row, f"scored {'NaN' if math.isnan(score) else score}, in {self.model.args.params_dtype}")
            for row, score in enumerate(scores)
            if not math.isfinite(score)
        ]
        return [score if math.isfinite(score) else None for score in scores], failures
