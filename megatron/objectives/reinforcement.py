"""Reinforcement learning from answers with rewards: REINFORCE as in GPT-NeoX, RLOO and GRPO with its kin, as
GRPOTrainer and RLOOTrainer of TRL 1.16 compute them.

A micro-batch has an answer a row; what is known of it is `Batch.rollout`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.data import Batch
from megatron.mpu import Divergence, HeadInput, token_divergence_sum, token_logprobs_and_statistics
from megatron.objectives.objective import LossSums, Objective, loss_function
from megatron.objectives.preference import DIFFERENCE, sampler_difference


@dataclass(frozen=True)
class PolicySettings:
    """The parameters of the losses.

    epsilon, epsilon_high: ratios are clipped to [1 - epsilon, 1 + epsilon_high]; importance_cap: the largest
    weight of a token for what its sampler's probability was, None: no weights. kl_beta, kl_impl: weight and
    form of the KL; kl_in_reward: it is in the advantages already; kl_by_ratio: each token's is multiplied by
    its ratio (DeepSeek-V3.2, arXiv 2512.02556). length: tokens that an answer may have.
    """

    epsilon: float = 0.2
    epsilon_high: float = 0.2
    importance_cap: float | None = None
    kl_beta: float = 0.0
    kl_impl: str = "k3"
    kl_in_reward: bool = False
    kl_by_ratio: bool = False
    length: int = 1


@dataclass(frozen=True)
class Answers:
    """The answers of a micro-batch under the policy, fp32.

    logprobs: log p(label) `[batch, seq]`, with gradients; old: the same before the first step on these
    answers; advantages: `[batch, 1]`; mask: `[batch, seq]`, 1 where a token is trained.
    """

    logprobs: Tensor
    old: Tensor
    advantages: Tensor
    mask: Tensor

    @property
    def ratio(self) -> Tensor:
        """p / p_old of each token, `[batch, seq]`."""
        return (self.logprobs - self.old).exp()

    @property
    def lengths(self) -> Tensor:
        """Trained tokens of each answer, at least 1, `[batch, 1]`."""
        return self.mask.sum(1, keepdim=True).clamp(min=1.0)


# From answers to the losses of their tokens `[batch, seq]`, or of answers `[batch, 1]`, and to the ratios
# that are clipped, in the same shape and with gradients, or None.
PolicyLoss = Callable[[Answers, PolicySettings], tuple[Tensor, Tensor | None]]


def policy_gradient(answers: Answers, s: PolicySettings) -> tuple[Tensor, Tensor | None]:
    """REINFORCE: log-probability times advantage."""
    return -answers.advantages * answers.logprobs, None


def _clip(ratio: Tensor, answers: Answers, s: PolicySettings) -> tuple[Tensor, Tensor]:
    """PPO's clipped objective (arXiv 1707.06347), with bounds of its own on either side (DAPO, arXiv
    2503.14476)."""
    clipped = ratio.clamp(1 - s.epsilon, 1 + s.epsilon_high)
    return -torch.min(ratio * answers.advantages, clipped * answers.advantages), ratio


def clipped(answers: Answers, s: PolicySettings) -> tuple[Tensor, Tensor | None]:
    """GRPO (arXiv 2402.03300): the ratio of each token, clipped."""
    return _clip(answers.ratio, answers, s)


def clipped_sequences(answers: Answers, s: PolicySettings) -> tuple[Tensor, Tensor | None]:
    """RLOO (arXiv 2402.14740): the ratio of each whole answer, clipped."""
    log_ratio = ((answers.logprobs - answers.old) * answers.mask).sum(1, keepdim=True)
    return _clip(log_ratio.exp(), answers, s)


def clipped_means(answers: Answers, s: PolicySettings) -> tuple[Tensor, Tensor | None]:
    """GSPO (arXiv 2507.18071): the geometric mean of the ratios of an answer, clipped."""
    log_ratio = ((answers.logprobs - answers.old) * answers.mask).sum(1, keepdim=True) / answers.lengths
    return _clip(log_ratio.exp(), answers, s)


def truncated_weights(answers: Answers, s: PolicySettings) -> tuple[Tensor, Tensor | None]:
    """CISPO (arXiv 2506.13585): REINFORCE weighted by the ratio, which is truncated at epsilon_high and has
    no gradient."""
    ratio = answers.ratio
    return -ratio.detach().clamp(max=s.epsilon_high) * answers.advantages * answers.logprobs, ratio


Mean = Literal["tokens", "answers", "length"]
MEANS: Mapping[str, Mean] = {
    "reinforce": "tokens", "rloo": "answers", "grpo": "answers", "dapo": "tokens", "dr_grpo": "length",
    "gspo": "answers", "cispo": "tokens",
}  # fmt: skip
"""What the loss of a step is a mean over, by `rl_loss_type`: its trained tokens, its answers (of each the
mean over its tokens), or its answers times the tokens that one may have (Dr. GRPO, arXiv 2503.20783)."""


def divergence(kl_impl: str, logprobs: Tensor, reference: Tensor) -> Tensor:
    """The KL from the reference by the log-probabilities of sampled tokens alone, in the same shape: the
    estimators kl (k1), mse (k2) and k3 (http://joschu.net/blog/kl-approx.html), and GPT-NeoX's abs."""
    above = logprobs - reference
    if kl_impl == "kl":
        return above
    if kl_impl == "abs":
        return above.abs()
    if kl_impl == "mse":
        return 0.5 * above.square()
    return (-above).exp() + above - 1


def token_weights(mean: Mean, mask: Tensor) -> Tensor:
    """What each token counts in the sum of a micro-batch, `[batch, seq]`; mask: 1 where a token is
    trained."""
    return mask / mask.sum(1, keepdim=True).clamp(min=1.0) if mean == "answers" else mask


def reinforcement(
    loss_type: str, settings: PolicySettings, temperature: float, columns: int | None = None
) -> Objective:
    """The objective of answers with advantages.

    temperature: divides the logits. columns: as of `token_logprobs`. Metrics: of rewards, of the KL, the
    entropy and the shares of clipped tokens (of answers, where these have the ratio), and by how much the
    log-probabilities of the trainer before its first step differ from those of the sampler.
    """
    loss: PolicyLoss = loss_function("reinforce", loss_type)
    mean, s = MEANS[loss_type], settings
    clips, whole = loss is not policy_gradient, Divergence(beta=1.0, temperature=temperature)

    def weight(batch: Batch) -> Tensor:
        if mean == "tokens":
            return batch.loss_weights.sum().float().view(1)
        rows = torch.full((1,), float(len(batch.tokens)), device=batch.tokens.device)
        return rows * s.length if mean == "length" else rows

    def loss_sum(head: HeadInput, batch: Batch, group: dist.ProcessGroup | None) -> LossSums:
        known = batch.rollout
        assert known is not None and batch.rewards is not None
        transposed, statistics = token_logprobs_and_statistics(
            head, batch.labels.t(), group, columns, batch.loss_places, temperature
        )
        logprobs, mask = transposed.t(), batch.loss_weights.float()
        old = logprobs.detach() if known.old_logprobs is None else known.old_logprobs
        answers = Answers(logprobs, old, known.advantages.unsqueeze(1), mask)
        losses, ratio = loss(answers, s)
        apart = torch.where(mask > 0, old - known.sampler_logprobs, 0.0)
        if s.importance_cap is not None:
            losses = losses * apart.exp().clamp(max=s.importance_cap)
        weights, count = token_weights(mean, mask), mask.sum()
        total, metrics = torch.where(mask > 0, losses * weights, 0.0).sum(), {}
        if s.kl_beta:
            if s.kl_impl == "full":
                assert batch.reference_output is not None, "the reference comes before the loss"
                kl = token_divergence_sum(
                    head, batch.reference_output, weights.t(), group, columns, batch.loss_places, whole
                )
            else:
                assert known.reference_logprobs is not None, "the reference comes before the loss"
                of_tokens = divergence(s.kl_impl, logprobs, known.reference_logprobs)
                if s.kl_by_ratio:
                    of_tokens = of_tokens * (answers.ratio if ratio is None else ratio)
                kl = torch.where(mask > 0, of_tokens * weights, 0.0).sum()
            if not s.kl_in_reward:
                total = total + s.kl_beta * kl
            metrics["kl"] = torch.stack([kl.detach(), weights.sum()])
        rewarded = ~batch.rewards.isnan()
        metrics["reward"] = torch.stack([batch.rewards.nan_to_num().sum(), rewarded.sum().float()])
        metrics["entropy"] = torch.stack([(statistics.entropy.t() * mask).sum(), count])
        if clips:
            assert ratio is not None
            metrics |= _clip_shares(ratio, answers, s, bounded_below=loss is not truncated_weights)
        metrics |= sampler_difference(old, batch)
        return total.view(1), metrics

    names = ["reward", *(("kl",) if s.kl_beta else ()), "entropy"]
    names += ["clip_ratio/low_mean", "clip_ratio/high_mean"] if clips else []
    return Objective(weight, loss_sum, (*names, DIFFERENCE), maxima=(f"{DIFFERENCE}_max",))


def _clip_shares(ratio: Tensor, answers: Answers, s: PolicySettings, bounded_below: bool) -> dict[str, Tensor]:
    """The share of tokens, or of answers, whose ratio is outside its bounds where that takes the gradient
    away."""
    places = answers.mask if ratio.shape == answers.mask.shape else torch.ones_like(ratio)
    low = (ratio < 1 - s.epsilon) & (answers.advantages < 0) & bounded_below
    most = 1 + s.epsilon_high if bounded_below else s.epsilon_high
    high = (ratio > most) & (answers.advantages > 0)
    return {
        f"clip_ratio/{name}_mean": torch.stack([(share * places).sum(), places.sum()])
        for name, share in (("low", low), ("high", high))
    }
