"""The objective of distillation: the divergence from a teacher's distributions, mixed with next-token
prediction (Hinton et al., arXiv 1503.02531; GKD, arXiv 2306.13649)."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.data import Batch
from megatron.mpu import Divergence, HeadInput, TopTokens, distillation_sums
from megatron.objectives.objective import LossSums, Objective

METRICS = ("divergence", "nll")


def distillation(divergence: Divergence, share: float, columns: int | None = None) -> Objective:
    """The objective: of each trained token share * divergence + (1 - share) * negative log-likelihood of its
    label; of both the means are metrics. Of what the student wrote itself it is the divergence alone.

    Batches hold the teacher's output (`reference_output`), or its most likely tokens (`top_ids`). columns: as
    of `token_loss_sum`.
    """

    def weight(batch: Batch) -> Tensor:
        return batch.loss_weights.sum().float().view(1)

    def loss_sum(head: HeadInput, batch: Batch, group: dist.ProcessGroup | None) -> LossSums:
        weights, teacher = batch.loss_weights.t(), _teacher_of(batch)
        of_divergence = 1.0 if batch.role == "on_policy" else share  # its labels are the student's own
        sums = distillation_sums(
            head, teacher, batch.labels.t(), weights, divergence, of_divergence, group, columns, batch.loss_places
        )
        count = weights.sum().float()
        means = {"divergence": sums.divergence, "nll": sums.nll}
        return sums.loss.view(1), {name: torch.stack([value, count]) for name, value in means.items()}

    return Objective(weight, loss_sum, METRICS)


def _teacher_of(batch: Batch) -> Callable[[Callable[..., Any]], Any] | TopTokens:
    if batch.top_ids is not None and batch.top_logprobs is not None:
        return TopTokens(*(value.transpose(0, 1).flatten(0, 1) for value in (batch.top_ids, batch.top_logprobs)))
    if batch.reference_output is None:
        raise ValueError("distillation compares with a teacher, and the batch has nothing of one")
    return batch.reference_output
