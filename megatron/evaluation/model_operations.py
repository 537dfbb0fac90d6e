"""The operations that all ranks run for an evaluation: score continuations, generate text."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.distributed import run_on_all_ranks
from megatron.generation import Batcher, Request
from megatron.generation.batching.memory_budget import ForwardBudget, forward_budget
from megatron.generation.complete import MAXIMUM_ROWS
from megatron.generation.scoring.logprobs import ContinuationScore, score
from megatron.model import Model


class ModelOperations:
    """The operations that rank 0's lm-eval thread calls on all ranks. The first `score` measures how many
    tokens fit a forward pass."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._budget: ForwardBudget | None = None

    def operations(self) -> Mapping[str, Callable[..., Any]]:
        """Returns the operations that `call` can run on all ranks, by name."""
        return {"score": self.score, "generate": self.generate}

    def score(self, requests: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[ContinuationScore]:
        """Returns the scores of continuations. requests: pairs (token ids of a context, token ids of its
        continuation)."""
        args = self.model.args
        if self._budget is None:
            self._budget = forward_budget(self.model, None if args.eval_batch_size == "auto" else args.eval_batch_size)
        return score(self.model, requests, overlong=args.eval_overlong, budget=self._budget)

    def generate(self, requests: Sequence[Request]) -> list[str]:
        """Generates a text for each request, without its stop text, and returns all texts on every rank.

        Data-parallel ranks divide the requests. In lockstep (ZeRO 3, expert parallelism) each rank runs all
        of them.
        """
        groups = self.model.groups
        rank, size = (0, 1) if self.model.lockstep else (groups.rank("data"), groups.size("data"))

        def run() -> dict[int, str]:
            local_requests = range(rank, len(requests), size)
            tokens = sum(len(requests[i].tokens) + requests[i].maximum_tokens for i in local_requests)
            batcher = Batcher(self.model, maximum_rows=min(MAXIMUM_ROWS, max(1, len(local_requests))), tokens=tokens)
            numbers = {batcher.add(requests[i]): i for i in local_requests}
            texts = dict.fromkeys(numbers.values(), "")
            while batcher.busy:
                for event in batcher.step():
                    texts[numbers[event.id]] += event.text
            return texts

        all_texts = {i: text for texts in run_on_all_ranks(groups, run) for i, text in texts.items()}
        return [all_texts[i] for i in range(len(requests))]
