"""Losses of pairs of a chosen and a rejected response, with TRL's names and formulas.

Each loss is a function from `PairScores` and `PairSettings` to the loss of each pair, fp32 `[pairs]`. The
table `keys.LOSSES` names it. Source: DPOTrainer, CPOTrainer and ORPOTrainer of TRL 1.16.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class PairSettings:
    """The parameters of pair losses.

    beta: factor of the rewards: log-ratios of policy to reference, or log-probabilities.
    smoothing: assumed share of mislabelled pairs.
    tau: temperature of discopop's switch between two losses.
    gamma: simpo's margin between the rewards.
    """

    beta: float = 0.1
    smoothing: float = 0.0
    tau: float = 0.05
    gamma: float = 0.5


@dataclass(frozen=True)
class PairScores:
    """The inputs of pair losses, fp32 `[pairs]` each.

    chosen, rejected: log p - log p_ref of the chosen and of the rejected response; without a reference, log
        p.
    chosen_average, rejected_average: the same divided by the response's number of tokens.
    policy_chosen, policy_rejected: the policy's mean log-probability of a token.
    gap: the policy's log p(chosen) - log p(rejected).
    baselines: (of chosen, of rejected responses), from `Objective.step_baselines`; None for losses that need
        none.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_average: Tensor
    rejected_average: Tensor
    policy_chosen: Tensor
    policy_rejected: Tensor
    gap: Tensor
    baselines: tuple[Tensor, Tensor] | None = None


PairLoss = Callable[[PairScores, PairSettings], Tensor]


def _logistic(margin: Tensor, smoothing: float) -> Tensor:
    return -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)


def sigmoid(pairs: PairScores, s: PairSettings) -> Tensor:
    """Returns the loss of DPO (arXiv 2305.18290); with smoothing, of conservative DPO."""
    return _logistic(s.beta * (pairs.chosen - pairs.rejected), s.smoothing)


def sigmoid_norm(pairs: PairScores, s: PairSettings) -> Tensor:
    """Returns the loss of length-normalised DPO (arXiv 2411.15124; `dpo_norm` of open-instruct)."""
    return _logistic(s.beta * (pairs.chosen_average - pairs.rejected_average), s.smoothing)


def hinge(pairs: PairScores, s: PairSettings) -> Tensor:
    """Returns the hinge loss of SLiC (arXiv 2305.10425) with DPO's rewards."""
    return torch.relu(1 - s.beta * (pairs.chosen - pairs.rejected))


def ipo(pairs: PairScores, s: PairSettings) -> Tensor:
    """Returns the loss of IPO (arXiv 2310.12036), on per-token averages of the log-ratios."""
    return (pairs.chosen_average - pairs.rejected_average - 1 / (2 * s.beta)).square()


def exo_pair(pairs: PairScores, s: PairSettings) -> Tensor:
    """Returns the loss of EXO (arXiv 2402.00856, equation 16)."""
    margin = s.beta * (pairs.chosen - pairs.rejected)
    kept_order = F.logsigmoid(margin) - math.log1p(-s.smoothing)
    reversed_order = F.logsigmoid(-margin) - math.log(s.smoothing)
    return margin.sigmoid() * kept_order + (-margin).sigmoid() * reversed_order


def nca_pair(pairs: PairScores, s: PairSettings) -> Tensor:
    """Returns the loss of noise-contrastive alignment for pairs (arXiv 2402.05369)."""
    chosen, rejected = s.beta * pairs.chosen, s.beta * pairs.rejected
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def robust(pairs: PairScores, s: PairSettings) -> Tensor:
    """Returns the loss of robust DPO (arXiv 2403.00409), which corrects for a known share of mislabelled
    pairs."""
    margin = s.beta * (pairs.chosen - pairs.rejected)
    clean, turned = F.logsigmoid(margin), F.logsigmoid(-margin)
    return (-(1 - s.smoothing) * clean + s.smoothing * turned) / (1 - 2 * s.smoothing)


def bco_pair(pairs: PairScores, s: PairSettings) -> Tensor:
    """Returns the loss of binary classifier optimisation for pairs (arXiv 2404.04656), without its reward
    shift."""
    return -F.logsigmoid(s.beta * pairs.chosen) - F.logsigmoid(-s.beta * pairs.rejected)


def sppo_hard(pairs: PairScores, s: PairSettings) -> Tensor:
    """Returns the loss of SPPO (arXiv 2405.00675), with a win probability of 1 for the chosen response."""
    return (pairs.chosen - 0.5 / s.beta).square() + (pairs.rejected + 0.5 / s.beta).square()


def _baselines(pairs: PairScores) -> tuple[Tensor, Tensor]:
    assert pairs.baselines is not None, "call Objective.step_baselines before the loss"
    return pairs.baselines


def aot(pairs: PairScores, s: PairSettings) -> Tensor:
    """Returns the loss of AOT (arXiv 2406.05882): DPO's loss of the policy's gap minus a baseline gap.

    The baseline is the reference's gap that has the same rank among all pairs of the step. A gap is log
    p(chosen) - log p(rejected).
    """
    return _logistic(s.beta * (pairs.gap - _baselines(pairs)[0]), s.smoothing)


def aot_unpaired(pairs: PairScores, s: PairSettings) -> Tensor:
    """Returns the loss of unpaired AOT (arXiv 2406.05882), which ranks chosen and rejected responses
    separately.

    Each response is compared with the response of the same rank on the other side, taken as a constant. Both
    sides give gradients; the returned value is of the chosen side alone.
    """
    rejected_baseline, chosen_baseline = _baselines(pairs)
    chosen = _logistic(s.beta * (pairs.chosen - rejected_baseline), s.smoothing)
    rejected = _logistic(s.beta * (chosen_baseline - pairs.rejected), s.smoothing)
    return chosen + rejected - rejected.detach()


def apo_zero(pairs: PairScores, s: PairSettings) -> Tensor:
    """Returns the loss of APO-zero (arXiv 2408.06266, equation 7)."""
    return 1 - (s.beta * pairs.chosen).sigmoid() + (s.beta * pairs.rejected).sigmoid()


def apo_down(pairs: PairScores, s: PairSettings) -> Tensor:
    """Returns the loss of APO-down (arXiv 2408.06266, equation 8)."""
    return (s.beta * pairs.chosen).sigmoid() + 1 - (s.beta * (pairs.chosen - pairs.rejected)).sigmoid()


def discopop(pairs: PairScores, s: PairSettings) -> Tensor:
    """Returns the loss of DiscoPOP (arXiv 2406.08414, equation 5)."""
    margin = s.beta * (pairs.chosen - pairs.rejected)
    mixture = (margin / s.tau).sigmoid()
    return (1 - mixture) * -F.logsigmoid(margin) + mixture * (-margin).exp()


def sft(pairs: PairScores, s: PairSettings) -> Tensor:
    """Returns zeros `[pairs]`: `dpo` adds the likelihood of chosen responses as a separate part of the
    loss."""
    return torch.zeros_like(pairs.gap)


def simpo(pairs: PairScores, s: PairSettings) -> Tensor:
    """Returns the loss of SimPO (arXiv 2405.14734)."""
    return _logistic(s.beta * (pairs.policy_chosen - pairs.policy_rejected) - s.gamma, s.smoothing)


def _log_of_rest(x: Tensor) -> Tensor:
    """Returns log(1 - exp(x)), accurately, for x < 0."""
    return torch.where(x > -math.log(2), (-x.expm1()).log(), (-x.exp()).log1p())


def log_odds(pairs: PairScores) -> Tensor:
    """Returns log(odds of the chosen response / odds of the rejected one), `[pairs]`.

    The odds of a response are p / (1 - p), where log p is its mean log-probability of a token.
    """
    chosen, rejected = pairs.policy_chosen, pairs.policy_rejected
    return (chosen - rejected) - (_log_of_rest(chosen) - _log_of_rest(rejected))


def orpo(pairs: PairScores, s: PairSettings) -> Tensor:
    """Returns ORPO's odds-ratio loss (arXiv 2403.07691).

    `dpo` adds ORPO's likelihood of the chosen text as a separate part of the loss.
    """
    return -s.beta * F.logsigmoid(log_odds(pairs))
