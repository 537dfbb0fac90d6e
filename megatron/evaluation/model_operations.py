"""What all ranks do for an evaluation: score continuations, write text."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.distributed import run_on_all_ranks
from megatron.generation import Batcher, Request
from megatron.generation.batching.memory_budget import ForwardBudget, forward_budget
from megatron.generation.scoring.logprobs import ContinuationScore, score
from megatron.model import Model


class EvaluationCancelled(Exception):
    """Nobody waits for the rest of an evaluation."""


class ModelOperations:
    """What `run_rank0_driver` may be asked to run with a model; how much fits a forward is found out once."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._budget: ForwardBudget | None = None

    def names(self) -> Mapping[str, Callable[..., Any]]:
        """As `run_rank0_driver` takes them."""
        return {"score": self.score, "write": self.write}

    def score(self, requests: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[ContinuationScore]:
        """Log-probabilities of continuations of contexts."""
        args = self.model.args
        if self._budget is None:
            self._budget = forward_budget(self.model, None if args.eval_batch_size == "auto" else args.eval_batch_size)
        return score(self.model, requests, overlong=args.eval_overlong, budget=self._budget)

    def write(self, requests: Sequence[Request]) -> list[str]:
        """A text to each, without what ended it, the same on every rank; data-parallel ranks share the requests out,
        unless they run in step."""
        groups = self.model.groups
        rank, size = (0, 1) if self.model.lockstep else (groups.rank("data"), groups.size("data"))

        def run() -> dict[int, str]:
            own = range(rank, len(requests), size)
            tokens = sum(len(requests[i].tokens) + requests[i].maximum_tokens for i in own)
            batcher = Batcher(self.model, tokens=tokens)
            numbers = {batcher.add(requests[i]): i for i in own}
            texts = dict.fromkeys(numbers.values(), "")
            while batcher.busy:
                for event in batcher.step():
                    texts[numbers[event.id]] += event.text
            return texts

        everyone = {i: text for found in run_on_all_ranks(groups, run) for i, text in found.items()}
        return [everyone[i] for i in range(len(requests))]
