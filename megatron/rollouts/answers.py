"""Answers, and the rows of a batch that are made of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from megatron.data import Batch
from megatron.data.batch import RolloutValues, collate_samples
from megatron.data.labels import MASKED
from megatron.data.packed_dataset import TokenSample


@dataclass(frozen=True)
class Transcript:
    """A conversation with an environment (`rollout.environment`).

    prompt: a text or messages, with what `reset` added; messages: of both sides after it; reward: the sum of
    what steps gave, None where the environment failed; failure: why, in one line.
    """

    prompt: str | list[dict[str, Any]]
    messages: list[dict[str, Any]]
    reward: float | None
    failure: str | None

    @property
    def turns(self) -> int:
        """The number of turns that the model had in the conversation."""
        return sum(message["role"] == "assistant" for message in self.messages)


@dataclass(frozen=True)
class Answer:
    """What was written to a prompt.

    prompt: its tokens. tokens: those of the answer, one that ends it among them, and of an environment;
    logprobs: of each, as it was drawn, 0 of an environment's; finished: whether it ended by itself, and not
    for want of room; loss_mask: which tokens the model wrote, None for all; transcript: of a conversation.
    """

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    finished: bool
    loss_mask: list[bool] | None = None
    transcript: Transcript | None = None

    @property
    def length(self) -> int:
        """Tokens that the model wrote."""
        return len(self.tokens) if self.loss_mask is None else sum(self.loss_mask)


def row_of(answer: Answer, width: int, trained: bool = True) -> TokenSample:
    """Prompt and answer as a row of `width` + 1 places, of which those that the model wrote are trained, or
    none."""
    tokens, labels = np.zeros(width + 1, np.int64), np.full(width + 1, MASKED, np.int64)
    start, filled = len(answer.prompt), len(answer.prompt) + len(answer.tokens)
    tokens[:filled] = answer.prompt + answer.tokens
    if trained:
        written = np.ones(len(answer.tokens), bool) if answer.loss_mask is None else np.array(answer.loss_mask, bool)
        labels[start:filled] = np.where(written, np.array(answer.tokens, np.int64), MASKED)
    begins = np.zeros(width + 1, bool)
    begins[0] = begins[filled : filled + 1] = True
    return TokenSample(tokens, labels, begins, True, None, filled)


def at_labels(answer: Answer, values: Sequence[float], width: int) -> np.ndarray:
    """Values of the answer's tokens where these are labels, `[width]` float32, 0 elsewhere."""
    row = np.zeros(width, np.float32)
    start = len(answer.prompt) - 1
    row[start : start + len(values)] = values
    return row


def at_tokens(answer: Answer, row: torch.Tensor) -> list[float]:
    """Values at labels, `[width]`, of the answer's tokens: the other way round."""
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
    ended_alone: bool = False,
    seed: int = 0,
) -> Batch:
    """A micro-batch of answers, one a row of `width` tokens.

    rewards: NaN for none. old_logprobs: of each answer's tokens by the trainer, where steps have been taken
    since. all_places: places that are not trained go through the head too, so that products have one shape.
    ended_alone: only answers that ended are trained.
    """
    rows = [row_of(answer, width, answer.finished or not ended_alone) for answer in answers]
    batch = collate_samples(rows, seed=seed)
    drawn = np.stack([at_labels(answer, answer.logprobs, width) for answer in answers])
    old = None
    if old_logprobs is not None:
        scored = [at_labels(answer, values, width) for answer, values in zip(answers, old_logprobs, strict=True)]
        old = torch.from_numpy(np.stack(scored))
    known = RolloutValues(torch.tensor(list(advantages), dtype=torch.float32), torch.from_numpy(drawn), old)
    changes = {"loss_places": None} if all_places else {}
    return Batch(
        **{**vars(batch), "rewards": torch.tensor(list(rewards), dtype=torch.float32), "rollout": known, **changes}
    )


def as_pairs(batch: Batch) -> Batch:
    """A micro-batch of answers as pairs: two rows to each prompt, with the advantages 1 (chosen) and -1
    (rejected), or both 0, which are not trained."""
    assert batch.rollout is not None
    advantages, places = batch.rollout.advantages, torch.arange(batch.tokens.shape[1])
    rows, trained = torch.arange(len(advantages)), advantages != 0
    numbers = torch.where(trained, rows - rows % 2 + (advantages < 0), rows)
    filled = torch.full_like(rows, len(places)) if batch.filled is None else batch.filled
    return replace(
        batch,
        loss_weights=batch.loss_weights * trained.unsqueeze(1),
        response_ids=torch.where(places < filled.unsqueeze(1), numbers.unsqueeze(1), -1),
        preference_labels=trained.float(),
    )
