"""A reward model beside the model under training (`reward_model`), on the same ranks."""

from collections.abc import Sequence

import numpy as np

from megatron.callbacks import TrainingRun
from megatron.checkpointing import CheckpointError
from megatron.generation.batching.memory_budget import forward_budget
from megatron.generation.model import load_model
from megatron.generation.scoring.reward_file import reward_model_args
from megatron.generation.scoring.rewards import score_documents
from megatron.rollouts.answers import Answer


class RewardModel:
    """Scores answers with their prompts, each at its last token. All ranks call it together."""

    def __init__(self, run: TrainingRun) -> None:
        """Load it in the run's layout. Raises ConfigError for one that cannot be read, that is a language
        model, or that reads fewer tokens than a row of the run has."""
        name, groups = str(run.args.reward_model), run.groups.with_whole_experts()
        try:
            args = reward_model_args(name, tensor=groups.size("tensor"), pipe=groups.size("pipe"))
            self.model = load_model(args.for_inference(groups.world_size), groups, run.tokenizer, run.logger)
        except CheckpointError as problem:
            raise run.args.error("reward_model", str(problem)) from problem
        if self.model.positions < run.args.seq_length:
            raise run.args.error(
                "reward_model",
                f"{name} reads {self.model.positions} tokens, and a prompt with its answer may have "
                f"{run.args.cite('seq_length')}; lower that",
            )

    def __call__(self, answers: Sequence[Answer]) -> list[float]:
        """The score of each answer."""
        documents = [np.array(answer.prompt + answer.tokens, np.int64) for answer in answers]
        return score_documents(self.model, documents, forward_budget(self.model))  # of what is free now
