"""The loss of a step, as an engine runs it backwards a micro-batch at a time."""

import torch
from torch import Tensor

from megatron.data import Batch
from megatron.mpu import HeadInput, ParallelGroups
from megatron.objectives import Objective
from megatron.training.nonfinite_guard import GradientWatch


class StepLoss:
    """The objective's loss of each micro-batch times `scale`, reporting each to `watch`; `metrics`
    `[metrics, 2]` gathers sums and counts of the step, `maxima` what is largest in it."""

    def __init__(self, objective: Objective, groups: ParallelGroups, watch: GradientWatch) -> None:
        self.objective, self.group, self.watch = objective, groups.group("tensor"), watch
        self.scale = torch.ones((), device=groups.device)
        self.metrics = torch.zeros(len(objective.metrics), 2, device=groups.device)
        self.maxima = torch.zeros(len(objective.maxima), device=groups.device)

    def begin(self, scale: Tensor) -> None:
        """Begin a step. scale: `[k]`, of each part of the loss."""
        self.scale = scale
        self.metrics.zero_()
        self.maxima.zero_()

    def of(self, head: HeadInput, batch: Batch) -> Tensor:
        """The scaled loss of one micro-batch, an fp32 scalar with its graph."""
        parts, metrics = self.objective.loss_sum(head, batch, self.group)
        self.objective.add_metrics(self.metrics, metrics)
        self.objective.note_maxima(self.maxima, metrics)
        return (parts * self.scale).sum() * self.watch.note_loss(parts.sum())
