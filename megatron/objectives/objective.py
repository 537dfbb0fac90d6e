"""Defines `Objective`: functions for the weight of a batch, and for its summed loss and metrics."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.data import Batch
from megatron.mpu import HeadInput

# (the k parts of a loss, fp32 `[k]`; the metrics by name, each a sum and its divisor, fp32 `[2]`)
LossSums = tuple[Tensor, dict[str, Tensor]]
ROW_LOSSES = "row_losses"
"""The name among the metrics of `loss_sum` for the summed loss of each row, fp32 `[batch]`."""
# Maps batches to the summed log-probability of each of their responses, `[n]` per batch, under the current
# model, without gradients. All ranks call it together.
ScoreFunction = Callable[[list[Batch]], list[Tensor]]
# Takes a function, calls it with a model's final hidden states and output layer (`mpu.HeadInput.use`).
HeadUse = Callable[[Callable[..., Any]], Any]


class Reference(Protocol):
    """Interface of a model that the loss compares with the trained model. All ranks call its methods
    together."""

    def logprobs(self, batches: list[Batch]) -> list[Tensor]:
        """Returns log p(label) of each micro-batch under the reference model, `[batch, seq]` fp32."""

    def outputs(self, batches: list[Batch]) -> list[HeadUse]:
        """Returns access to the final hidden states and output layer for each micro-batch; [] on stages
        before the last."""


@dataclass(frozen=True)
class Objective:
    """The loss and the metrics of one kind of training, as pure functions.

    A loss is a sum of k parts. For an optimizer step, each part is the sum of `loss_sum` divided by the sum
    of `weight`, both over all micro-batches and ranks. So the result does not depend on how the step is
    split.

    weight: returns a batch's weight, fp32 `[k]`: a number of tokens, or of pairs. It must be known before the
        forward pass, because the gradient of every micro-batch is divided by the step's total weight.
    loss_sum: function of the output layer with its hidden states, the batch and the tensor-parallel group
        (None for one rank). It returns the summed parts of the loss, and metrics without gradients.
    metrics: names of the metrics that `loss_sum` returns as (sum, divisor).
    differences: further metrics, each the mean of one metric minus the mean of another.
    step_baselines: for losses that compare an example with all examples of the step, else None. It gets this
        rank's micro-batches, a function that scores them, and the data-parallel group. It returns the
        micro-batches with `Responses.baseline`, before their forward passes.
    maxima: names of scalar metrics of `loss_sum` that are reduced over a step by their maximum.
    with_reference: for losses that compare the model with a reference model, else None. It returns
        micro-batches on this rank's device, with the reference's values that the loss reads.
    validated: names of metrics that validation reports besides those of language modelling.
    keeps_rows: whether `loss_sum` also returns `ROW_LOSSES`.
    """

    weight: Callable[[Batch], Tensor]
    loss_sum: Callable[[HeadInput, Batch, dist.ProcessGroup | None], LossSums]
    metrics: tuple[str, ...] = ()
    differences: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    step_baselines: Callable[[list[Batch], ScoreFunction, dist.ProcessGroup | None], list[Batch]] | None = None
    maxima: tuple[str, ...] = ()
    with_reference: Callable[[list[Batch], Reference], list[Batch]] | None = None
    validated: tuple[str, ...] = ()
    keeps_rows: bool = False

    def add_metrics(self, total: Tensor, values: Mapping[str, Tensor]) -> None:
        """Adds one batch's metrics to `total` in place.

        total: `[metrics, 2]`, the sum and the divisor of each metric in this step. values: the batch's
            metrics by name.
        """
        if self.metrics:
            total += torch.stack([values[name] for name in self.metrics])

    def note_maxima(self, largest: Tensor, values: Mapping[str, Tensor]) -> None:
        """Updates the maxima of a step in place with one batch's values. largest: `[maxima]`; values: metrics
        by name."""
        if self.maxima:
            torch.maximum(largest, torch.stack([values[name] for name in self.maxima]), out=largest)

    def means(self, total: Tensor) -> dict[str, Tensor]:
        """Returns the means of a step's metrics by name; NaN for a metric that nothing was counted for.

        total: the sum and the divisor of each metric, `[metrics, 2]`.
        """
        means = dict(zip(self.metrics, (total[:, 0] / total[:, 1]).unbind(), strict=True))
        return means | {
            name: means[minuend] - means[subtrahend] for name, (minuend, subtrahend) in self.differences.items()
        }
