"""Shared parts of the losses of responses: sums over tokens, the policy's scores, TRL's metrics.

It also measures how far the sampler's log-probabilities are from the trainer's.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.data import Batch
from megatron.data.preferences.responses import batch_responses, with_responses
from megatron.mpu import HeadInput, token_logprobs, token_logprobs_and_statistics, token_scores
from megatron.objectives.objective import Reference


def label_logprobs(
    head: HeadInput, batch: Batch, group: dist.ProcessGroup | None, columns: int | None = None, temperature: float = 1.0
) -> Tensor:
    """Returns log p(label) of every token, `[batch, seq]` fp32; 0 outside `Batch.loss_places`.

    group, columns, temperature: as in `token_logprobs`.
    """
    return token_logprobs(head, batch.labels.t(), group, columns, batch.loss_places, temperature).t()


def response_sums(values: Tensor, batch: Batch) -> Tensor:
    """Returns the sum of `values` `[batch, seq]` over the trained tokens of each response, fp32 `[n]`.

    It sums each response separately: scattered additions have no fixed order on a GPU.
    """
    responses = batch_responses(batch)
    numbers = torch.arange(len(responses.preference_labels), device=values.device)
    places = (responses.response_ids == numbers.view(-1, 1, 1)) & (batch.loss_weights > 0)
    return torch.where(places, values.float(), 0.0).flatten(1).sum(1)


def response_lengths(batch: Batch) -> Tensor:
    """The number of tokens of each response whose loss weight is 1, fp32 `[n]`."""
    return response_sums(torch.ones_like(batch.loss_weights, dtype=torch.float32), batch)


@dataclass(frozen=True)
class ResponseScores:
    """The responses of a batch under the policy, fp32 `[n]` each. Only logprobs and score have gradients.

    logprobs: log p(label) of all tokens, `[batch, seq]`.
    score: sum of logprobs over the trained tokens of a response.
    count: number of its trained tokens.
    entropy: sum of the entropy over the same tokens.
    logits: sum of the mean logit.
    top: number of tokens whose label is the likeliest token.
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
    """Returns the scores of a batch's responses under the policy.

    labels: `[batch, seq]`, already shifted. group, columns, places: as in `token_logprobs`.
    """
    transposed, statistics = token_logprobs_and_statistics(head, labels.t(), group, columns, places)
    logprobs = transposed.t()
    sums = (response_sums(values.t(), batch) for values in statistics)
    return ResponseScores(logprobs, response_sums(logprobs, batch), response_lengths(batch), *sums)


def reference_logprobs(batch: Batch) -> Tensor:
    """Returns `Responses.reference_logprobs`. Raises ValueError if the batch has none."""
    logprobs = batch_responses(batch).reference_logprobs
    if logprobs is None:
        raise ValueError("this loss needs a reference model's log-probabilities, and the batch has none")
    return logprobs


def with_reference_sums(batches: list[Batch], reference: Reference) -> list[Batch]:
    """Returns the batches, and their `Responses.kl_batch`, with `Responses.reference_logprobs`."""
    if not batches:
        return []
    sums = [response_sums(v, b) for v, b in zip(reference.logprobs(batches), batches, strict=True)]
    kl_batches = [kl for batch in batches if (kl := batch_responses(batch).kl_batch) is not None]
    scored = iter(with_reference_sums(kl_batches, reference))
    return [
        with_responses(b, reference_logprobs=v, kl_batch=None if batch_responses(b).kl_batch is None else next(scored))
        for b, v in zip(batches, sums, strict=True)
    ]


DIFFERENCE = "sampling/logp_difference"
"""The metric of the difference between log-probabilities of sampler and trainer, a mean over tokens."""


def sampler_difference(logprobs: Tensor, sampler_logprobs: Tensor, trained: Tensor) -> dict[str, Tensor]:
    """Returns the absolute difference between log-probabilities of trainer and sampler over trained tokens.

    `DIFFERENCE` is its mean (a sum and a count), `DIFFERENCE` with suffix _max its maximum. logprobs: the
    trainer's for the labels, `[batch, seq]`; sampler_logprobs: the sampler's; trained: boolean, of the same
    shape.
    """
    difference = torch.where(trained, logprobs - sampler_logprobs, 0.0).abs()
    return {DIFFERENCE: torch.stack([difference.sum(), trained.sum().float()]), f"{DIFFERENCE}_max": difference.max()}


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


def last_places(batch: Batch) -> Tensor:
    """The position of each response's last token, `[n]` int64, row-major among `[seq, batch]`; 0 for one
    without tokens."""
    responses = batch_responses(batch)
    response_of = responses.response_ids.t().reshape(-1)
    places = torch.arange(len(response_of), device=response_of.device)
    numbers = torch.arange(len(responses.preference_labels), device=response_of.device)
    return torch.where(response_of == numbers.unsqueeze(1), places, 0).amax(1)


def response_scores(head: HeadInput, batch: Batch, group: dist.ProcessGroup | None) -> Tensor:
    """Returns the score of each response, read at its last token, fp32 `[n]`. group: the tensor ranks."""
    return token_scores(head, last_places(batch), group)
