"""What the losses of answers share: sums over the tokens of each response, the policy's scores of responses,
TRL's metrics, and how far the sampler's log-probabilities are from the trainer's."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.data import Batch
from megatron.mpu import HeadInput, token_logprobs, token_logprobs_and_statistics


def label_logprobs(
    head: HeadInput,
    batch: Batch,
    group: dist.ProcessGroup | None,
    columns: int | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """log p(label) of every token, `[batch, seq]` fp32, or 0 where the batch leaves places out
    (`Batch.loss_places`); group, columns, temperature: as of `token_logprobs`."""
    return token_logprobs(head, batch.labels.t(), group, columns, batch.loss_places, temperature).t()


def response_sums(values: Tensor, batch: Batch) -> Tensor:
    """The sum of `values` `[batch, seq]` over the tokens of each response whose loss weight is 1, fp32 `[n]`.

    Each response is summed by itself and not by scattered additions, whose order a GPU does not keep.
    """
    assert batch.response_ids is not None and batch.preference_labels is not None
    numbers = torch.arange(len(batch.preference_labels), device=values.device)
    places = (batch.response_ids == numbers.view(-1, 1, 1)) & (batch.loss_weights > 0)
    return torch.where(places, values.float(), 0.0).flatten(1).sum(1)


def response_lengths(batch: Batch) -> Tensor:
    """The number of tokens of each response whose loss weight is 1, fp32 `[n]`."""
    return response_sums(torch.ones_like(batch.loss_weights, dtype=torch.float32), batch)


@dataclass(frozen=True)
class ResponseScores:
    """The responses of a batch under the policy, fp32 `[n]` each.

    logprobs: log p(label) of all tokens, `[batch, seq]`.
    score: their sum over the weighted tokens of a response.
    count: number of these tokens. entropy, logits, top: sums over the same tokens of the entropy, of the mean
    logit and of whether the label is the likeliest token. Only logprobs and score have gradients.
    """

    logprobs: Tensor
    score: Tensor
    count: Tensor
    entropy: Tensor
    logits: Tensor
    top: Tensor

    @property
    def average(self) -> Tensor:
        """The mean log-probability of a token of each response, `[n]`."""
        return self.score / self.count.clamp(min=1.0)


def score_responses(
    head: HeadInput,
    batch: Batch,
    labels: Tensor,
    group: dist.ProcessGroup | None,
    columns: int | None = None,
    places: Tensor | None = None,
) -> ResponseScores:
    """The scores of the responses of a batch under the policy.

    labels: `[batch, seq]`, already shifted; group, columns, places: as of `token_logprobs`.
    """
    transposed, statistics = token_logprobs_and_statistics(head, labels.t(), group, columns, places)
    logprobs = transposed.t()
    sums = (response_sums(values.t(), batch) for values in statistics)
    return ResponseScores(logprobs, response_sums(logprobs, batch), response_lengths(batch), *sums)


def reference_logprobs(batch: Batch) -> Tensor:
    """`batch.reference_logprobs`, which must be there by now."""
    if batch.reference_logprobs is None:
        raise ValueError("this loss compares with a reference model, and the batch has no log-probabilities of one")
    return batch.reference_logprobs


DIFFERENCE = "sampling/logp_difference"
"""The metric of the difference between log-probabilities of sampler and trainer, a mean over tokens."""


def sampler_difference(logprobs: Tensor, batch: Batch) -> dict[str, Tensor]:
    """The metric `DIFFERENCE`, and with _max behind its name the largest. logprobs: the trainer's of labels,
    `[batch, seq]`."""
    assert batch.rollout is not None
    trained = batch.loss_weights > 0
    apart = torch.where(trained, logprobs - batch.rollout.sampler_logprobs, 0.0).abs()
    return {DIFFERENCE: torch.stack([apart.sum(), trained.sum().float()]), f"{DIFFERENCE}_max": apart.max()}


def sum_and_count(values: Tensor, chosen: Tensor) -> Tensor:
    """A metric: the sum and the number of the values where `chosen` (boolean) is true, fp32 `[2]`."""
    return torch.stack([torch.where(chosen, values.detach().float(), 0.0).sum(), chosen.sum().float()])


def _per_token(sums: Tensor, counts: Tensor, chosen: Tensor) -> Tensor:
    """A metric: the sum over the chosen responses, and the number of their tokens, fp32 `[2]`."""
    return torch.stack([torch.where(chosen, values, 0.0).sum() for values in (sums, counts)])


TOKEN_METRICS = ("logps/chosen", "logps/rejected", "logits/chosen", "logits/rejected", "entropy")


def token_metrics(responses: ResponseScores, logps: Tensor, chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """The metrics that `TOKEN_METRICS` names, by name.

    logps: the log-probabilities to show, `[n]`; chosen, rejected: which responses are on either side, boolean
    `[n]`.
    """
    return {
        "logps/chosen": sum_and_count(logps, chosen),
        "logps/rejected": sum_and_count(logps, rejected),
        "logits/chosen": _per_token(responses.logits, responses.count, chosen),
        "logits/rejected": _per_token(responses.logits, responses.count, rejected),
        "entropy": _per_token(responses.entropy, responses.count, chosen | rejected),
    }


def token_accuracy(responses: ResponseScores, chosen: Tensor) -> Tensor:
    """A metric: the share of tokens of the `chosen` responses (boolean `[n]`) that are the likeliest ones."""
    return _per_token(responses.top, responses.count, chosen)
