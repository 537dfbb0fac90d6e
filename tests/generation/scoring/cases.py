"""Requests to score, and models to score them with, also on ranks of the worker pool."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.data import Batch
from megatron.generation.scoring.logprobs import ContinuationScore, ScoreRequest, score
from megatron.model import Model
from tests.generation.models import UNTIED as PLAIN
from tests.generation.models import random_model

COLUMNS = 50  # of 64 rows of vocabulary
_DYNAMIC = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16}}
UNTIED = {**PLAIN, "dynamic": {**PLAIN["llama"], **_DYNAMIC}, "dynamic hybrid": {**PLAIN["hybrid"], **_DYNAMIC}}


def some_requests(vocabulary: int, positions: int, seed: int = 0) -> list[ScoreRequest]:
    """Contexts that come back, single tokens, continuations that begin others or repeat them, long ones."""
    draw = random.Random(seed)
    texts = [[draw.randrange(vocabulary) for _ in range(n)] for n in (1, 2, 5, 9, 12, positions // 2)]
    requests: list[ScoreRequest] = []
    for i in range(54):
        context = draw.choice(texts)
        length = min(draw.choice([1, 1, 2, 5, 9, positions]), positions + 1 - len(context))
        continuation = [draw.randrange(vocabulary) for _ in range(length)]
        requests.append((context, continuation))
        if i % 7 == 0:
            requests += [(context, continuation[: length // 2 + 1]), (context, continuation)]
        if i % 11 == 0:
            requests.append((context, [*continuation[:-1], 3]))
    return requests


def model_of(values: dict[str, Any], world_size: int = 1) -> Model:
    return random_model(values, world_size, 512, COLUMNS)


def logits_after(model: Model, tokens: list[int], first: int) -> Tensor:
    """Of one whole text, from the token after the first `first`: `[len(tokens) - first + 1, COLUMNS]`."""
    one = torch.tensor([tokens])
    with torch.no_grad():
        logits = model.stage(None, Batch(one, one, one))
    assert isinstance(logits, Tensor)
    return logits[first - 1 :, 0, :COLUMNS]


def one_by_one(model: Any, requests: list[ScoreRequest],
               logits_of: Callable[..., Tensor] = logits_after) -> list[ContinuationScore]:  # fmt: skip
    """Each as a text of its own, in one process."""
    scores = []
    for context, continuation in requests:
        logits = logits_of(model, [*context, *continuation][:-1], len(context)).double().log_softmax(-1)
        labels = torch.tensor(continuation)
        logprobs = logits.gather(1, labels.unsqueeze(1)).squeeze(1)
        scores.append(ContinuationScore(logprobs.tolist(), (logits.argmax(-1) == labels).tolist()))
    return scores


def assert_same(ours: list[ContinuationScore], theirs: list[ContinuationScore], tolerance: float = 1e-5) -> None:
    assert len(ours) == len(theirs)
    for actual, other in zip(ours, theirs, strict=True):
        assert actual.greedy == other.greedy
        torch.testing.assert_close(torch.tensor(actual.logprobs), torch.tensor(other.logprobs), rtol=0, atol=tolerance)


def scored(rank: int, world_size: int, layout: dict[str, Any], names: list[str]) -> dict[str, list[ContinuationScore]]:
    """For the pool: `some_requests` of each model, in one process also in small batches."""
    scores = {}
    for name in names:
        model = model_of({**UNTIED[name], **layout}, world_size)
        requests = some_requests(COLUMNS, model.positions)
        scores[name] = score(model, requests)
        if world_size == 1:
            assert_same(score(model, requests, batch_size=2), scores[name])
    return scores
