"""Computes the loss of a step, a micro-batch at a time, for an engine to run backwards."""

import torch
from torch import Tensor

from megatron.data import Batch
from megatron.mpu import HeadInput, ParallelGroups
from megatron.objectives import Objective
from megatron.training.nonfinite_guard import GradientWatch


class StepLoss:
    """Computes the objective's loss of each micro-batch, times `scale`, and reports it to `watch`.

    metrics: `[metrics, 2]`, sums and counts over the step's micro-batches. maxima: their largest values.
    """

    def __init__(self, objective: Objective, groups: ParallelGroups, watch: GradientWatch) -> None:
        self.objective, self.group, self.watch = objective, groups.group("tensor"), watch
        self.scale = torch.ones((), device=groups.device)
        self.metrics = torch.zeros(len(objective.metrics), 2, device=groups.device)
        self.maxima = torch.zeros(len(objective.maxima), device=groups.device)

    def begin(self, scale: Tensor) -> None:
        """Begin a step, and set its metrics to zero. scale: `[k]`, the factor of each part of the loss."""
        self.scale = scale
        self.metrics.zero_()
        self.maxima.zero_()

    def scaled_loss(self, head: HeadInput, batch: Batch) -> Tensor:
        """Returns the scaled loss of one micro-batch, an fp32 scalar with its graph."""
        parts, metrics = self.objective.loss_sum(head, batch, self.group)
        self.objective.add_metrics(self.metrics, metrics)
        self.objective.note_maxima(self.maxima, metrics)
        return (parts * self.scale).sum() * self.watch.note_loss(parts.sum())
