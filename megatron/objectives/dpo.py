"""The objective of pairs of responses: DPO and its relatives, with a reference model or without."""

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
from megatron.objectives.objective import LossSums, Objective, loss_function
from megatron.objectives.pair_losses import PairScores, PairSettings, log_odds
from megatron.objectives.preference import (
    DIFFERENCE,
    TOKEN_METRICS,
    ResponseScores,
    reference_logprobs,
    sampler_difference,
    score_responses,
    sum_and_count,
    token_accuracy,
    token_metrics,
)
from megatron.objectives.step_baselines import match_gaps, match_sides, pair_baselines

REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/accuracies")
MATCHINGS = {"aot": match_gaps, "aot_unpaired": match_sides}


@dataclass(frozen=True)
class _LossMix:
    """The losses of a run by name, each with its weight in the sum."""

    weights: Mapping[str, float]
    settings: PairSettings
    reference_free: bool

    @property
    def normalised(self) -> bool:
        """Whether logged rewards are averages over tokens: so where no loss compares sums with those of a
        reference."""
        return not _compares(self.weights) and set(self.weights) != {"sft"}


def _compares(weights: Mapping[str, float]) -> bool:
    return any(TRAIN_IMPLS["dpo"].losses[name].needs_reference for name in weights)


def dpo(
    weights: Mapping[str, float],
    settings: PairSettings,
    *,
    reference_free: bool = False,
    columns: int | None = None,
    sampled: bool = False,
) -> Objective:
    """The objective of pairs: a weighted sum of the losses that `weights` names.

    Its parts are means over pairs; with "sft" also over tokens of the chosen responses (their negative
    log-likelihood); with "orpo" also over tokens of the chosen responses and their prompts.
    reference_free: the policy's log-probabilities replace its log-ratios; ["sigmoid", "sft"] is then CPO.
    columns: as of `token_logprobs`. sampled: the model wrote the responses itself, and metrics compare its
    log-probabilities with those of the sampler.
    """
    kind = _LossMix(weights, settings, reference_free or not _compares(weights))
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
    step_baselines = None
    if matchings:
        assert len(matchings) == 1, "aot and aot_unpaired match a step's pairs differently"
        step_baselines = partial(pair_baselines, matching=matchings[0], reference_free=kind.reference_free)
    weight, loss_sum = partial(_weight, kind=kind), partial(_loss_sum, kind=kind, columns=columns)
    maxima: tuple[str, ...] = ()
    if sampled:
        metrics, maxima = (*metrics, DIFFERENCE), (f"{DIFFERENCE}_max",)
    return Objective(weight, loss_sum, metrics, differences, step_baselines, maxima)


def _chosen(batch: Batch) -> Tensor:
    """Which responses are the chosen ones of real pairs (not of padding), boolean `[n]`."""
    assert batch.preference_labels is not None
    number = torch.arange(len(batch.preference_labels), device=batch.preference_labels.device)
    return (batch.preference_labels != 0) & (number % 2 == 0)


def _with_prompts(batch: Batch) -> tuple[Tensor, Tensor]:
    """Labels and loss weights `[batch, seq]` that train the prompts before the responses too."""
    assert batch.response_ids is not None
    inside = torch.zeros_like(batch.tokens, dtype=torch.bool)
    inside[:, :-1] = (batch.response_ids[:, :-1] == batch.response_ids[:, 1:]) & (batch.response_ids[:, 1:] >= 0)
    trained = batch.loss_weights > 0
    labels = torch.where(trained, batch.labels, torch.where(inside, batch.tokens.roll(-1, 1), 0))
    return labels, (inside | trained).long()


NLL_WEIGHTS: Mapping[str, Callable[[Batch], Tensor]] = {
    "sft": lambda batch: batch.loss_weights,
    "orpo": lambda batch: _with_prompts(batch)[1],
}


def _weight(batch: Batch, *, kind: _LossMix) -> Tensor:
    return torch.stack([part.sum().float() for part in (_chosen(batch), *_nll_weights(batch, kind).values())])


def _nll_weights(batch: Batch, kind: _LossMix) -> dict[str, Tensor]:
    """For each loss with a likelihood: 1 at the tokens `[batch, seq]` of chosen responses that count in
    it."""
    assert batch.response_ids is not None
    chosen = _chosen(batch)[batch.response_ids.clamp(min=0)] & (batch.response_ids >= 0)
    return {name: weights_of(batch) * chosen for name, weights_of in NLL_WEIGHTS.items() if name in kind.weights}


def _pairs(responses: ResponseScores, batch: Batch, kind: _LossMix, chosen: Tensor) -> PairScores:
    score, count = responses.score, responses.count.clamp(min=1.0)
    above = score if kind.reference_free else score - reference_logprobs(batch)
    # Padding has no tokens; an average of 0 would be certainty, whose odds are infinite.
    policy, average = torch.where(chosen.repeat_interleave(2), score / count, -1.0), above / count
    baselines = None if batch.baseline is None else (batch.baseline[0::2], batch.baseline[1::2])
    return PairScores(
        above[0::2], above[1::2], average[0::2], average[1::2], policy[0::2], policy[1::2],
        score[0::2] - score[1::2], baselines,
    )  # fmt: skip


def _loss_sum(
    head: HeadInput, batch: Batch, group: dist.ProcessGroup | None, *, kind: _LossMix, columns: int | None
) -> LossSums:
    labels, places = batch.labels, batch.loss_places
    if "orpo" in kind.weights:
        labels, places = _with_prompts(batch)[0], None
    responses = score_responses(head, batch, labels, group, columns, places)
    real = _chosen(batch)[0::2]
    pairs = _pairs(responses, batch, kind, real)
    metrics = _metrics(responses, pairs, real, kind)
    if batch.rollout is not None:
        metrics |= sampler_difference(responses.logprobs.detach(), batch)
    losses = torch.zeros_like(pairs.gap)
    for name, weight in kind.weights.items():
        losses = losses + weight * loss_function("dpo", name)(pairs, kind.settings)
    parts = [torch.where(real, losses, 0.0).sum()]
    for name, places in _nll_weights(batch, kind).items():
        likelihood = -(responses.logprobs * places).sum()
        parts.append(kind.weights[name] * likelihood)
        metrics["nll_loss"] = torch.stack([likelihood.detach(), places.sum().float()])
    return torch.stack(parts), metrics


def _metrics(responses: ResponseScores, pairs: PairScores, real: Tensor, kind: _LossMix) -> dict[str, Tensor]:
    beta, odd = kind.settings.beta, torch.zeros_like(real)
    chosen, rejected = torch.stack([real, odd], 1).flatten(), torch.stack([odd, real], 1).flatten()
    sides = (pairs.policy_chosen, pairs.policy_rejected) if kind.normalised else (pairs.chosen, pairs.rejected)
    metrics = _rewards("rewards", beta, *sides, real)
    if "sigmoid_norm" in kind.weights:
        metrics |= _rewards("rewards_norm", beta, pairs.chosen_average, pairs.rejected_average, real)
    if "orpo" in kind.weights:
        odds = log_odds(pairs)
        metrics |= {
            "log_odds_chosen": sum_and_count(odds, real),
            "log_odds_ratio": sum_and_count(F.logsigmoid(odds), real),
        }
    metrics |= token_metrics(responses, responses.average if kind.normalised else responses.score, chosen, rejected)
    return metrics | {"mean_token_accuracy": token_accuracy(responses, chosen)}


def _rewards(name: str, beta: float, chosen: Tensor, rejected: Tensor, real: Tensor) -> dict[str, Tensor]:
    """Mean rewards of both sides, and how often the chosen one is larger; a tie counts as wrong."""
    return {
        f"{name}/chosen": sum_and_count(beta * chosen, real),
        f"{name}/rejected": sum_and_count(beta * rejected, real),
        f"{name}/accuracies": sum_and_count(chosen > rejected, real),
    }
