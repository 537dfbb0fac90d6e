"""Single answers judged good or bad: KTO (arXiv 2402.01306), after KTOTrainer of TRL 1.16."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.data import Batch
from megatron.mpu import HeadInput
from megatron.neox_arguments.keys.losses import TRAIN_IMPLS
from megatron.objectives.coupling import couple_kl
from megatron.objectives.objective import Objective, Sums, loss_function
from megatron.objectives.preference import TOKEN_METRICS, mean_of, read_answers, reference_scores, token_metrics

DIFFERENCES = {"rewards/margins": ("rewards/chosen", "rewards/rejected")}


@dataclass(frozen=True)
class KtoSettings:
    """loss_type: of the table of losses. Weights multiply the losses of good and bad examples; neox: GPT-NeoX's own
    averages (`compat_kto`)."""

    beta: float = 0.1
    desirable: float = 1.0
    undesirable: float = 1.0
    loss_type: str = "kto"
    neox: bool = False


# From each answer's log-probability above the reference's, the KL and the direction (1 good, -1 bad), fp32 `[n]`.
AnswerLoss = Callable[[Tensor, Tensor, Tensor, KtoSettings], Tensor]


def prospect(above: Tensor, kl: Tensor, direction: Tensor, s: KtoSettings) -> Tensor:
    """arXiv 2402.01306; without a KL, apo_zero of arXiv 2408.06266 for single answers."""
    return 1 - (s.beta * direction * (above - kl)).sigmoid()


def _weight(batch: Batch) -> Tensor:
    assert batch.preference_labels is not None
    return (batch.preference_labels != 0).sum().float().view(1)


def kto(settings: KtoSettings, columns: int | None = None) -> Objective:
    """The objective; its weight is the number of examples."""
    has_kl = TRAIN_IMPLS["kto"].losses[settings.loss_type].couples
    loss: AnswerLoss = loss_function("kto", settings.loss_type)

    def loss_sum(head: HeadInput, batch: Batch, group: dist.ProcessGroup | None) -> Sums:
        assert batch.preference_labels is not None
        answers = read_answers(head, batch, batch.labels, group, columns)
        good, bad = batch.preference_labels > 0, batch.preference_labels < 0
        above = answers.score - reference_scores(batch)
        weights = torch.where(good, settings.desirable, settings.undesirable) * batch.preference_labels.abs()
        direction, kl = batch.preference_labels.sign(), torch.zeros_like(above)
        if settings.neox:
            kl, weights, direction = _neox(above.detach(), batch, weights)
        elif has_kl:
            assert batch.baseline is not None, "Objective.couple comes before the loss"
            kl = batch.baseline
        losses = weights * loss(above, kl, direction, settings)
        rewards = settings.beta * above
        metrics = {"rewards/chosen": mean_of(rewards, good), "rewards/rejected": mean_of(rewards, bad)}
        metrics |= token_metrics(answers, answers.score, good, bad)
        if has_kl:
            metrics["kl"] = mean_of(kl, good | bad)
        return losses.sum().view(1), metrics

    names = ("rewards/chosen", "rewards/rejected", *TOKEN_METRICS, *(("kl",) if has_kl else ()))
    return Objective(_weight, loss_sum, names, DIFFERENCES, couple_kl if has_kl and not settings.neox else None)


def _neox(above: Tensor, batch: Batch, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """KL, weights and directions as in GPT-NeoX, where an answer is a row: the KL of each half of the micro-batch is
    the mean over the other half of log-ratios cut at 0; weights are averaged over the half; and a direction is
    multiplied with the share of its row that is no padding."""
    assert batch.response_ids is not None and batch.preference_labels is not None
    half = len(above) // 2
    rows, place = batch.response_ids.shape
    if len(above) != rows or rows % 2:
        raise ValueError(f"compat_kto halves micro-batches of one answer a row: {len(above)} answers in {rows} rows")
    means = [part.clamp(min=0.0).mean().expand(half) for part in (above[half:], above[:half])]
    averaged = [part.mean().expand(half) for part in (weights[:half], weights[half:])]
    share = (batch.response_ids >= 0).sum(1) / place
    return torch.cat(means), torch.cat(averaged), batch.preference_labels.sign() * share
