"""Defines answers that the model has sampled, and builds batches from them."""

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
    """A finished conversation between the model and an environment (`rollout.environment`).

    prompt: a text or messages, including what the environment's `reset` added.
    messages: the messages of both sides after the prompt.
    reward: sum of the rewards of all steps; None if the environment failed.
    failure: reason of the failure, in one line; None without one.
    """

    prompt: str | list[dict[str, Any]]
    messages: list[dict[str, Any]]
    reward: float | None
    failure: str | None

    @property
    def turns(self) -> int:
        """Returns the number of messages that the model wrote in the conversation."""
        return sum(message["role"] == "assistant" for message in self.messages)


@dataclass(frozen=True)
class Answer:
    """The model's answer to a prompt, as tokens.

    prompt: the prompt's tokens.
    tokens: the answer's tokens, including its end token and the tokens that an environment wrote.
    logprobs: log-probability of each token when it was sampled; 0 for an environment's tokens.
    finished: False if the answer was truncated.
    loss_mask: which tokens the model wrote; None: all.
    transcript: the conversation; None without an environment.
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
    """Returns prompt and answer as a row of `width` + 1 tokens, padded at the end.

    trained: make labels of the tokens that the model wrote; else the row has no labels.
    """
    written = True if answer.loss_mask is None else answer.loss_mask
    return answer_row(answer.prompt, answer.tokens, width + 1, trained and written)


def at_labels(answer: Answer, values: Sequence[float], width: int) -> np.ndarray:
    """Converts per-token values of an answer to a row `[width]` float32, each at the position whose label is
    the token.

    Other positions are 0. Position i of a row has token i + 1 as its label.
    """
    row = np.zeros(width, np.float32)
    start = len(answer.prompt) - 1
    row[start : start + len(values)] = values
    return row


def at_tokens(answer: Answer, row: torch.Tensor) -> list[float]:
    """Inverts `at_labels`: returns the values of an answer's tokens from a row `[width]` of values at
    labels."""
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
    """Builds a micro-batch of answers, one answer per row of `width` tokens.

    rewards: one per answer; NaN for answers without a reward.
    old_logprobs: log-probabilities of each answer's tokens by the trainer before the first step on these
        answers; needed only if weights have changed since sampling.
    all_places: compute the output layer at untrained positions too, so that shapes stay the same.
    finished_only: do not train truncated answers.
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
    """Converts a micro-batch of answers to preference pairs: each two adjacent rows are a pair.

    The rows' advantages are 1 (chosen) and -1 (rejected). Pairs whose advantages are both 0 are not trained.
    """
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
