"""Defines the operations that all ranks run for an evaluation: score continuations and generate text."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

from megatron.distributed import run_on_all_ranks
from megatron.generation import Batcher, Request
from megatron.generation.batching.memory_budget import ForwardBudget, forward_budget
from megatron.generation.complete import MAXIMUM_ROWS
from megatron.generation.scoring.logprobs import ContinuationScore, ScoreRequest, score
from megatron.model import Model


def model_operations(model: Model) -> Mapping[str, Callable[..., Any]]:
    """Returns {name: function} for the operations that rank 0's lm-eval thread runs on all ranks.

    `score` takes a list of `ScoreRequest`s and returns their `ContinuationScore`s. `generate` takes a list of
    `Request`s and returns their texts. The first call of `score` measures how many tokens fit in a forward
    pass.
    """
    args = model.args

    @cache
    def budget() -> ForwardBudget:
        return forward_budget(model, None if args.eval_batch_size == "auto" else args.eval_batch_size)

    def scores(requests: Sequence[ScoreRequest]) -> list[ContinuationScore]:
        return score(model, requests, overlong=args.eval_overlong, budget=budget())

    return {"score": scores, "generate": partial(_generate, model)}


def _generate(model: Model, requests: Sequence[Request]) -> list[str]:
    """Generates a text for each request, without its stop string, and returns all texts on every rank.

    Data-parallel ranks share the requests between them. In lockstep (ZeRO 3, expert parallelism) each rank
    runs all requests.
    """
    groups = model.groups
    rank, size = (0, 1) if model.lockstep else (groups.rank("data"), groups.size("data"))

    def run() -> dict[int, str]:
        local_requests = range(rank, len(requests), size)
        tokens = sum(len(requests[i].tokens) + requests[i].maximum_tokens for i in local_requests)
        batcher = Batcher(model, maximum_rows=min(MAXIMUM_ROWS, max(1, len(local_requests))), tokens=tokens)
        numbers = {batcher.add(requests[i]): i for i in local_requests}
        texts = dict.fromkeys(numbers.values(), "")
        while batcher.busy:
            for event in batcher.step():
                texts[numbers[event.id]] += event.text
        return texts

    all_texts = {i: text for texts in run_on_all_ranks(groups, run) for i, text in texts.items()}
    return [all_texts[i] for i in range(len(requests))]
