"""Answers, and the batches built from them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from megatron.data import Batch
from megatron.data.batch import collate_samples
from megatron.data.packed_dataset import TokenSample, answer_row
from megatron.data.preferences.responses import Responses
from megatron.methods.reinforcement.objective import RolloutValues, rollout_values


@dataclass(frozen=True)
class Transcript:
    """A conversation with an environment (`rollout.environment`).

    prompt: a text or messages, including the text or messages that `reset` added.
    messages: of both sides, after the prompt.
    reward: the sum of the steps' rewards; None if the environment failed.
    failure: why it failed, in one line.
    """

    prompt: str | list[dict[str, Any]]
    messages: list[dict[str, Any]]
    reward: float | None
    failure: str | None

    @property
    def turns(self) -> int:
        """Returns the number of turns that the model had in the conversation."""
        return sum(message["role"] == "assistant" for message in self.messages)


@dataclass(frozen=True)
class Answer:
    """An answer to a prompt, as tokens.

    prompt: the prompt's tokens.
    tokens: the answer's, including its end token and the tokens of an environment.
    logprobs: of each token when it was sampled; 0 for an environment's tokens.
    finished: False if the answer was truncated.
    loss_mask: which tokens the model wrote; None: all.
    transcript: the conversation, if there was an environment.
    """

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    finished: bool
    loss_mask: list[bool] | None = None
    transcript: Transcript | None = None

    @property
    def length(self) -> int:
        """Returns the number of tokens that the model wrote."""
        return len(self.tokens) if self.loss_mask is None else sum(self.loss_mask)


def row_of(answer: Answer, width: int, trained: bool = True) -> TokenSample:
    """Returns prompt and answer as a row of `width` + 1 tokens. With `trained` the tokens that the model
    wrote are labels, else none."""
    written = True if answer.loss_mask is None else answer.loss_mask
    return answer_row(answer.prompt, answer.tokens, width + 1, trained and written)


def at_labels(answer: Answer, values: Sequence[float], width: int) -> np.ndarray:
    """Places per-token values of an answer where its tokens are labels: `[width]` float32, 0 elsewhere."""
    row = np.zeros(width, np.float32)
    start = len(answer.prompt) - 1
    row[start : start + len(values)] = values
    return row


def at_tokens(answer: Answer, row: torch.Tensor) -> list[float]:
    """Returns the values of an answer's tokens from values at labels, `[width]`. Undoes `at_labels`."""
    start = len(answer.prompt) - 1
    return row[start : start + len(answer.tokens)].tolist()


def batch_of(
    answers: Sequence[Answer],
    width: int,
    *,
    rewards: Sequence[float],
    advantages: Sequence[float],
    old_logprobs: Sequence[Sequence[float]] | None = None,
    all_places: bool = False,
    finished_only: bool = False,
    seed: int = 0,
) -> Batch:
    """Builds a micro-batch of answers, one per row of `width` tokens.

    rewards: NaN for answers without a reward.
    old_logprobs: the trainer's, per token of each answer, if weights have changed since sampling.
    all_places: the head also computes untrained positions, so that shapes stay the same.
    finished_only: truncated answers are not trained.
    """
    rows = [row_of(answer, width, answer.finished or not finished_only) for answer in answers]
    batch = collate_samples(rows, seed=seed)

    def placed(logprobs: Sequence[Sequence[float]]) -> torch.Tensor:
        rows = [at_labels(answer, values, width) for answer, values in zip(answers, logprobs, strict=True)]
        return torch.from_numpy(np.stack(rows))

    sampled = placed([answer.logprobs for answer in answers])
    old = None if old_logprobs is None else placed(old_logprobs)
    row_advantages, row_rewards = (torch.tensor(list(values), dtype=torch.float32) for values in (advantages, rewards))
    values = RolloutValues(row_advantages, sampled, row_rewards, old)
    return replace(batch, method=values, loss_places=None if all_places else batch.loss_places)


def as_pairs(batch: Batch) -> Batch:
    """Turns a micro-batch of answers into preference pairs, two rows per prompt. Advantages are 1 (chosen)
    and -1 (rejected), or both 0: such pairs are not trained."""
    values, places = rollout_values(batch), torch.arange(batch.tokens.shape[1])
    advantages = values.advantages
    rows, trained = torch.arange(len(advantages)), advantages != 0
    numbers = torch.where(trained, rows - rows % 2 + (advantages < 0), rows)
    filled = torch.full_like(rows, len(places)) if batch.filled is None else batch.filled
    return replace(
        batch,
        loss_weights=batch.loss_weights * trained.unsqueeze(1),
        method=Responses(
            torch.where(places < filled.unsqueeze(1), numbers.unsqueeze(1), -1),
            trained.float(),
            sampler_logprobs=values.sampler_logprobs,
        ),
    )
