"""What the objectives of preferences share: what the answers of a batch add up to, these answers as the policy scores
them, and TRL's metrics of them."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.data import Batch
from megatron.mpu import HeadInput, token_logprobs, token_logprobs_and_statistics


def label_logprobs(
    head: HeadInput, batch: Batch, group: dist.ProcessGroup | None, columns: int | None = None
) -> Tensor:
    """log p(label) `[batch, seq]` fp32; group, columns: as of `token_logprobs`."""
    return token_logprobs(head.logits(), batch.labels.t(), group, columns).t()


def answer_sums(values: Tensor, batch: Batch) -> Tensor:
    """Sum of `values` `[batch, seq]` over the weighted places of each answer, fp32 `[n]`.

    Each answer is summed by itself and not by scattered additions, whose order a GPU does not keep.
    """
    assert batch.response_ids is not None and batch.preference_labels is not None
    numbers = torch.arange(len(batch.preference_labels), device=values.device)
    places = (batch.response_ids == numbers.view(-1, 1, 1)) & (batch.loss_weights > 0)
    return torch.where(places, values.float(), 0.0).flatten(1).sum(1)


def answer_lengths(batch: Batch) -> Tensor:
    """Number of weighted places of each answer, fp32 `[n]`."""
    return answer_sums(torch.ones_like(batch.loss_weights, dtype=torch.float32), batch)


@dataclass(frozen=True)
class Answers:
    """The answers of a batch under the policy, fp32 `[n]`. score: summed log-probabilities, count: of weighted places;
    entropy, logits, top: sums over these places of the entropy, the mean logit and of being the likeliest token.
    logprobs `[batch, seq]` and score have gradients."""

    logprobs: Tensor
    score: Tensor
    count: Tensor
    entropy: Tensor
    logits: Tensor
    top: Tensor

    @property
    def average(self) -> Tensor:
        """Mean log-probability of a token."""
        return self.score / self.count.clamp(min=1.0)


def read_answers(
    head: HeadInput, batch: Batch, labels: Tensor, group: dist.ProcessGroup | None, columns: int | None = None
) -> Answers:
    """labels: `[batch, seq]`; group, columns: as of `token_logprobs`."""
    found, statistics = token_logprobs_and_statistics(head.logits(), labels.t(), group, columns)
    logprobs = found.t()
    more = (answer_sums(values.t(), batch) for values in statistics)
    return Answers(logprobs, answer_sums(logprobs, batch), answer_lengths(batch), *more)


def reference_scores(batch: Batch) -> Tensor:
    """`batch.reference_logprobs`, which must be there by now."""
    if batch.reference_logprobs is None:
        raise ValueError("this loss compares with a reference model, and the batch has no log-probabilities of one")
    return batch.reference_logprobs


def mean_of(values: Tensor, chosen: Tensor) -> Tensor:
    """Sum and number of the values that are `chosen` (boolean), as a metric: fp32 `[2]`."""
    return torch.stack([torch.where(chosen, values.detach().float(), 0.0).sum(), chosen.sum().float()])


def _per_place(sums: Tensor, counts: Tensor, chosen: Tensor) -> Tensor:
    return torch.stack([torch.where(chosen, values, 0.0).sum() for values in (sums, counts)])


TOKEN_METRICS = ("logps/chosen", "logps/rejected", "logits/chosen", "logits/rejected", "entropy")


def token_metrics(answers: Answers, logps: Tensor, chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """`TOKEN_METRICS`. logps: those to show, `[n]`; chosen, rejected: which answers are, boolean `[n]`."""
    return {
        "logps/chosen": mean_of(logps, chosen),
        "logps/rejected": mean_of(logps, rejected),
        "logits/chosen": _per_place(answers.logits, answers.count, chosen),
        "logits/rejected": _per_place(answers.logits, answers.count, rejected),
        "entropy": _per_place(answers.entropy, answers.count, chosen | rejected),
    }


def token_accuracy(answers: Answers, chosen: Tensor) -> Tensor:
    """Share of places at which the `chosen` answers' token is the likeliest, as a metric."""
    return _per_place(answers.top, answers.count, chosen)
