"""Next-token prediction."""

from __future__ import annotations

from functools import partial

import torch.distributed as dist
from torch import Tensor

from megatron.data import Batch
from megatron.mpu import token_logprobs, token_logprobs_and_sums
from megatron.objectives.objective import Objective


def _weight(batch: Batch) -> Tensor:
    """Number of tokens that count."""
    return batch.loss_weights.sum().float().view(1)


def _loss_sum(
    logits: Tensor, batch: Batch, group: dist.ProcessGroup | None, z_loss: float = 0.0, dft: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of the labels that count, summed in fp32.

    z_loss: times logsumexp^2 of the same tokens (PaLM, arXiv 2204.02311, section 5): in the gradient, while the value
    stays the likelihood alone, which is what runs are compared by. dft: each token's times its own probability, which
    has no gradient (dynamic fine-tuning, arXiv 2508.05629).
    """
    weights: Tensor = batch.loss_weights.t()
    if z_loss == 0.0:
        logprobs = token_logprobs(logits, batch.labels.t(), group)
        return -(logprobs * (weights * logprobs.detach().exp() if dft else weights)).sum().view(1), {}
    logprobs, sums = token_logprobs_and_sums(logits, batch.labels.t(), group)
    extra = z_loss * (sums.square() * weights).sum()
    return (-(logprobs * weights).sum() + (extra - extra.detach())).view(1), {}


def language_modelling(z_loss: float = 0.0, *, dft: bool = False) -> Objective:
    """The objective with this much z-loss, or of dynamic fine-tuning."""
    return Objective(_weight, partial(_loss_sum, z_loss=z_loss, dft=dft))


LANGUAGE_MODELLING = language_modelling()
