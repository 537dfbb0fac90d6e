"""Next-token prediction."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.data import Batch
from megatron.mpu import token_logprobs, token_logprobs_and_statistics, token_logprobs_and_sums
from megatron.mpu.cross_entropy import TokenStatistics
from megatron.objectives.objective import Objective

METRICS = ("entropy", "mean_token_accuracy")


def _weight(batch: Batch) -> Tensor:
    """Number of tokens that count."""
    return batch.loss_weights.sum().float().view(1)


def _loss_sum(
    logits: Tensor,
    batch: Batch,
    group: dist.ProcessGroup | None,
    z_loss: float = 0.0,
    dft: bool = False,
    statistics: bool = False,
    columns: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of the labels that count, summed in fp32.

    z_loss: times logsumexp^2 of the same tokens (PaLM, arXiv 2204.02311, section 5): in the gradient, while the value
    stays the likelihood alone, which is what runs are compared by. dft: each token's times its own probability, which
    has no gradient (dynamic fine-tuning, arXiv 2508.05629). columns: as of `token_logprobs`.
    """
    weights, labels = batch.loss_weights.t(), batch.labels.t()
    if z_loss != 0.0:
        logprobs, sums = token_logprobs_and_sums(logits, labels, group, columns)
        found = token_logprobs_and_statistics(logits.detach(), labels, group, columns)[1] if statistics else None
        extra = z_loss * (sums.square() * weights).sum()
        loss = -(logprobs * weights).sum() + (extra - extra.detach())
        return loss.view(1), _metrics(found, weights)
    if statistics:
        logprobs, found = token_logprobs_and_statistics(logits, labels, group, columns)
    else:
        logprobs, found = token_logprobs(logits, labels, group, columns), None
    loss = -(logprobs * (weights * logprobs.detach().exp() if dft else weights)).sum()
    return loss.view(1), _metrics(found, weights)


def _metrics(found: TokenStatistics | None, weights: Tensor) -> dict[str, Tensor]:
    if found is None:
        return {}
    count = weights.sum().float()
    sums = (found.entropy * weights).sum(), (found.is_top * weights).sum()
    return {name: torch.stack([value, count]) for name, value in zip(METRICS, sums, strict=True)}


def language_modelling(
    z_loss: float = 0.0, *, dft: bool = False, statistics: bool = False, columns: int | None = None
) -> Objective:
    """The objective with this much z-loss, or of dynamic fine-tuning; with statistics, also `METRICS`."""
    loss_sum = partial(_loss_sum, z_loss=z_loss, dft=dft, statistics=statistics, columns=columns)
    return Objective(_weight, loss_sum, METRICS if statistics else ())


LANGUAGE_MODELLING = language_modelling()
