"""The loss of distillation: a divergence from a teacher's distributions, mixed with next-token prediction.

Sources: Hinton et al., arXiv 1503.02531; GKD, arXiv 2306.13649.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.data import Batch
from megatron.data.batch import MethodBatch
from megatron.mpu import Divergence, HeadInput, TopTokens, distillation_sums
from megatron.objectives.language_modelling import token_count
from megatron.objectives.objective import HeadUse, LossSums, Objective

METRICS = ("divergence", "nll")


@dataclass(frozen=True, eq=False)
class TeacherValues(MethodBatch):
    """The teacher's outputs for a micro-batch: its hidden states and head, or its most likely tokens at each
    position."""

    output: HeadUse | None = None  # the final hidden states and output layer
    top_ids: Tensor | None = None  # [batch, seq, k] int64
    top_logprobs: Tensor | None = None  # [batch, seq, k + 1] float32; the last: all other tokens
    is_on_policy: bool = False  # the student wrote the text


def teacher_values(batch: Batch) -> TeacherValues:
    """Returns the teacher's outputs that a batch holds; an empty `TeacherValues` if the teacher has not run
    on it."""
    return batch.method if isinstance(batch.method, TeacherValues) else TeacherValues()


def with_teacher_values(batch: Batch, **changes: Any) -> Batch:
    """Returns a copy of the batch in which the given fields of its `TeacherValues` are replaced."""
    return replace(batch, method=replace(teacher_values(batch), **changes))


def distillation(divergence: Divergence, share: float, columns: int | None = None) -> Objective:
    """Returns the objective of distillation. Its metrics are the mean divergence and negative log-likelihood.

    The loss of a trained token is share * divergence + (1 - share) * negative log-likelihood of its label. On
    text that the student wrote itself, the loss is the divergence alone. Batches must hold `TeacherValues`.
    columns: number of leading vocabulary columns in the softmax; None: all.
    """

    def loss_sum(head: HeadInput, batch: Batch, group: dist.ProcessGroup | None) -> LossSums:
        values = teacher_values(batch)
        weights, teacher = batch.loss_weights.t(), _teacher_of(values)
        share_of_loss = 1.0 if values.is_on_policy else share  # its labels are the student's own
        sums = distillation_sums(
            head, teacher, batch.labels.t(), weights, divergence, share_of_loss, group, columns, batch.loss_places
        )
        count = weights.sum().float()
        means = {"divergence": sums.divergence, "nll": sums.nll}
        return sums.loss.view(1), {name: torch.stack([value, count]) for name, value in means.items()}

    return Objective(token_count, loss_sum, METRICS)


def _teacher_of(values: TeacherValues) -> HeadUse | TopTokens:
    if values.top_ids is not None and values.top_logprobs is not None:
        return TopTokens(*(value.transpose(0, 1).flatten(0, 1) for value in (values.top_ids, values.top_logprobs)))
    if values.output is None:
        raise ValueError(
            "the distillation loss needs the teacher's outputs, but the batch holds none: run Teacher.fill on it, or "
            "read the data from the cache"
        )
    return values.output
