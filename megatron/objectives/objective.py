"""What an objective is: how much a batch weighs, and its summed loss."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.data import Batch
from megatron.mpu import HeadInput
from megatron.neox_arguments.keys.losses import TRAIN_IMPLS

# Parts of a loss, fp32 `[k]`; for each metric fp32 `[2]`, a sum and the number it is to be divided by.
Sums = tuple[Tensor, dict[str, Tensor]]
# Scores `[n]` of the answers of batches under the model as it is, without gradients; all ranks ask together.
Score = Callable[[list[Batch]], list[Tensor]]


@dataclass(frozen=True)
class Objective:
    """Pure functions. A loss has k parts; of an optimizer step each part is the sum of its `loss_sum` over the sum of
    its `weight`, both over all micro-batches and ranks, so that any split of the step gives the same number, and the
    loss is the sum of the parts.

    weight: of a batch, fp32 `[k]` (tokens, or pairs); known before the forward pass, since every micro-batch's
    gradient is scaled by the step's total.
    loss_sum: of hidden states with their head, batch and tensor group (None for one rank); `metrics` of it are without
    gradients.
    differences: further metrics, each one mean less another.
    couple: for losses in which the examples of a step meet: from the micro-batches of this rank, their scores and the
    data group, the same micro-batches with `anchor`, before their forward passes.
    """

    weight: Callable[[Batch], Tensor]
    loss_sum: Callable[[HeadInput, Batch, dist.ProcessGroup | None], Sums]
    metrics: tuple[str, ...] = ()
    differences: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    couple: Callable[[list[Batch], Score, dist.ProcessGroup | None], list[Batch]] | None = None

    def add_metrics(self, total: Tensor, found: Mapping[str, Tensor]) -> None:
        """Add what a batch gave to sums and numbers `[metrics, 2]`."""
        if self.metrics:
            total += torch.stack([found[name] for name in self.metrics])

    def means(self, total: Tensor) -> dict[str, Tensor]:
        """The metrics by name, from the sums and numbers `[metrics, 2]` of a step; NaN where nothing was counted."""
        means = dict(zip(self.metrics, (total[:, 0] / total[:, 1]).unbind(), strict=True))
        return means | {name: means[one] - means[other] for name, (one, other) in self.differences.items()}


def loss_function(train_impl: str, loss: str) -> Callable[..., Any]:
    """The function that the table of losses names, by `train_impl` and its own name."""
    file, name = TRAIN_IMPLS[train_impl].losses[loss].function.split(".")
    return getattr(import_module(f"megatron.objectives.{file}"), name)
