"""Losses of a pair, under TRL's names and by its formulas (DPOTrainer, CPOTrainer, ORPOTrainer of TRL 1.16)."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class PairSettings:
    """beta: strength of the reference; smoothing: share of pairs taken for mislabelled; tau: sharpness of discopop's
    switch; gamma: simpo's margin of the rewards."""

    beta: float = 0.1
    smoothing: float = 0.0
    tau: float = 0.05
    gamma: float = 0.5


@dataclass(frozen=True)
class Pairs:
    """fp32 `[pairs]`. chosen, rejected: log-probabilities above the reference's, or of the policy alone where there
    is none; their averages over tokens, the same; policy_...: averages of the policy alone. gap: the policy's chosen
    less its rejected; anchors: `Objective.couple`'s for the two sides, None for losses without."""

    chosen: Tensor
    rejected: Tensor
    chosen_average: Tensor
    rejected_average: Tensor
    policy_chosen: Tensor
    policy_rejected: Tensor
    gap: Tensor
    anchors: tuple[Tensor, Tensor] | None = None


PairLoss = Callable[[Pairs, PairSettings], Tensor]


def _logistic(margin: Tensor, smoothing: float) -> Tensor:
    return -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)


def sigmoid(pairs: Pairs, s: PairSettings) -> Tensor:
    """arXiv 2305.18290; with smoothing, conservative DPO."""
    return _logistic(s.beta * (pairs.chosen - pairs.rejected), s.smoothing)


def sigmoid_norm(pairs: Pairs, s: PairSettings) -> Tensor:
    """Length-normalised DPO (arXiv 2411.15124; `dpo_norm` of open-instruct)."""
    return _logistic(s.beta * (pairs.chosen_average - pairs.rejected_average), s.smoothing)


def hinge(pairs: Pairs, s: PairSettings) -> Tensor:
    return torch.relu(1 - s.beta * (pairs.chosen - pairs.rejected))


def ipo(pairs: Pairs, s: PairSettings) -> Tensor:
    """arXiv 2310.12036, on averages over tokens."""
    return (pairs.chosen_average - pairs.rejected_average - 1 / (2 * s.beta)).square()


def exo_pair(pairs: Pairs, s: PairSettings) -> Tensor:
    """arXiv 2402.00856, equation 16."""
    margin = s.beta * (pairs.chosen - pairs.rejected)
    kept = F.logsigmoid(margin) - math.log1p(-s.smoothing)
    turned = F.logsigmoid(-margin) - math.log(s.smoothing)
    return margin.sigmoid() * kept + (-margin).sigmoid() * turned


def nca_pair(pairs: Pairs, s: PairSettings) -> Tensor:
    chosen, rejected = s.beta * pairs.chosen, s.beta * pairs.rejected
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def robust(pairs: Pairs, s: PairSettings) -> Tensor:
    """arXiv 2403.00409."""
    margin = s.beta * (pairs.chosen - pairs.rejected)
    clean, turned = F.logsigmoid(margin), F.logsigmoid(-margin)
    return (-(1 - s.smoothing) * clean + s.smoothing * turned) / (1 - 2 * s.smoothing)


def bco_pair(pairs: Pairs, s: PairSettings) -> Tensor:
    return -F.logsigmoid(s.beta * pairs.chosen) - F.logsigmoid(-s.beta * pairs.rejected)


def sppo_hard(pairs: Pairs, s: PairSettings) -> Tensor:
    """arXiv 2405.00675, with a win probability of 1."""
    return (pairs.chosen - 0.5 / s.beta).square() + (pairs.rejected + 0.5 / s.beta).square()


def _anchors(pairs: Pairs) -> tuple[Tensor, Tensor]:
    assert pairs.anchors is not None, "Objective.couple comes before the loss"
    return pairs.anchors


def aot(pairs: Pairs, s: PairSettings) -> Tensor:
    """arXiv 2406.05882: against the reference's gap of the same rank within the step."""
    return _logistic(s.beta * (pairs.gap - _anchors(pairs)[0]), s.smoothing)


def aot_unpaired(pairs: Pairs, s: PairSettings) -> Tensor:
    """The same of chosen against rejected answers: each is compared with the other side's of its rank in the step,
    which is a constant here. So either side gives its gradient, and the chosen alone the value."""
    below, above = _anchors(pairs)
    chosen = _logistic(s.beta * (pairs.chosen - below), s.smoothing)
    rejected = _logistic(s.beta * (above - pairs.rejected), s.smoothing)
    return chosen + rejected - rejected.detach()


def apo_zero(pairs: Pairs, s: PairSettings) -> Tensor:
    """arXiv 2408.06266, equation 7."""
    return 1 - (s.beta * pairs.chosen).sigmoid() + (s.beta * pairs.rejected).sigmoid()


def apo_down(pairs: Pairs, s: PairSettings) -> Tensor:
    """arXiv 2408.06266, equation 8."""
    return (s.beta * pairs.chosen).sigmoid() + 1 - (s.beta * (pairs.chosen - pairs.rejected)).sigmoid()


def discopop(pairs: Pairs, s: PairSettings) -> Tensor:
    """arXiv 2406.08414, equation 5."""
    margin = s.beta * (pairs.chosen - pairs.rejected)
    mixture = (margin / s.tau).sigmoid()
    return (1 - mixture) * -F.logsigmoid(margin) + mixture * (-margin).exp()


def sft(pairs: Pairs, s: PairSettings) -> Tensor:
    """The likelihood of the chosen answer alone, which is a part of its own."""
    return torch.zeros_like(pairs.gap)


def simpo(pairs: Pairs, s: PairSettings) -> Tensor:
    """arXiv 2405.14734."""
    return _logistic(s.beta * (pairs.policy_chosen - pairs.policy_rejected) - s.gamma, s.smoothing)


def _log_of_rest(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0."""
    return torch.where(x > -math.log(2), (-x.expm1()).log(), (-x.exp()).log1p())


def log_odds(pairs: Pairs) -> Tensor:
    """Of the average token of the chosen answer over that of the rejected one."""
    chosen, rejected = pairs.policy_chosen, pairs.policy_rejected
    return (chosen - rejected) - (_log_of_rest(chosen) - _log_of_rest(rejected))


def orpo(pairs: Pairs, s: PairSettings) -> Tensor:
    """arXiv 2403.07691; the likelihood of the chosen text that belongs to it is a part of its own."""
    return -s.beta * F.logsigmoid(log_odds(pairs))
