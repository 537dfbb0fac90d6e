"""Helpers that the losses of responses share: sums over a response's tokens, scores by the policy, TRL's
metrics.

Also measures how far log-probabilities of the sampler and the trainer are apart.
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
    """Returns log p(label) of every token, `[batch, seq]` fp32; 0 at positions that are not in
    `Batch.loss_places`.

    group: the tensor-parallel ranks, None for one. columns: vocabulary columns in the softmax; None: all.
    temperature: divides the logits.
    """
    return token_logprobs(head, batch.labels.t(), group, columns, batch.loss_places, temperature).t()


def response_sums(values: Tensor, batch: Batch) -> Tensor:
    """Returns the sum of `values` `[batch, seq]` over the trained tokens of each response, fp32 `[n]`.

    Each response is summed on its own, because scatter-adds have no fixed order on a GPU.
    """
    responses = batch_responses(batch)
    numbers = torch.arange(len(responses.preference_labels), device=values.device)
    places = (responses.response_ids == numbers.view(-1, 1, 1)) & (batch.loss_weights > 0)
    return torch.where(places, values.float(), 0.0).flatten(1).sum(1)


def response_lengths(batch: Batch) -> Tensor:
    """Returns the number of trained tokens (loss weight 1) of each response, fp32 `[n]`."""
    return response_sums(torch.ones_like(batch.loss_weights, dtype=torch.float32), batch)


@dataclass(frozen=True)
class ResponseScores:
    """Scores of a batch's n responses under the trained model, fp32 `[n]`. Only logprobs and score have
    gradients.

    logprobs: log p(label) of all tokens, `[batch, seq]`.
    score: sum of log-probabilities over a response's trained tokens.
    count: number of a response's trained tokens.
    entropy: sum over the trained tokens of the entropy of the model's distribution.
    logits: sum over the trained tokens of the mean logit.
    top: number of trained tokens to which the model gives the highest probability.
    """

    logprobs: Tensor
    score: Tensor
    count: Tensor
    entropy: Tensor
    logits: Tensor
    top: Tensor

    @property
    def average(self) -> Tensor:
        """The mean log-probability of a trained token, for each response, `[n]`."""
        return self.score / self.count.clamp(min=1.0)


def score_responses(
    head: HeadInput,
    batch: Batch,
    labels: Tensor,
    group: dist.ProcessGroup | None,
    columns: int | None = None,
    places: Tensor | None = None,
) -> ResponseScores:
    """Returns the scores of a batch's responses under the trained model.

    labels: `[batch, seq]`, already shifted. group: the tensor-parallel ranks, None for one.
    columns: vocabulary columns in the softmax; None: all. places: compute only these positions; None: all.
    """
    transposed, statistics = token_logprobs_and_statistics(head, labels.t(), group, columns, places)
    logprobs = transposed.t()
    sums = (response_sums(values.t(), batch) for values in statistics)
    return ResponseScores(logprobs, response_sums(logprobs, batch), response_lengths(batch), *sums)


def reference_logprobs(batch: Batch) -> Tensor:
    """Returns the reference model's log-probability of each response. Raises ValueError if the batch has
    none."""
    logprobs = batch_responses(batch).reference_logprobs
    if logprobs is None:
        raise ValueError(
            "this loss compares with a reference model, but Responses.reference_logprobs is None: fill it with "
            "Objective.with_reference before the loss"
        )
    return logprobs


def with_reference_sums(batches: list[Batch], reference: Reference) -> list[Batch]:
    """Returns the batches with the reference model's log-probability of each response filled in.

    It fills `Responses.reference_logprobs` of each batch and of its `Responses.kl_batch`.
    """
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
"""Name of a metric: the mean over tokens of |log p by the trainer - log p by the sampler|."""


def sampler_difference(logprobs: Tensor, sampler_logprobs: Tensor, trained: Tensor) -> dict[str, Tensor]:
    """Returns metrics of the absolute difference between log-probabilities of trainer and sampler.

    Only trained tokens count. The metric `DIFFERENCE` is the mean, as (sum, count); the name with suffix
    `_max` is the maximum.
    logprobs, sampler_logprobs: log p(label), `[batch, seq]`. trained: boolean, of the same shape.
    """
    difference = torch.where(trained, logprobs - sampler_logprobs, 0.0).abs()
    return {DIFFERENCE: torch.stack([difference.sum(), trained.sum().float()]), f"{DIFFERENCE}_max": difference.max()}


def sum_and_count(values: Tensor, chosen: Tensor) -> Tensor:
    """Returns a metric as (sum, number) of the values where the boolean `chosen` is true, fp32 `[2]`."""
    return torch.stack([torch.where(chosen, values.detach().float(), 0.0).sum(), chosen.sum().float()])


def _per_token(sums: Tensor, counts: Tensor, chosen: Tensor) -> Tensor:
    """Returns a per-token metric of the chosen responses, fp32 `[2]`: (sum of `sums`, sum of `counts`).

    sums: the metric summed over each response's tokens. counts: number of tokens of each response.
    """
    return torch.stack([torch.where(chosen, values, 0.0).sum() for values in (sums, counts)])


TOKEN_METRICS = ("logps/chosen", "logps/rejected", "logits/chosen", "logits/rejected", "entropy")


def token_metrics(responses: ResponseScores, logps: Tensor, chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Returns the metrics named in `TOKEN_METRICS`, each as (sum, divisor).

    logps: log-probability of each response, to be logged, `[n]`. chosen, rejected: boolean masks of
        responses, `[n]`.
    """
    return {
        "logps/chosen": sum_and_count(logps, chosen),
        "logps/rejected": sum_and_count(logps, rejected),
        "logits/chosen": _per_token(responses.logits, responses.count, chosen),
        "logits/rejected": _per_token(responses.logits, responses.count, rejected),
        "entropy": _per_token(responses.entropy, responses.count, chosen | rejected),
    }


def token_accuracy(responses: ResponseScores, chosen: Tensor) -> Tensor:
    """Returns a metric as (sum, count): how many tokens of the `chosen` responses the model predicts as most
    likely.

    chosen: boolean mask of responses, `[n]`.
    """
    return _per_token(responses.top, responses.count, chosen)


def last_places(batch: Batch) -> Tensor:
    """Returns the position of each response's last token, `[n]` int64; 0 for a response without tokens.

    Positions are indices into the flattened `[seq, batch]`.
    """
    responses = batch_responses(batch)
    response_of = responses.response_ids.t().reshape(-1)
    places = torch.arange(len(response_of), device=response_of.device)
    numbers = torch.arange(len(responses.preference_labels), device=response_of.device)
    return torch.where(response_of == numbers.unsqueeze(1), places, 0).amax(1)


def response_scores(head: HeadInput, batch: Batch, group: dist.ProcessGroup | None) -> Tensor:
    """Returns the reward model's score of each response, read at its last token, fp32 `[n]`.

    group: the tensor-parallel ranks, None for one.
    """
    return token_scores(head, last_places(batch), group)
