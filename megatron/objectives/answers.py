"""What is read off the labels of a batch, and what an answer of it adds up to."""

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.data import Batch
from megatron.mpu import HeadInput, token_logprobs


def label_logprobs(
    head: HeadInput, batch: Batch, group: dist.ProcessGroup | None, columns: int | None = None
) -> Tensor:
    """log p(label) `[batch, seq]` fp32; group, columns: as of `token_logprobs`."""
    return token_logprobs(head.logits(), batch.labels.t(), group, columns).t()


def answer_sums(values: Tensor, batch: Batch) -> Tensor:
    """Sum of `values` `[batch, seq]` over the weighted places of each answer, fp32 `[n]`.

    Each answer is summed by itself and not by scattered additions, whose order a GPU does not keep.
    """
    assert batch.answers is not None and batch.signs is not None
    numbers = torch.arange(len(batch.signs), device=values.device)
    places = (batch.answers == numbers.view(-1, 1, 1)) & (batch.loss_weights > 0)
    return torch.where(places, values.float(), 0.0).flatten(1).sum(1)


def answer_lengths(batch: Batch) -> Tensor:
    """Number of weighted places of each answer, fp32 `[n]`."""
    return answer_sums(torch.ones_like(batch.loss_weights, dtype=torch.float32), batch)
