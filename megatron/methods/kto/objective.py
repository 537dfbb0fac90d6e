"""The loss of KTO: single responses are judged desirable or undesirable.

Sources: arXiv 2402.01306; KTOTrainer of TRL 1.16.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.data import Batch
from megatron.data.preferences.responses import batch_responses
from megatron.methods.kto.keys import LOSSES
from megatron.mpu import HeadInput
from megatron.objectives.objective import LossSums, Objective
from megatron.objectives.preference import (
    TOKEN_METRICS,
    reference_logprobs,
    score_responses,
    sum_and_count,
    token_metrics,
    with_reference_sums,
)
from megatron.objectives.step_baselines import kl_baseline

DIFFERENCES = {"rewards/margins": ("rewards/chosen", "rewards/rejected")}


@dataclass(frozen=True)
class KtoSettings:
    """The parameters of KTO.

    beta: factor of the log-ratio of policy to reference.
    desirable, undesirable: weights of the loss of desirable and of undesirable examples.
    loss_type: a value of `kto_loss_type`.
    neox: compute KL and weights as GPT-NeoX does (`compat_kto`).
    """

    beta: float = 0.1
    desirable: float = 1.0
    undesirable: float = 1.0
    loss_type: str = "kto"
    neox: bool = False


# Maps each response's log-ratio of policy to reference, the KL, and the direction (1: desirable, -1:
# undesirable) to the response's loss, all fp32 `[n]`.
ResponseLoss = Callable[[Tensor, Tensor, Tensor, KtoSettings], Tensor]


def prospect(log_ratio: Tensor, kl: Tensor, direction: Tensor, s: KtoSettings) -> Tensor:
    """Returns KTO's loss of each response, 1 - sigmoid(beta * direction * (log_ratio - kl)) (arXiv
    2402.01306).

    direction: 1 for desirable responses, -1 for undesirable ones. With a KL of 0 it is APO-zero for single
        responses (arXiv 2408.06266).
    """
    return 1 - (s.beta * direction * (log_ratio - kl)).sigmoid()


def _weight(batch: Batch) -> Tensor:
    return (batch_responses(batch).preference_labels != 0).sum().float().view(1)


def kto(settings: KtoSettings, columns: int | None = None) -> Objective:
    """Returns the objective of KTO. The weight of a batch is its number of examples.

    columns: number of leading vocabulary columns in the softmax; None: all.
    """
    has_kl = LOSSES[settings.loss_type].needs_step_baselines
    loss: ResponseLoss = LOSSES[settings.loss_type].load_function()

    def loss_sum(head: HeadInput, batch: Batch, group: dist.ProcessGroup | None) -> LossSums:
        labels, baseline = batch_responses(batch).preference_labels, batch_responses(batch).baseline
        responses = score_responses(head, batch, batch.labels, group, columns, batch.loss_places)
        good, bad = labels > 0, labels < 0
        log_ratio = responses.score - reference_logprobs(batch)
        weights = torch.where(good, settings.desirable, settings.undesirable) * labels.abs()
        direction, kl = labels.sign(), torch.zeros_like(log_ratio)
        if settings.neox:
            kl, weights, direction = _neox(log_ratio.detach(), batch, weights)
        elif has_kl:
            assert baseline is not None, "call Objective.step_baselines before the loss"
            kl = baseline
        losses = weights * loss(log_ratio, kl, direction, settings)
        rewards = settings.beta * log_ratio
        metrics = {"rewards/chosen": sum_and_count(rewards, good), "rewards/rejected": sum_and_count(rewards, bad)}
        metrics |= token_metrics(responses, responses.score, good, bad)
        if has_kl:
            metrics["kl"] = sum_and_count(kl, good | bad)
        return losses.sum().view(1), metrics

    names = ("rewards/chosen", "rewards/rejected", *TOKEN_METRICS, *(("kl",) if has_kl else ()))
    return Objective(
        _weight, loss_sum, names, DIFFERENCES, kl_baseline if has_kl and not settings.neox else None,
        with_reference=with_reference_sums,
    )  # fmt: skip


def _neox(log_ratio: Tensor, batch: Batch, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns KL, weights and directions of the responses, `[n]` each, as GPT-NeoX computes them.

    Each row of the micro-batch holds one response. The KL for one half of the micro-batch is the mean over
    the other half of log-ratios clamped at 0. Weights are averaged over each half. A direction is multiplied
    by the share of its row that is not padding. Raises ValueError unless the micro-batch has an even number
    of rows with one response each.
    """
    ids = batch_responses(batch).response_ids
    half = len(log_ratio) // 2
    rows, place = ids.shape
    if len(log_ratio) != rows or rows % 2:
        raise ValueError(
            f"compat_kto needs an even number of rows per micro-batch with one answer in each, but there are "
            f"{len(log_ratio)} answers in {rows} rows"
        )
    means = [part.clamp(min=0.0).mean().expand(half) for part in (log_ratio[half:], log_ratio[:half])]
    averaged = [part.mean().expand(half) for part in (weights[:half], weights[half:])]
    share = (ids >= 0).sum(1) / place
    return torch.cat(means), torch.cat(averaged), batch_responses(batch).preference_labels.sign() * share
