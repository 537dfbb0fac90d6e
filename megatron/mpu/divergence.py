"""Divergences between the predictions of two models, for distillation, computed from hidden states in chunks
of tokens.

The vocabulary may be sharded over tensor ranks. The other model (the teacher) is given in one of two ways.
With its output layer, all tokens of the vocabulary are compared. With only its most likely tokens
(`TopTokens`, which can be stored on disk), all other tokens count as one more outcome.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.mpu.cross_entropy import VocabPart, chosen
from megatron.mpu.head import HeadGradients, HeadInput, OutputLayer, chunks
from megatron.mpu.mappings import gather_from_tensor

# The most fp32 tensors of a chunk's size in memory at once: logits, log-probabilities and their derivatives.
_FP32_COPIES = 11
_MIN_PROBABILITY = torch.finfo(torch.float32).tiny  # smaller probabilities are clamped to it before the logarithm


@dataclass(frozen=True)
class Divergence:
    """The generalised Jensen-Shannon divergence of GKD (arXiv 2306.13649, equation 1), with `beta` as in TRL.

    beta: 0: KL(teacher || model); 1: KL(model || teacher); between: beta KL(teacher || mixture) + (1 - beta)
        KL(model || mixture), where mixture = beta teacher + (1 - beta) model.
    temperature: divides the logits of both models. As in TRL, and unlike Hinton et al., the result is not
        multiplied by temperature^2.
    """

    beta: float = 0.0
    temperature: float = 1.0

    def terms(self, model: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        """Returns each outcome's term of the divergence, and its derivative with respect to the model's
        log-probability.

        The derivative is exact up to a multiple of the model's probability, which does not change the
        gradient through a softmax.

        model, teacher: log-probabilities of all outcomes, fp32 `[..., outcomes]`.
        """
        p, q = teacher.exp(), model.exp()
        if self.beta == 0.0:
            return p * (teacher - model), q - p
        if self.beta == 1.0:
            terms = q * (model - teacher)
            return terms, terms
        mixture = (self.beta * p + (1 - self.beta) * q).clamp_(min=_MIN_PROBABILITY).log_()
        model_terms = (1 - self.beta) * q * (model - mixture)
        return self.beta * p * (teacher - mixture) + model_terms, model_terms


class TopTokens(NamedTuple):
    """The k most likely tokens of a model at each position, with their log-probabilities.

    ids: `[places, k]` int64.
    logprobs: `[places, k + 1]` fp32; the last column is the log-probability of all other tokens together.
    """

    ids: Tensor
    logprobs: Tensor


class DistillationSums(NamedTuple):
    """The sums over tokens that distillation needs, weighted per token: fp32 scalars, equal on all tensor
    ranks.

    loss: share * divergence + (1 - share) * nll, with gradients.
    divergence: from the teacher, without gradients.
    nll: negative log-likelihood of the labels, without gradients.
    """

    loss: Tensor
    divergence: Tensor
    nll: Tensor


def token_divergence_sum(
    head: HeadInput,
    reference: Callable[[Callable[..., Any]], Any],
    weights: Tensor,
    group: dist.ProcessGroup | None,
    columns: int | None = None,
    places: Tensor | None = None,
    divergence: Divergence = Divergence(),
) -> Tensor:
    """Returns the sum over tokens of weight * divergence from a reference model, an fp32 scalar equal on all
    tensor ranks.

    The divergence is KL(reference || model) by default. The logits of all tokens are never in memory at once.
    If autograd is on, gradients are computed in the forward pass, so only one backward pass is possible.

    reference: `HeadInput.use` of the reference model, which gets no gradients.
    weights: `[seq, batch]`.
    columns: number of leading vocabulary columns in the softmax, the rest is padding; None: all.
    places: `[n]` int64, row-major positions in `[seq, batch]` to compute; None: all.
    """
    return distillation_sums(head, reference, None, weights, divergence, 1.0, group, columns, places).loss


def distillation_sums(
    head: HeadInput,
    teacher: Callable[[Callable[..., Any]], Any] | TopTokens,
    labels: Tensor | None,
    weights: Tensor,
    divergence: Divergence,
    share: float,
    group: dist.ProcessGroup | None,
    columns: int | None = None,
    places: Tensor | None = None,
) -> DistillationSums:
    """Returns the sum over tokens of weight * (share * divergence + (1 - share) * nll), and the sums of both
    terms.

    nll is the negative log-likelihood of the label. If autograd is on, gradients are computed in the forward
    pass, so only one backward pass is possible.

    teacher: `HeadInput.use` of the teacher, whose vocabulary is sharded like this model's; or its `TopTokens`
        at all positions, in the order of `[seq, batch]`. It gets no gradients.
    labels: `[seq, batch]`; None: nll is 0, and share must be 1.
    weights: `[seq, batch]`.
    columns: number of leading vocabulary columns in the softmax, the rest is padding; None: all.
    places: `[n]` int64, row-major positions in `[seq, batch]` to compute; None: all.
    """
    gradient, context = torch.is_grad_enabled(), head.context
    if context is not None:
        labels = None if labels is None else context.local(labels)
        places, rows = None if places is None else context.loss_places, weights.shape
        weights = context.local_weights(weights)
        if isinstance(teacher, TopTokens):
            teacher = TopTokens(*(context.local(value.unflatten(0, rows)).flatten(0, 1) for value in teacher))

    def use(hidden: Tensor, layer: OutputLayer) -> DistillationSums:
        part = VocabPart.for_rank(layer.weight.shape[0], group, columns)
        x, chosen_weights = (chosen(v, places) for v in (hidden.flatten(0, -2), weights.reshape(-1).float()))
        local = None if labels is None else part.local(chosen(labels.reshape(-1), places))
        mix = _Mixture(divergence, share, part, local, chosen_weights, gradient)

        def compute(source: _Source) -> DistillationSums:
            return DistillationSums(*_DistillationSums.apply(x, layer.weight, layer, source, mix))

        if isinstance(teacher, TopTokens):
            return compute(TopTokens(*(chosen(value, places) for value in teacher)))
        return teacher(
            lambda teacher_hidden, teacher_layer: compute(
                _TeacherHidden(chosen(teacher_hidden.flatten(0, -2), places).detach(), teacher_layer)
            )
        )

    sums = head.use(use)
    if context is None:
        return sums
    loss, divergence_sum, nll = context.total(torch.stack(sums)).unbind()
    return DistillationSums(loss, divergence_sum.detach(), nll.detach())


def top_tokens(
    head: HeadInput,
    k: int,
    temperature: float,
    group: dist.ProcessGroup | None,
    columns: int | None = None,
    places: Tensor | None = None,
) -> TopTokens:
    """Returns the model's k most likely tokens at each position, in the order of `[seq, batch]`, without
    gradients.

    Logits are divided by `temperature`. The result is the same on every tensor rank.

    columns: number of leading vocabulary columns in the softmax, the rest is padding; None: all.
    places: `[n]` int64, row-major positions in `[seq, batch]` to compute, zeros elsewhere; None: all.
    """

    context = head.context
    if context is not None:
        places = None if places is None else context.loss_places

    @torch.no_grad()
    def use(hidden: Tensor, layer: OutputLayer) -> TopTokens:
        part = VocabPart.for_rank(layer.weight.shape[0], group, columns)
        flat = hidden.flatten(0, -2)
        x = chosen(flat, places)
        chunk_tops = []
        for chunk in chunks(len(x), _FP32_COPIES * 4 * layer.weight.shape[0]):
            logits = layer.logits(x[chunk])
            chunk_tops.append(_top_of_chunk(_log_softmax(logits, part, temperature), k, part))
        top = TopTokens(*(torch.cat(parts) for parts in zip(*chunk_tops, strict=True)))
        if places is None:
            return top
        return TopTokens(*(v.new_zeros(len(flat), v.shape[1]).index_copy(0, places, v) for v in top))

    top, rows = head.use(use), head.hidden_states.shape[:2]
    if context is None:
        return top
    return TopTokens(*(context.full(value.unflatten(0, rows)).flatten(0, 1) for value in top))


def _top_of_chunk(logprobs: Tensor, k: int, part: VocabPart) -> tuple[Tensor, Tensor]:
    """Returns the k most likely tokens over all tensor ranks, and their log-probabilities, as in `TopTokens`.

    logprobs: of this rank's columns, `[rows, local_columns]`.
    """
    num_local = min(k, logprobs.shape[1])
    values, ids = logprobs.topk(num_local) if num_local else (logprobs, logprobs.long())
    missing = (0, k - num_local)
    values = gather_from_tensor(torch.nn.functional.pad(values, missing, value=-torch.inf), part.group)
    ids = gather_from_tensor(torch.nn.functional.pad(ids + part.first_column, missing), part.group)
    values, order = values.topk(k)
    ids = ids.gather(-1, order)
    remaining = (logprobs.exp() * _is_other(ids, logprobs.shape[1], part)).sum(-1)
    if part.group is not None:
        dist.all_reduce(remaining, group=part.group)
    return ids, torch.cat([values, remaining.clamp(min=_MIN_PROBABILITY).log()[:, None]], -1)


def _is_other(ids: Tensor, local_columns: int, part: VocabPart) -> Tensor:
    """Returns fp32 `[rows, local_columns]`: 0 at this rank's columns that are among the tokens `ids` `[rows,
    k]`, else 1."""
    local = ids - part.first_column
    # Tokens that are columns of other ranks are written to an extra column, which is cut off.
    local = local.masked_fill((local < 0) | (local >= local_columns), local_columns)
    return torch.ones(len(ids), local_columns + 1, device=ids.device).scatter_(-1, local, 0.0)[:, :local_columns]


class _TeacherHidden(NamedTuple):
    """The teacher's hidden states `[tokens, hidden]`, and its output layer."""

    hidden: Tensor
    layer: OutputLayer


_Source = _TeacherHidden | TopTokens


class _Mixture(NamedTuple):
    """The settings of `distillation_sums`, with labels as columns of this rank.

    labels: `[tokens]`, -1 for labels of other ranks; None: no labels. weights: fp32 `[tokens]`. gradient:
        compute gradients.
    """

    divergence: Divergence
    share: float
    part: VocabPart
    labels: Tensor | None
    weights: Tensor
    gradient: bool


class _DistillationSums(torch.autograd.Function):
    """Computes (loss, divergence, nll) of tokens. The loss has gradients, which are computed in the forward
    pass."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: Tensor, weight: Tensor, layer: OutputLayer, source: _Source, mix: _Mixture
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradients = HeadGradients(layer, hidden, [mix.gradient and is_needed for is_needed in ctx.needs_input_grad[:2]])
        gradient = gradients.is_needed
        total, part, local_columns = hidden.new_zeros(2, dtype=torch.float32), mix.part, mix.part.local_columns
        for chunk in chunks(len(hidden), _FP32_COPIES * 4 * weight.shape[0]):
            x, weights = hidden[chunk], mix.weights[chunk]
            logits = layer.logits(x)
            slope = layer.slope(logits) if gradient else None
            if isinstance(source, TopTokens):
                top = TopTokens(source.ids[chunk], source.logprobs[chunk])
                rows, slopes = _top_divergence(logits, top, mix, gradient)
            else:
                teacher_logits = source.layer.logits(source.hidden[chunk])
                rows, slopes = _full_divergence(logits, teacher_logits, mix, gradient)
            nll = torch.zeros_like(rows)
            if mix.labels is not None:
                nll, nll_slopes = _likelihood(logits, mix.labels[chunk], part, gradient and mix.share < 1.0)
                if nll_slopes is not None and slopes is not None:
                    slopes = slopes.mul_(mix.share).add_(nll_slopes, alpha=1.0 - mix.share)
            total += torch.stack([rows, nll]) @ weights
            if slopes is None:
                continue
            logits[:, :local_columns] = slopes * weights[:, None]
            logits[:, local_columns:] = 0
            gradients.add(chunk, logits, slope, x, weight)
        ctx.gradients = gradients
        divergence, nll = total.unbind()
        divergence, nll = divergence.clone(), nll.clone()
        ctx.mark_non_differentiable(divergence, nll)
        return mix.share * divergence + (1.0 - mix.share) * nll, divergence, nll

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if ctx.gradients is None:
            raise RuntimeError("the gradients of the divergence were freed by its one backward pass; run forward again")
        gradients, ctx.gradients = ctx.gradients, None
        return *gradients.scaled(grad), *(None,) * 3


# -- for one chunk: the divergence of each row, and the gradient of this rank's logits -----------------------
# Logits are `[rows, vocab/T]`, gradients `[rows, local_columns]`.


def _full_divergence(
    logits: Tensor, teacher_logits: Tensor, mix: _Mixture, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns the divergence of each row over the full vocabulary, `[rows]`, and the gradient of the model's
    logits.

    The gradient is None unless `gradient`. teacher_logits: `[rows, vocab/T]`, sharded like the model's
    `logits`.
    """
    temperature, part = mix.divergence.temperature, mix.part
    model, teacher = _log_softmax(logits, part, temperature), _log_softmax(teacher_logits, part, temperature)
    values, slopes = mix.divergence.terms(model, teacher)
    sums = torch.stack([values.sum(-1), slopes.sum(-1)])
    if part.group is not None:
        dist.all_reduce(sums, group=part.group)
    if not gradient:
        return sums[0], None
    return sums[0], (slopes - model.exp_().mul_(sums[1][:, None])).div_(temperature)


def _top_divergence(logits: Tensor, top: TopTokens, mix: _Mixture, gradient: bool) -> tuple[Tensor, Tensor | None]:
    """Returns the divergence of each row from the teacher's top tokens, `[rows]`, and the gradient of the
    model's logits.

    The outcomes are the teacher's most likely tokens, and all other tokens together as one outcome. The
    gradient is None unless `gradient`.
    """
    temperature, part, local_columns = mix.divergence.temperature, mix.part, mix.part.local_columns
    model = _log_softmax(logits, part, temperature)
    local = part.local(top.ids)
    is_own, place = local >= 0, local.clamp(min=0)
    at_top = (
        model.gather(-1, place).masked_fill_(~is_own, 0.0) if local_columns else torch.zeros_like(top.logprobs[:, 1:])
    )
    probabilities = model.exp()
    other_probabilities = probabilities * _is_other(top.ids, local_columns, part)
    outcomes = torch.cat([at_top, other_probabilities.sum(-1, keepdim=True)], -1)
    if part.group is not None:
        dist.all_reduce(outcomes, group=part.group)
    remaining = outcomes[:, -1:].clamp(min=_MIN_PROBABILITY)
    outcomes[:, -1:] = remaining.log()
    values, slopes = mix.divergence.terms(outcomes, top.logprobs)
    if not gradient:
        return values.sum(-1), None
    # Gradient of a column's logit: the slope of its outcome, times the column's share of the outcome, minus
    # the column's probability times the sum of all slopes.
    logit_slopes = other_probabilities * (slopes[:, -1:] / remaining) - probabilities * slopes.sum(-1, keepdim=True)
    if local_columns:
        logit_slopes.scatter_add_(-1, place, slopes[:, :-1].masked_fill(~is_own, 0.0))
    return values.sum(-1), logit_slopes.div_(temperature)


def _likelihood(logits: Tensor, labels: Tensor, part: VocabPart, gradient: bool) -> tuple[Tensor, Tensor | None]:
    """Returns the negative log-likelihood of the labels, `[rows]`, and the gradient of the logits (None
    unless `gradient`).

    labels: columns of this rank, -1 for labels of other ranks.
    """
    model = _log_softmax(logits, part)
    is_own, place = labels >= 0, labels.clamp(min=0)[:, None]
    rows = torch.zeros(len(labels), device=labels.device)
    if part.local_columns:
        rows = -model.gather(-1, place).squeeze(-1).masked_fill(~is_own, 0.0)
    if part.group is not None:
        dist.all_reduce(rows, group=part.group)
    if not gradient:
        return rows, None
    slopes = model.exp_()
    if part.local_columns:
        slopes.scatter_add_(-1, place, -is_own[:, None].float())
    return rows, slopes


def _log_softmax(logits: Tensor, part: VocabPart, temperature: float = 1.0) -> Tensor:
    """Returns log p of this rank's vocabulary columns without padding, fp32 `[rows, local_columns]`.

    The softmax runs over all tensor ranks. The logits are divided by `temperature`.
    """
    local_logits = logits[:, : part.local_columns].float()
    if temperature != 1.0:
        local_logits = local_logits / temperature
    highest = local_logits.amax(-1) if part.local_columns else local_logits.new_full((len(local_logits),), -torch.inf)
    if part.group is not None:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=part.group)
    local_logits = local_logits - highest[:, None]
    total = local_logits.exp().sum(-1)
    if part.group is not None:
        dist.all_reduce(total, group=part.group)
    return local_logits - total.log()[:, None]
