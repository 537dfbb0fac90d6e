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
    return batch.loss_weights.sum().float()


def _loss_sum(logits: Tensor, batch: Batch, group: dist.ProcessGroup | None, z_loss: float = 0.0) -> Tensor:
    """Negative log-likelihood of the labels that count, summed in fp32.

    z_loss: times logsumexp^2 of the same tokens (PaLM, arXiv 2204.02311, section 5): in the gradient, while the value
    stays the likelihood alone, which is what runs are compared by.
    """
    weights = batch.loss_weights.t()
    if z_loss == 0.0:
        return -(token_logprobs(logits, batch.labels.t(), group) * weights).sum()
    logprobs, sums = token_logprobs_and_sums(logits, batch.labels.t(), group)
    extra = z_loss * (sums.square() * weights).sum()
    return -(logprobs * weights).sum() + (extra - extra.detach())


def language_modelling(z_loss: float = 0.0) -> Objective:
    """The objective with this much z-loss."""
    return Objective(_weight, partial(_loss_sum, z_loss=z_loss))


LANGUAGE_MODELLING = language_modelling()
