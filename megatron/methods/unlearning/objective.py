"""The objective of a run that unlearns.

Ordinary steps predict the next token. Steps on the forget set use gradient ascent, NPO or SimNPO. A further
term, on a retain set, can keep the model's other knowledge.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.data import Batch
from megatron.data.batch import MethodBatch
from megatron.data.preferences.responses import Responses, batch_responses
from megatron.methods.unlearning.keys import FORGET_LOSSES
from megatron.mpu import HeadInput, LossOfTokens, token_divergence_sum, token_loss_sum
from megatron.objectives.language_modelling import nll, token_count
from megatron.objectives.objective import HeadUse, LossSums, Objective, Reference
from megatron.objectives.preference import (
    label_logprobs,
    reference_logprobs,
    response_lengths,
    response_sums,
    with_reference_sums,
)

# Index of the loss part of each dataset: every micro-batch comes from one dataset.
PARTS = {"train": 0, "forget": 1, "retain": 2}


@dataclass(frozen=True, eq=False)
class UnlearningBatch(MethodBatch):
    """Extra values of a micro-batch from the forget set or the retain set."""

    set: Literal["forget", "retain"]
    responses: Responses | None = None  # forget set: its sequences, for losses of sequences
    reference_output: HeadUse | None = None  # retain set: the reference model's hidden states and head, for the KL


def set_of(batch: Batch) -> str:
    """Returns which dataset a micro-batch comes from: "train", "forget" or "retain"."""
    return batch.method.set if isinstance(batch.method, UnlearningBatch) else "train"


@dataclass(frozen=True)
class Sequences:
    """Scores of the n forget-set sequences of a batch, fp32 `[n]` each.

    logprobs: sum of log p(label) over the trained tokens, under the model.
    reference: the same sum under the reference model; None without a reference.
    count: number of trained tokens.
    """

    logprobs: Tensor
    reference: Tensor | None
    count: Tensor


@dataclass(frozen=True)
class ForgetSettings:
    """The options of NPO and SimNPO."""

    npo_beta: float = 0.1
    simnpo_beta: float = 2.5
    simnpo_gamma: float = 0.0


# Maps sequences to their losses `[n]`.
SequenceLoss = Callable[[Sequences, ForgetSettings], Tensor]


def ascent(logprobs: Tensor) -> Tensor:
    """Returns log p(label) of each token: minus the usual loss, so minimising it is gradient ascent."""
    return logprobs


def npo(sequences: Sequences, settings: ForgetSettings) -> Tensor:
    """Returns the NPO loss (arXiv 2404.05868, equation 3): (2 / beta) log(1 + (p / p_ref)^beta).

    NPO is negative preference optimization. The loss is 2 ln 2 / beta while the model equals its reference.
    """
    assert sequences.reference is not None
    ratio = sequences.logprobs - sequences.reference
    return -2.0 / settings.npo_beta * F.logsigmoid(-settings.npo_beta * ratio)


def simnpo(sequences: Sequences, settings: ForgetSettings) -> Tensor:
    """Returns the SimNPO loss (arXiv 2410.07163, equation 4): -(2 / beta) log sigmoid(-beta / |y| log p -
    gamma).

    y| is the number of trained tokens of the sequence. No reference model is needed.
    """
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
    """Returns the objective of runs with `ga_dataset`.

    The loss of a micro-batch depends on its dataset (`set_of`):
    - training set: the loss of `ordinary`, the objective of ordinary steps;
    - forget set: the mean of `forget_loss` over tokens ("nll") or over sequences;
    - retain set, read in the same steps: `retain_weight` times the mean negative log-likelihood of a token,
    or with `retain_divergence` times the mean KL(reference || model).

    separate_losses: also compute the metrics `gd_forget_loss` and `gd_retain_loss`.
    columns: number of leading vocabulary columns in the softmax; None: all.
    """
    forget_metrics = ("ga_actual_loss", "ga_objective", *(("gd_forget_loss",) if separate_losses else ()))
    retain_metrics = ("gd_retain_loss",) if separate_losses else ()
    names = (*ordinary.metrics, *forget_metrics, *retain_metrics)
    is_per_sequence, needs_reference = forget_loss != "nll", FORGET_LOSSES[forget_loss].needs_reference

    def weight(batch: Batch) -> Tensor:
        if set_of(batch) == "train":
            return _in_its_part(ordinary.weight(batch), batch)
        count = _sequences if set_of(batch) == "forget" and is_per_sequence else token_count
        return _in_its_part(count(batch), batch)

    def loss_sum(head: HeadInput, batch: Batch, group: dist.ProcessGroup | None) -> LossSums:
        metrics = {name: torch.zeros(2, device=batch.tokens.device) for name in names}
        if set_of(batch) == "train":
            loss, part_metrics = ordinary.loss_sum(head, batch, group)
        elif set_of(batch) == "retain":
            total = _retain_sum(head, batch, group)
            loss, part_metrics = retain_weight * total, dict.fromkeys(retain_metrics, _mean(total, token_count(batch)))
        else:
            likelihood, loss = _forget_sums(head, batch, group)
            part_metrics = dict.fromkeys(forget_metrics, _mean(-likelihood, token_count(batch)))
            count = _sequences(batch) if is_per_sequence else token_count(batch)
            part_metrics["ga_objective"] = _mean(loss, count)
        return _in_its_part(loss, batch), metrics | part_metrics

    def _retain_sum(head: HeadInput, batch: Batch, group: dist.ProcessGroup | None) -> Tensor:
        weights = batch.loss_weights.t()
        if not retain_divergence:
            kind = LossOfTokens(nll)
            return token_loss_sum(head, batch.labels.t(), weights, kind, group, columns, batch.loss_places)[0].view(1)
        assert isinstance(batch.method, UnlearningBatch)
        output = batch.method.reference_output
        if output is None:
            raise ValueError(
                "gd_retain_loss_type: kl needs a reference model's outputs, but this batch holds none: fill them in "
                "with Objective.with_reference before the loss"
            )
        return token_divergence_sum(head, output, weights, group, columns, batch.loss_places).view(1)

    def _forget_sums(head: HeadInput, batch: Batch, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
        """Returns the sums over a forget-set batch of log p(label) and of the loss, `[1]` each."""
        if not is_per_sequence:
            kind, weights = LossOfTokens(ascent), batch.loss_weights.t()
            total = token_loss_sum(head, batch.labels.t(), weights, kind, group, columns, batch.loss_places)[0].view(1)
            return total.detach(), total
        batch = _as_responses(batch)
        logprobs = label_logprobs(head, batch, group, columns)
        reference = reference_logprobs(batch) if needs_reference else None
        sequences = Sequences(response_sums(logprobs, batch), reference, response_lengths(batch))
        losses: Tensor = FORGET_LOSSES[forget_loss].load_function()(sequences, settings)
        real = sequences.count > 0
        return sequences.logprobs.detach().sum().view(1), torch.where(real, losses, 0.0).sum().view(1)

    def with_reference(batches: list[Batch], reference: Reference) -> list[Batch]:
        sequences = [_as_responses(b) for b in batches if set_of(b) == "forget" and needs_reference]
        scored = iter(with_reference_sums(sequences, reference))
        retained = [batch for batch in batches if set_of(batch) == "retain"]
        outputs = iter(reference.outputs(retained) if retain_divergence and retained else [])
        filled = []
        for batch in batches:
            values = batch.method
            if isinstance(values, UnlearningBatch) and values.set == "retain":
                values = replace(values, reference_output=next(outputs, None))
            elif isinstance(values, UnlearningBatch) and needs_reference:
                values = replace(values, responses=batch_responses(next(scored)))
            filled.append(replace(batch, method=values))
        return filled

    return replace(ordinary, weight=weight, loss_sum=loss_sum, metrics=names, with_reference=with_reference)


def _as_responses(batch: Batch) -> Batch:
    """Returns a batch of the forget set with its sequences stored as `Responses`."""
    assert isinstance(batch.method, UnlearningBatch)
    return replace(batch, method=batch.method.responses)


def _sequences(batch: Batch) -> Tensor:
    return (response_lengths(_as_responses(batch)) > 0).sum().float().view(1)


def _mean(total: Tensor, count: Tensor) -> Tensor:
    """Returns a metric as (sum, divisor), `[2]`."""
    return torch.cat([total.detach(), count])


def _in_its_part(value: Tensor, batch: Batch) -> Tensor:
    """Returns loss parts `[3]`, one per dataset: `value` `[1]` for the batch's own dataset, 0 for the
    others."""
    parts = value.new_zeros(len(PARTS))
    return parts.index_add(0, torch.full((1,), PARTS[set_of(batch)], device=value.device), value)
