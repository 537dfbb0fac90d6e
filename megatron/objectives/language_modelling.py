"""Next-token prediction."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from megatron.data import Batch
from megatron.mpu import token_logprobs


class LossOutput(NamedTuple):
    """loss_sum: scalar fp32, summed over weighted tokens; weight_sum: scalar, the number of them."""

    loss_sum: Tensor
    weight_sum: Tensor


def language_modelling(logits: Tensor, batch: Batch, group: dist.ProcessGroup | None) -> LossOutput:
    """Negative log-likelihood of the labels; logits `[seq, batch, vocab/T]`, sums in fp32."""
    logprobs = token_logprobs(logits, batch.labels.t(), group)
    weights = batch.loss_weights.t().float()
    return LossOutput(-(logprobs * weights).sum(), weights.sum())
