"""The losses of reinforcement learning: REINFORCE as in GPT-NeoX, RLOO, and GRPO with its variants.

Source: GRPOTrainer and RLOOTrainer of TRL 1.16. A micro-batch has one answer in each row; `RolloutValues`
holds the advantages and log-probabilities.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.data import Batch
from megatron.data.batch import MethodBatch
from megatron.methods.reinforcement.keys import LOSSES
from megatron.mpu import Divergence, HeadInput, token_divergence_sum, token_logprobs_and_statistics
from megatron.objectives.language_modelling import token_count
from megatron.objectives.objective import HeadUse, LossSums, Objective, Reference
from megatron.objectives.preference import DIFFERENCE, sampler_difference


@dataclass(frozen=True, eq=False)
class RolloutValues(MethodBatch):
    """Extra values of a micro-batch of answers that the model wrote, one answer per row."""

    advantages: Tensor  # [batch] float32
    sampler_logprobs: Tensor  # [batch, seq] float32, log p(label) when it was sampled; 0 if not trained
    rewards: Tensor  # [batch] float32; NaN: no reward
    old_logprobs: Tensor | None = None  # [batch, seq] float32, before the first step on the answers; None: current
    reference_logprobs: Tensor | None = None  # [batch, seq] float32, by the reference model; None: not computed
    reference_output: HeadUse | None = None  # the reference model's hidden states and head, for `kl_impl: full`


def rollout_values(batch: Batch) -> RolloutValues:
    """Returns the `RolloutValues` of a batch; fails if it has none."""
    assert isinstance(batch.method, RolloutValues), "the batch has no answers that the model wrote"
    return batch.method


@dataclass(frozen=True)
class PolicySettings:
    """The parameters of reinforcement learning losses.

    epsilon, epsilon_high: ratios are clipped to [1 - epsilon, 1 + epsilon_high].
    importance_cap: largest importance weight p_old / p_sampler of a token; None: no such weights.
    kl_beta, kl_impl: weight and estimator of the KL from the reference model.
    kl_in_reward: the rewards already contain the KL, so the loss does not add it.
    kl_by_ratio: the KL of each token is multiplied by its ratio p / p_old (DeepSeek-V3.2, arXiv 2512.02556).
    length: maximum tokens of an answer.
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
    """The answers of a micro-batch under the trained model, fp32.

    logprobs: log p(label), `[batch, seq]`, with gradients.
    old: log p(label) before the first step on these answers, `[batch, seq]`.
    advantages: one per answer, `[batch, 1]`.
    mask: `[batch, seq]`, 1 where a token is trained, else 0.
    """

    logprobs: Tensor
    old: Tensor
    advantages: Tensor
    mask: Tensor

    @property
    def ratio(self) -> Tensor:
        """The ratio p / p_old of each token, `[batch, seq]`."""
        return (self.logprobs - self.old).exp()

    @property
    def lengths(self) -> Tensor:
        """The number of trained tokens of each answer, at least 1, `[batch, 1]`."""
        return self.mask.sum(1, keepdim=True).clamp(min=1.0)


# Maps answers to (losses, ratios). Losses are per token, `[batch, seq]`, or per answer, `[batch, 1]`. Ratios
# are those that the loss clips, in the same shape and with gradients; None if it clips none.
PolicyLoss = Callable[[Answers, PolicySettings], tuple[Tensor, Tensor | None]]


def policy_gradient(answers: Answers, s: PolicySettings) -> tuple[Tensor, Tensor | None]:
    """Returns REINFORCE's loss of each token, -advantage * log p; no ratios."""
    return -answers.advantages * answers.logprobs, None


def _clip(ratio: Tensor, answers: Answers, s: PolicySettings) -> tuple[Tensor, Tensor]:
    """Returns PPO's clipped loss (arXiv 1707.06347), and the ratio.

    The lower and the upper bound are set separately (DAPO, arXiv 2503.14476).
    """
    clipped = ratio.clamp(1 - s.epsilon, 1 + s.epsilon_high)
    return -torch.min(ratio * answers.advantages, clipped * answers.advantages), ratio


def clipped(answers: Answers, s: PolicySettings) -> tuple[Tensor, Tensor | None]:
    """Returns GRPO's loss (arXiv 2402.03300), with the clipped ratio of each token."""
    return _clip(answers.ratio, answers, s)


def clipped_sequences(answers: Answers, s: PolicySettings) -> tuple[Tensor, Tensor | None]:
    """Returns RLOO's loss (arXiv 2402.14740), with one clipped ratio per answer: the product of its tokens'
    ratios."""
    log_ratio = ((answers.logprobs - answers.old) * answers.mask).sum(1, keepdim=True)
    return _clip(log_ratio.exp(), answers, s)


def clipped_means(answers: Answers, s: PolicySettings) -> tuple[Tensor, Tensor | None]:
    """Returns GSPO's loss (arXiv 2507.18071), with one clipped ratio per answer: the geometric mean of its
    tokens' ratios."""
    log_ratio = ((answers.logprobs - answers.old) * answers.mask).sum(1, keepdim=True) / answers.lengths
    return _clip(log_ratio.exp(), answers, s)


def truncated_weights(answers: Answers, s: PolicySettings) -> tuple[Tensor, Tensor | None]:
    """Returns CISPO's loss (arXiv 2506.13585): REINFORCE weighted by the ratio, which has no gradient.

    The ratio is truncated to at most epsilon_high.
    """
    ratio = answers.ratio
    return -ratio.detach().clamp(max=s.epsilon_high) * answers.advantages * answers.logprobs, ratio


Mean = Literal["tokens", "answers", "length"]
MEANS: Mapping[str, Mean] = {
    "reinforce": "tokens", "rloo": "answers", "grpo": "answers", "dapo": "tokens", "dr_grpo": "length",
    "gspo": "answers", "cispo": "tokens",
}  # fmt: skip
"""The denominator of a step's loss, for each `rl_loss_type`.

"tokens": number of trained tokens. "answers": number of answers, each a mean over its tokens. "length":
    number of answers times the maximum length (Dr. GRPO, arXiv 2503.20783).
"""


def divergence(kl_impl: str, logprobs: Tensor, reference: Tensor) -> Tensor:
    """Returns the estimated KL from the reference model at each sampled token, in the shape of `logprobs`.

    Estimators (`kl_impl`): kl (k1), mse (k2) and k3 (http://joschu.net/blog/kl-approx.html), and GPT-NeoX's
    abs.
    """
    log_ratio = logprobs - reference
    if kl_impl == "kl":
        return log_ratio
    if kl_impl == "abs":
        return log_ratio.abs()
    if kl_impl == "mse":
        return 0.5 * log_ratio.square()
    return (-log_ratio).exp() + log_ratio - 1


def token_weights(mean: Mean, mask: Tensor) -> Tensor:
    """Returns the weight of each token in the loss of a micro-batch, `[batch, seq]`.

    mask: 1 where a token is trained. mean: "answers" gives each answer's tokens a total weight of 1; else
        trained tokens have weight 1.
    """
    return mask / mask.sum(1, keepdim=True).clamp(min=1.0) if mean == "answers" else mask


def reinforcement(
    loss_type: str, settings: PolicySettings, temperature: float, columns: int | None = None
) -> Objective:
    """Returns the objective of reinforcement learning, for answers with advantages.

    loss_type: a value of `rl_loss_type`. temperature: divides the logits.
    columns: number of leading vocabulary columns in the softmax; None: all.
    Metrics: reward, KL, entropy, the shares of clipped ratios (`_clip_shares`), and the difference between
    the log-probabilities of sampler and trainer, before the first step on the answers.
    """
    loss: PolicyLoss = LOSSES[loss_type].load_function()
    mean, s = MEANS[loss_type], settings
    clips, full_divergence = loss is not policy_gradient, Divergence(beta=1.0, temperature=temperature)

    def weight(batch: Batch) -> Tensor:
        if mean == "tokens":
            return token_count(batch)
        rows = torch.full((1,), float(len(batch.tokens)), device=batch.tokens.device)
        return rows * s.length if mean == "length" else rows

    def loss_sum(head: HeadInput, batch: Batch, group: dist.ProcessGroup | None) -> LossSums:
        samples = rollout_values(batch)
        transposed, statistics = token_logprobs_and_statistics(
            head, batch.labels.t(), group, columns, batch.loss_places, temperature
        )
        logprobs, mask = transposed.t(), batch.loss_weights.float()
        old = logprobs.detach() if samples.old_logprobs is None else samples.old_logprobs
        answers = Answers(logprobs, old, samples.advantages.unsqueeze(1), mask)
        losses, ratio = loss(answers, s)
        difference = torch.where(mask > 0, old - samples.sampler_logprobs, 0.0)
        if s.importance_cap is not None:
            losses = losses * difference.exp().clamp(max=s.importance_cap)
        weights, count = token_weights(mean, mask), mask.sum()
        total, metrics = torch.where(mask > 0, losses * weights, 0.0).sum(), {}
        if s.kl_beta:
            if s.kl_impl == "full":
                assert samples.reference_output is not None, "call Objective.with_reference before the loss"
                kl = token_divergence_sum(
                    head, samples.reference_output, weights.t(), group, columns, batch.loss_places, full_divergence
                )
            else:
                assert samples.reference_logprobs is not None, "call Objective.with_reference before the loss"
                token_kl = divergence(s.kl_impl, logprobs, samples.reference_logprobs)
                if s.kl_by_ratio:
                    token_kl = token_kl * (answers.ratio if ratio is None else ratio)
                kl = torch.where(mask > 0, token_kl * weights, 0.0).sum()
            if not s.kl_in_reward:
                total = total + s.kl_beta * kl
            metrics["kl"] = torch.stack([kl.detach(), weights.sum()])
        rewarded = ~samples.rewards.isnan()
        metrics["reward"] = torch.stack([samples.rewards.nan_to_num().sum(), rewarded.sum().float()])
        metrics["entropy"] = torch.stack([(statistics.entropy.t() * mask).sum(), count])
        if clips:
            assert ratio is not None
            metrics |= _clip_shares(ratio, answers, s, bounded_below=loss is not truncated_weights)
        metrics |= sampler_difference(old, samples.sampler_logprobs, mask > 0)
        return total.view(1), metrics

    def with_reference(batches: list[Batch], reference: Reference) -> list[Batch]:
        outputs = iter(reference.outputs(batches) if s.kl_impl == "full" else [])
        unknown = [b for b in batches if s.kl_impl != "full" and rollout_values(b).reference_logprobs is None]
        logprobs = iter(reference.logprobs(unknown) if unknown else [])
        filled = []
        for batch in batches:
            values = rollout_values(batch)
            if values.reference_logprobs is None:
                values = replace(values, reference_logprobs=next(logprobs, None), reference_output=next(outputs, None))
            filled.append(replace(batch, method=values))
        return filled

    names = ["reward", *(("kl",) if s.kl_beta else ()), "entropy"]
    names += ["clip_ratio/low_mean", "clip_ratio/high_mean"] if clips else []
    return Objective(
        weight, loss_sum, (*names, DIFFERENCE), maxima=(f"{DIFFERENCE}_max",), with_reference=with_reference
    )


def _clip_shares(ratio: Tensor, answers: Answers, s: PolicySettings, bounded_below: bool) -> dict[str, Tensor]:
    """Returns metrics: the shares of ratios below and above the clipping bounds, whose gradient clipping
    removes.

    They are shares of tokens, or of answers if the loss has one ratio per answer. bounded_below: the loss
    also clips small ratios.
    """
    places = answers.mask if ratio.shape == answers.mask.shape else torch.ones_like(ratio)
    low = (ratio < 1 - s.epsilon) & (answers.advantages < 0) & bounded_below
    upper_bound = 1 + s.epsilon_high if bounded_below else s.epsilon_high
    high = (ratio > upper_bound) & (answers.advantages > 0)
    return {
        f"clip_ratio/{name}_mean": torch.stack([(share * places).sum(), places.sum()])
        for name, share in (("low", low), ("high", high))
    }
