"""The objective of preference pairs: DPO and related losses, with a reference model or without."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.data import Batch
from megatron.data.preferences.responses import batch_responses
from megatron.methods.preferences.keys import LOSSES
from megatron.methods.preferences.pair_losses import PairScores, PairSettings, log_odds
from megatron.mpu import HeadInput
from megatron.objectives.objective import LossSums, Objective
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
    with_reference_sums,
)
from megatron.objectives.step_baselines import match_gaps, match_sides, pair_baselines

REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/accuracies")
MATCHINGS = {"aot": match_gaps, "aot_unpaired": match_sides}


@dataclass(frozen=True)
class _LossMix:
    """The losses of a run, each with its weight in the sum, and their parameters."""

    weights: Mapping[str, float]
    settings: PairSettings
    reference_free: bool

    @property
    def normalised(self) -> bool:
        """Whether logged rewards are averages over a response's tokens, not sums.

        True if no loss of the run needs a reference, except when "sft" is the only loss.
        """
        return not _compares(self.weights) and set(self.weights) != {"sft"}


def _compares(weights: Mapping[str, float]) -> bool:
    return any(LOSSES[name].needs_reference for name in weights)


def dpo(
    weights: Mapping[str, float],
    settings: PairSettings,
    *,
    reference_free: bool = False,
    columns: int | None = None,
    sampled: bool = False,
) -> Objective:
    """Returns the objective for pairs of responses: a weighted sum of the losses that `weights` names.

    Pair losses are means over pairs. "sft" adds the negative log-likelihood as a mean over tokens of chosen
    responses; "orpo" adds it as a mean over tokens of chosen responses and their prompts.
    reference_free: use the policy's log-probabilities in place of log-ratios to a reference; ["sigmoid",
        "sft"] is then CPO.
    columns: number of leading vocabulary columns in the softmax; None: all.
    sampled: the model wrote the responses itself; metrics then compare the trainer's log-probabilities with
        the sampler's.
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
        assert len(matchings) == 1, "aot and aot_unpaired cannot be combined"
        step_baselines = partial(pair_baselines, matching=matchings[0], reference_free=kind.reference_free)
    weight, loss_sum = partial(_weight, kind=kind), partial(_loss_sum, kind=kind, columns=columns)
    maxima: tuple[str, ...] = ()
    if sampled:
        metrics, maxima = (*metrics, DIFFERENCE), (f"{DIFFERENCE}_max",)
    return Objective(weight, loss_sum, metrics, differences, step_baselines, maxima, with_reference_sums)


def _chosen(batch: Batch) -> Tensor:
    """Returns which responses are the chosen ones of real pairs, boolean `[n]`; False for rejected ones and
    padding."""
    labels = batch_responses(batch).preference_labels
    return (labels != 0) & (torch.arange(len(labels), device=labels.device) % 2 == 0)


def _with_prompts(batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns labels and loss weights `[batch, seq]` that train the prompts as well as the responses."""
    ids = batch_responses(batch).response_ids
    is_response_label = torch.zeros_like(batch.tokens, dtype=torch.bool)
    is_response_label[:, :-1] = (ids[:, :-1] == ids[:, 1:]) & (ids[:, 1:] >= 0)
    trained = batch.loss_weights > 0
    labels = torch.where(trained, batch.labels, torch.where(is_response_label, batch.tokens.roll(-1, 1), 0))
    return labels, (is_response_label | trained).long()


NLL_WEIGHTS: Mapping[str, Callable[[Batch], Tensor]] = {
    "sft": lambda batch: batch.loss_weights,
    "orpo": lambda batch: _with_prompts(batch)[1],
}


def _weight(batch: Batch, *, kind: _LossMix) -> Tensor:
    return torch.stack([part.sum().float() for part in (_chosen(batch), *_nll_weights(batch, kind).values())])


def _nll_weights(batch: Batch, kind: _LossMix) -> dict[str, Tensor]:
    """Returns loss weights `[batch, seq]` of the likelihood parts of the losses "sft" and "orpo", by name.

    Only losses that the run uses are included. Weights are 1 at the tokens of chosen responses, for "orpo"
    also at those of their prompts, and 0 elsewhere.
    """
    ids = batch_responses(batch).response_ids
    chosen = _chosen(batch)[ids.clamp(min=0)] & (ids >= 0)
    return {name: weights_of(batch) * chosen for name, weights_of in NLL_WEIGHTS.items() if name in kind.weights}


def _pairs(responses: ResponseScores, batch: Batch, kind: _LossMix, chosen: Tensor) -> PairScores:
    score, count = responses.score, responses.count.clamp(min=1.0)
    log_ratio = score if kind.reference_free else score - reference_logprobs(batch)
    # Padding has no tokens. A mean log-probability of 0 would mean p = 1, whose odds are infinite: use -1.
    policy, average = torch.where(chosen.repeat_interleave(2), score / count, -1.0), log_ratio / count
    baseline = batch_responses(batch).baseline
    baselines = None if baseline is None else (baseline[0::2], baseline[1::2])
    return PairScores(
        log_ratio[0::2], log_ratio[1::2], average[0::2], average[1::2], policy[0::2], policy[1::2],
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
    sampler_logprobs = batch_responses(batch).sampler_logprobs
    if sampler_logprobs is not None:
        metrics |= sampler_difference(responses.logprobs.detach(), sampler_logprobs, batch.loss_weights > 0)
    losses = torch.zeros_like(pairs.gap)
    for name, weight in kind.weights.items():
        losses = losses + weight * LOSSES[name].load_function()(pairs, kind.settings)
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
    """Returns three metrics: the mean reward of chosen and of rejected responses, and how often the chosen
    one's is larger.

    A tie counts as not larger. real: which pairs are not padding.
    """
    return {
        f"{name}/chosen": sum_and_count(beta * chosen, real),
        f"{name}/rejected": sum_and_count(beta * rejected, real),
        f"{name}/accuracies": sum_and_count(chosen > rejected, real),
    }
