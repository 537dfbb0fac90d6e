"""Next-token prediction."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from megatron.data import Batch
from megatron.mpu import token_logprobs
from megatron.objectives.objective import Objective


def _weight(batch: Batch) -> Tensor:
    """Number of tokens that count."""
    return batch.loss_weights.sum().float()


def _loss_sum(logits: Tensor, batch: Batch, group: dist.ProcessGroup | None) -> Tensor:
    """Negative log-likelihood of the labels that count, summed in fp32."""
    logprobs = token_logprobs(logits, batch.labels.t(), group)
    return -(logprobs * batch.loss_weights.t()).sum()


LANGUAGE_MODELLING = Objective(_weight, _loss_sum)
