"""What an objective is: the weight of a batch, and its summed loss and metrics."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.data import Batch
from megatron.mpu import HeadInput
from megatron.neox_arguments.keys.losses import TRAIN_IMPLS, Loss

# The parts of a loss, fp32 `[k]`; for each metric a sum and the number that it is divided by, fp32 `[2]`.
LossSums = tuple[Tensor, dict[str, Tensor]]
# From batches to the summed log-probabilities `[n]` of their responses under the current model, without
# gradients; all ranks call it together.
ScoreFunction = Callable[[list[Batch]], list[Tensor]]


@dataclass(frozen=True)
class Objective:
    """An objective is a few pure functions.

    A loss is a sum of k parts. In an optimizer step each part is the sum of its `loss_sum` divided by the sum
    of its `weight`, both over all micro-batches and ranks, so that any split of the step gives the same
    number.

    weight: from a batch to its weight, fp32 `[k]` (a number of tokens, or of pairs). It is known before the
    forward pass, since the gradient of every micro-batch is scaled by the total weight of the step.
    loss_sum: from hidden states with their head, the batch and the tensor group (None for one rank) to the
    summed parts of the loss and to `metrics`, which have no gradients.
    maxima: further metrics of `loss_sum`, scalars, of which a step has the largest.
    differences: further metrics, each the mean of one metric minus that of another.
    step_baselines: for losses that compare an example with values of all examples of the step: from the
    micro-batches of this rank, the function that scores them and the data group to the same micro-batches
    with `Batch.baseline`, before their forward passes. None for all other losses.
    """

    weight: Callable[[Batch], Tensor]
    loss_sum: Callable[[HeadInput, Batch, dist.ProcessGroup | None], LossSums]
    metrics: tuple[str, ...] = ()
    differences: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    step_baselines: Callable[[list[Batch], ScoreFunction, dist.ProcessGroup | None], list[Batch]] | None = None
    maxima: tuple[str, ...] = ()

    def add_metrics(self, total: Tensor, found: Mapping[str, Tensor]) -> None:
        """Add the metrics of one batch to `total`, the sums and numbers `[metrics, 2]` of the step."""
        if self.metrics:
            total += torch.stack([found[name] for name in self.metrics])

    def note_maxima(self, largest: Tensor, found: Mapping[str, Tensor]) -> None:
        """Raise `largest`, `[maxima]`, to those of one batch."""
        if self.maxima:
            torch.maximum(largest, torch.stack([found[name] for name in self.maxima]), out=largest)

    def means(self, total: Tensor) -> dict[str, Tensor]:
        """The metrics by name, from the sums and numbers `[metrics, 2]` of a step; NaN where nothing was
        counted."""
        means = dict(zip(self.metrics, (total[:, 0] / total[:, 1]).unbind(), strict=True))
        return means | {name: means[one] - means[other] for name, (one, other) in self.differences.items()}


def loss_function(train_impl: str, loss: str) -> Callable[..., Any]:
    """The function of a loss: that which the table of `train_impl` names for `loss`."""
    return named_function(TRAIN_IMPLS[train_impl].losses[loss])


def named_function(loss: Loss) -> Callable[..., Any]:
    """The function that an entry of the tables of losses names."""
    file, name = loss.function.split(".")
    return getattr(import_module(f"megatron.objectives.{file}"), name)
