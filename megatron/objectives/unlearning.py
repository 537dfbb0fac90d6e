"""The objective of a run that unlearns: next-token prediction in ordinary steps, and in the steps on the
forget set gradient ascent, NPO or SimNPO, alone or beside a term that keeps a retain set."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.data import Batch
from megatron.mpu import HeadInput, LossOfTokens, token_divergence_sum, token_loss_sum
from megatron.neox_arguments.keys.losses import FORGET_LOSSES
from megatron.objectives.language_modelling import nll
from megatron.objectives.objective import LossSums, Objective, named_function
from megatron.objectives.preference import label_logprobs, reference_logprobs, response_lengths, response_sums

# The parts of the loss, by the data that a micro-batch is of (`Batch.role`).
PARTS = {"train": 0, "forget": 1, "retain": 2}


@dataclass(frozen=True)
class Sequences:
    """The sequences of a batch to forget, fp32 `[n]` each: the sums of log p(label) over their trained tokens
    under the model and under the reference (None without one), and how many tokens these are."""

    logprobs: Tensor
    reference: Tensor | None
    count: Tensor


@dataclass(frozen=True)
class ForgetSettings:
    """The options of NPO and SimNPO."""

    npo_beta: float = 0.1
    simnpo_beta: float = 2.5
    simnpo_gamma: float = 0.0


# From sequences to their losses `[n]`.
SequenceLoss = Callable[[Sequences, ForgetSettings], Tensor]


def ascent(logprobs: Tensor) -> Tensor:
    """Minus the negative log-likelihood of each token (gradient ascent)."""
    return logprobs


def npo(sequences: Sequences, settings: ForgetSettings) -> Tensor:
    """Negative preference optimization (arXiv 2404.05868, equation 3): (2 / beta) log(1 + (p / p_ref)^beta);
    where the model is its reference 2 ln 2 / beta."""
    assert sequences.reference is not None
    ratio = sequences.logprobs - sequences.reference
    return -2.0 / settings.npo_beta * F.logsigmoid(-settings.npo_beta * ratio)


def simnpo(sequences: Sequences, settings: ForgetSettings) -> Tensor:
    """SimNPO (arXiv 2410.07163, equation 4): without a reference, of the mean log-probability of a token:
    -(2 / beta) log sigmoid(-beta / |y| log p - gamma)."""
    mean = sequences.logprobs / sequences.count.clamp(min=1.0)
    return -2.0 / settings.simnpo_beta * F.logsigmoid(-settings.simnpo_beta * mean - settings.simnpo_gamma)


def unlearning(
    ordinary: Objective,
    *,
    forget_loss: str = "nll",
    settings: ForgetSettings = ForgetSettings(),
    retain_weight: float = 0.0,
    retain_divergence: bool = False,
    separate_losses: bool = False,
    columns: int | None = None,
) -> Objective:
    """The objective of runs with `ga_dataset`, from that of their ordinary steps.

    A step's micro-batches are of the training set; or of the forget set, whose loss is the mean of
    `forget_loss` over its tokens, or over its sequences; or some are of the retain set beside it, whose mean
    negative log-likelihood, or with `retain_divergence` KL(reference || model), of a token comes in
    `retain_weight` times.
    separate_losses: compute `gd_forget_loss` and `gd_retain_loss` too; columns: as of `token_loss_sum`.
    """
    forget_metrics = ("ga_actual_loss", "ga_objective", *(("gd_forget_loss",) if separate_losses else ()))
    retain_metrics = ("gd_retain_loss",) if separate_losses else ()
    names = (*ordinary.metrics, *forget_metrics, *retain_metrics)
    of_sequences = forget_loss != "nll"

    def weight(batch: Batch) -> Tensor:
        if batch.role == "train":
            return _in_its_part(ordinary.weight(batch), batch)
        return _in_its_part(_sequences(batch) if batch.role == "forget" and of_sequences else _tokens(batch), batch)

    def loss_sum(head: HeadInput, batch: Batch, group: dist.ProcessGroup | None) -> LossSums:
        metrics = {name: torch.zeros(2, device=batch.tokens.device) for name in names}
        if batch.role == "train":
            loss, found = ordinary.loss_sum(head, batch, group)
        elif batch.role == "retain":
            total = _retain_sum(head, batch, group)
            loss, found = retain_weight * total, dict.fromkeys(retain_metrics, _mean(total, _tokens(batch)))
        else:
            likelihood, loss = _forget_sums(head, batch, group)
            found = dict.fromkeys(forget_metrics, _mean(-likelihood, _tokens(batch)))
            count = _sequences(batch) if of_sequences else _tokens(batch)
            found["ga_objective"] = _mean(loss, count)
        return _in_its_part(loss, batch), metrics | found

    def _retain_sum(head: HeadInput, batch: Batch, group: dist.ProcessGroup | None) -> Tensor:
        weights = batch.loss_weights.t()
        if not retain_divergence:
            kind = LossOfTokens(nll)
            return token_loss_sum(head, batch.labels.t(), weights, kind, group, columns, batch.loss_places)[0].view(1)
        if batch.reference_output is None:
            raise ValueError("this loss compares with a reference model, and the batch has no output of one")
        return token_divergence_sum(
            head, batch.reference_output, weights, group, columns, batch.loss_places
        ).view(1)  # fmt: skip

    def _forget_sums(head: HeadInput, batch: Batch, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
        """The sums of log p(label) and of the loss, `[1]` each."""
        if not of_sequences:
            kind, weights = LossOfTokens(ascent), batch.loss_weights.t()
            total = token_loss_sum(head, batch.labels.t(), weights, kind, group, columns, batch.loss_places)[0].view(1)
            return total.detach(), total
        logprobs = label_logprobs(head, batch, group, columns)
        reference = reference_logprobs(batch) if FORGET_LOSSES[forget_loss].needs_reference else None
        sequences = Sequences(response_sums(logprobs, batch), reference, response_lengths(batch))
        losses: Tensor = named_function(FORGET_LOSSES[forget_loss])(sequences, settings)
        real = sequences.count > 0
        return sequences.logprobs.detach().sum().view(1), torch.where(real, losses, 0.0).sum().view(1)

    return replace(ordinary, weight=weight, loss_sum=loss_sum, metrics=names)


def _tokens(batch: Batch) -> Tensor:
    return batch.loss_weights.sum().float().view(1)


def _sequences(batch: Batch) -> Tensor:
    return (response_lengths(batch) > 0).sum().float().view(1)


def _mean(total: Tensor, count: Tensor) -> Tensor:
    """A metric: a sum `[1]` and the number that it is divided by, `[2]`."""
    return torch.cat([total.detach(), count])


def _in_its_part(value: Tensor, batch: Batch) -> Tensor:
    """A value `[1]` as one of all parts, `[3]`, the others 0."""
    parts = value.new_zeros(len(PARTS))
    return parts.index_add(0, torch.full((1,), PARTS[batch.role], device=value.device), value)
