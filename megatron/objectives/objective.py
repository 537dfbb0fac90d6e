"""What an objective is: how much a batch weighs, and its summed loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from megatron.data import Batch


@dataclass(frozen=True)
class Objective:
    """Two pure functions; the loss of an optimizer step is the sum of `loss_sum` over the sum of `weight`, both over
    all of its micro-batches and ranks, so that any split of the step gives the same number.

    weight: of a batch, scalar fp32 (tokens, or pairs); known before the forward pass, since every micro-batch's
    gradient is scaled by the step's total.
    loss_sum: of logits `[seq, batch, vocab/T]`, batch and tensor group (None for one rank), scalar fp32.
    """

    weight: Callable[[Batch], Tensor]
    loss_sum: Callable[[Tensor, Batch, dist.ProcessGroup | None], Tensor]
