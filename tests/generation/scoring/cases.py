"""Requests to score, and models to score them with, also on ranks of the worker pool."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.data import Batch
from megatron.generation.scoring.logprobs import ContinuationScore, ScoreRequest, score
from megatron.model import Model
from tests.generation.models import UNTIED as BASE_MODELS
from tests.generation.models import random_model

COLUMNS = 50  # of 64 rows of vocabulary
_DYNAMIC = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16}}
UNTIED = {
    **BASE_MODELS,
    "dynamic": {**BASE_MODELS["llama"], **_DYNAMIC},
    "dynamic hybrid": {**BASE_MODELS["hybrid"], **_DYNAMIC},
}


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


def logits_after(model: Model, tokens: list[int], num_context: int) -> Tensor:
    """Returns the logits after the context and later tokens: `[len(tokens) - num_context + 1, COLUMNS]`."""
    batch_tokens = torch.tensor([tokens])
    with torch.no_grad():
        logits = model.stage(None, Batch(batch_tokens, batch_tokens, batch_tokens))
    assert isinstance(logits, Tensor)
    return logits[num_context - 1 :, 0, :COLUMNS]


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


def assert_same(actual: list[ContinuationScore], expected: list[ContinuationScore], tolerance: float = 1e-5) -> None:
    assert len(actual) == len(expected)
    for actual_score, reference in zip(actual, expected, strict=True):
        assert actual_score.greedy == reference.greedy
        torch.testing.assert_close(
            torch.tensor(actual_score.logprobs), torch.tensor(reference.logprobs), rtol=0, atol=tolerance
        )


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
