"""Defines an objective: the weight of a batch, and its summed loss and metrics."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.data import Batch
from megatron.mpu import HeadInput

# The parts of a loss, fp32 `[k]`; for each metric a sum and the number that it is divided by, fp32 `[2]`.
LossSums = tuple[Tensor, dict[str, Tensor]]
# From batches to the summed log-probabilities `[n]` of their responses under the current model, without
# gradients; all ranks call it together.
ScoreFunction = Callable[[list[Batch]], list[Tensor]]
# Calls a function with a model's final hidden states and output layer (`mpu.HeadInput.use`).
HeadUse = Callable[[Callable[..., Any]], Any]


class Reference(Protocol):
    """A model that a loss compares the trained model with. All ranks call its methods together."""

    def logprobs(self, batches: list[Batch]) -> list[Tensor]:
        """Returns log p(label) `[batch, seq]` fp32 of each micro-batch."""

    def outputs(self, batches: list[Batch]) -> list[HeadUse]:
        """Returns the hidden states and head of each micro-batch; [] on stages before the last."""


@dataclass(frozen=True)
class Objective:
    """The loss and the metrics of a kind of training, as pure functions.

    A loss is a sum of k parts. In an optimizer step each part is the sum of its `loss_sum` divided by the sum
    of its `weight`, both over all micro-batches and ranks, so that any split of the step gives the same
    number.

    weight: returns a batch's weight, fp32 `[k]` (a number of tokens, or of pairs). It is known before the
        forward pass, since the gradient of every micro-batch is scaled by the total weight of the step.
    loss_sum: from hidden states with their head, the batch and the tensor group (None for one rank), returns
        the summed parts of the loss, and `metrics` without gradients.
    maxima: names of further scalar metrics of `loss_sum`; a step has the largest over its micro-batches.
    differences: further metrics, each the mean of one metric minus the mean of another.
    step_baselines: for losses that compare an example with all examples of the step, else None. It gets this
        rank's micro-batches, the function that scores them and the data group. It returns the micro-batches
        with `Responses.baseline`, before their forward passes.
    with_reference: for losses that compare the model with a reference, else None. It returns micro-batches on
        this rank's device with the reference's values that the loss reads.
    validated: names of metrics that validation reports too, beside those of language modelling.
    """

    weight: Callable[[Batch], Tensor]
    loss_sum: Callable[[HeadInput, Batch, dist.ProcessGroup | None], LossSums]
    metrics: tuple[str, ...] = ()
    differences: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    step_baselines: Callable[[list[Batch], ScoreFunction, dist.ProcessGroup | None], list[Batch]] | None = None
    maxima: tuple[str, ...] = ()
    with_reference: Callable[[list[Batch], Reference], list[Batch]] | None = None
    validated: tuple[str, ...] = ()

    def add_metrics(self, total: Tensor, values: Mapping[str, Tensor]) -> None:
        """Add one batch's metrics to `total` `[metrics, 2]`, the sum and count of each metric in the step."""
        if self.metrics:
            total += torch.stack([values[name] for name in self.metrics])

    def note_maxima(self, largest: Tensor, values: Mapping[str, Tensor]) -> None:
        """Raise each element of `largest` `[maxima]` in place to one batch's value, if that is larger."""
        if self.maxima:
            torch.maximum(largest, torch.stack([values[name] for name in self.maxima]), out=largest)

    def means(self, total: Tensor) -> dict[str, Tensor]:
        """Returns the means of a step's metrics by name; NaN if nothing was counted.

        total: the sum and count of each metric, `[metrics, 2]`.
        """
        means = dict(zip(self.metrics, (total[:, 0] / total[:, 1]).unbind(), strict=True))
        return means | {
            name: means[minuend] - means[subtrahend] for name, (minuend, subtrahend) in self.differences.items()
        }
