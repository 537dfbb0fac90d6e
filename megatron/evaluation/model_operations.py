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
    """The operations on a model that rank 0's lm-eval thread calls on all ranks. How much fits a forward is
    found out once."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._budget: ForwardBudget | None = None

    def by_name(self) -> Mapping[str, Callable[..., Any]]:
        """The operations by the names under which they are called."""
        return {"score": self.score, "generate": self.generate}

    def score(self, requests: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[ContinuationScore]:
        """Score continuations of contexts, each a pair of token ids."""
        args = self.model.args
        if self._budget is None:
            self._budget = forward_budget(self.model, None if args.eval_batch_size == "auto" else args.eval_batch_size)
        return score(self.model, requests, overlong=args.eval_overlong, budget=self._budget)

    def generate(self, requests: Sequence[Request]) -> list[str]:
        """A text for each request, without what ended it, the same on every rank; data-parallel ranks share
        the requests out, unless they run in lockstep."""
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
