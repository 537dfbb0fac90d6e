"""Pairs of answers (DPO and its relatives), with a reference or without."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.data import Batch
from megatron.mpu import HeadInput
from megatron.neox_arguments.keys.losses import TRAIN_IMPLS
from megatron.objectives.coupling import couple_pairs, match_gaps, match_sides
from megatron.objectives.objective import Objective, Sums, loss_function
from megatron.objectives.pair_losses import Pairs, PairSettings, log_odds
from megatron.objectives.preference import (
    TOKEN_METRICS,
    Answers,
    mean_of,
    read_answers,
    reference_scores,
    token_accuracy,
    token_metrics,
)

REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/accuracies")
MATCHINGS = {"aot": match_gaps, "aot_unpaired": match_sides}


@dataclass(frozen=True)
class _Kind:
    """A weighted sum of losses."""

    weights: Mapping[str, float]
    settings: PairSettings
    reference_free: bool

    @property
    def normalised(self) -> bool:
        """Whether rewards are of averages over tokens, for want of any sum: the policy's are all that is compared."""
        return not _compares(self.weights) and set(self.weights) != {"sft"}


def _compares(weights: Mapping[str, float]) -> bool:
    return any(TRAIN_IMPLS["dpo"].losses[name].needs_reference for name in weights)


def dpo(
    weights: Mapping[str, float], settings: PairSettings, *, reference_free: bool = False, columns: int | None = None
) -> Objective:
    """The objective of these losses, by name; "sft" is the mean over tokens of the chosen answers' negative
    log-likelihood.

    Its parts: over pairs; over tokens of chosen answers (sft); over tokens of chosen answers and their prompts (orpo).
    reference_free: the policy's own log-probabilities stand for its log-ratios; [sigmoid, sft] is then CPO.
    """
    kind = _Kind(weights, settings, reference_free or not _compares(weights))
    metrics: tuple[str, ...] = (*REWARDS, *TOKEN_METRICS, "mean_token_accuracy")
    differences = {"rewards/margins": ("rewards/chosen", "rewards/rejected")}
    if "sigmoid_norm" in weights:
        metrics += tuple(name.replace("rewards", "rewards_norm") for name in REWARDS)
        differences["rewards_norm/margins"] = ("rewards_norm/chosen", "rewards_norm/rejected")
    if "sft" in weights or "orpo" in weights:
        metrics += ("nll_loss",)
    if "orpo" in weights:
        metrics += ("log_odds_chosen", "log_odds_ratio")
    matchings = [MATCHINGS[name] for name in weights if name in MATCHINGS]
    couple = None
    if matchings:
        assert len(matchings) == 1, "aot and aot_unpaired match a step's pairs differently"
        couple = partial(couple_pairs, matching=matchings[0], reference_free=kind.reference_free)
    weight, loss_sum = partial(_weight, kind=kind), partial(_loss_sum, kind=kind, columns=columns)
    return Objective(weight, loss_sum, metrics, differences, couple)


def _chosen(batch: Batch) -> Tensor:
    """Which answers are chosen ones of real pairs, boolean `[n]`."""
    assert batch.preference_labels is not None
    return (batch.preference_labels != 0) & (
        torch.arange(len(batch.preference_labels), device=batch.preference_labels.device) % 2 == 0
    )


def _with_prompts(batch: Batch) -> tuple[Tensor, Tensor]:
    """Labels and weights `[batch, seq]` that also train what comes before the answers."""
    assert batch.response_ids is not None
    inside = torch.zeros_like(batch.tokens, dtype=torch.bool)
    inside[:, :-1] = (batch.response_ids[:, :-1] == batch.response_ids[:, 1:]) & (batch.response_ids[:, 1:] >= 0)
    trained = batch.loss_weights > 0
    labels = torch.where(trained, batch.labels, torch.where(inside, batch.tokens.roll(-1, 1), 0))
    return labels, (inside | trained).long()


LIKELIHOODS: Mapping[str, Callable[[Batch], Tensor]] = {
    "sft": lambda batch: batch.loss_weights,
    "orpo": lambda batch: _with_prompts(batch)[1],
}


def _weight(batch: Batch, *, kind: _Kind) -> Tensor:
    return torch.stack([part.sum().float() for part in (_chosen(batch), *_likelihoods(batch, kind).values())])


def _likelihoods(batch: Batch, kind: _Kind) -> dict[str, Tensor]:
    """By loss that has such a part: 1 at the places `[batch, seq]` of chosen answers whose likelihood it is."""
    assert batch.response_ids is not None
    chosen = _chosen(batch)[batch.response_ids.clamp(min=0)] & (batch.response_ids >= 0)
    return {name: own(batch) * chosen for name, own in LIKELIHOODS.items() if name in kind.weights}


def _pairs(answers: Answers, batch: Batch, kind: _Kind, chosen: Tensor) -> Pairs:
    score, count = answers.score, answers.count.clamp(min=1.0)
    above = score if kind.reference_free else score - reference_scores(batch)
    # Padding has no tokens; an average of 0 would be certainty, whose odds are infinite.
    policy, average = torch.where(chosen.repeat_interleave(2), score / count, -1.0), above / count
    anchors = None if batch.baseline is None else (batch.baseline[0::2], batch.baseline[1::2])
    return Pairs(
        above[0::2], above[1::2], average[0::2], average[1::2], policy[0::2], policy[1::2],
        score[0::2] - score[1::2], anchors,
    )  # fmt: skip


def _loss_sum(
    head: HeadInput, batch: Batch, group: dist.ProcessGroup | None, *, kind: _Kind, columns: int | None
) -> Sums:
    labels = _with_prompts(batch)[0] if "orpo" in kind.weights else batch.labels
    answers = read_answers(head, batch, labels, group, columns)
    real = _chosen(batch)[0::2]
    pairs = _pairs(answers, batch, kind, real)
    metrics = _metrics(answers, pairs, real, kind)
    losses = torch.zeros_like(pairs.gap)
    for name, weight in kind.weights.items():
        losses = losses + weight * loss_function("dpo", name)(pairs, kind.settings)
    parts = [torch.where(real, losses, 0.0).sum()]
    for name, places in _likelihoods(batch, kind).items():
        likelihood = -(answers.logprobs * places).sum()
        parts.append(kind.weights[name] * likelihood)
        metrics["nll_loss"] = torch.stack([likelihood.detach(), places.sum().float()])
    return torch.stack(parts), metrics


def _metrics(answers: Answers, pairs: Pairs, real: Tensor, kind: _Kind) -> dict[str, Tensor]:
    beta, odd = kind.settings.beta, torch.zeros_like(real)
    chosen, rejected = torch.stack([real, odd], 1).flatten(), torch.stack([odd, real], 1).flatten()
    sides = (pairs.policy_chosen, pairs.policy_rejected) if kind.normalised else (pairs.chosen, pairs.rejected)
    metrics = _rewards("rewards", beta, *sides, real)
    if "sigmoid_norm" in kind.weights:
        metrics |= _rewards("rewards_norm", beta, pairs.chosen_average, pairs.rejected_average, real)
    if "orpo" in kind.weights:
        odds = log_odds(pairs)
        metrics |= {"log_odds_chosen": mean_of(odds, real), "log_odds_ratio": mean_of(F.logsigmoid(odds), real)}
    metrics |= token_metrics(answers, answers.average if kind.normalised else answers.score, chosen, rejected)
    return metrics | {"mean_token_accuracy": token_accuracy(answers, chosen)}


def _rewards(name: str, beta: float, chosen: Tensor, rejected: Tensor, real: Tensor) -> dict[str, Tensor]:
    """A tie counts as wrong."""
    return {
        f"{name}/chosen": mean_of(beta * chosen, real),
        f"{name}/rejected": mean_of(beta * rejected, real),
        f"{name}/accuracies": mean_of(chosen > rejected, real),
    }
