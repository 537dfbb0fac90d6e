"""Divergences of two models' distributions over a vocabulary, computed from hidden states in chunks of
tokens.

The vocabulary may be split over tensor ranks. The other model is given by its head, and then all outcomes are
compared. Or it is given by its most likely tokens, with all other tokens as one more outcome (`TopTokens`,
which can be stored on disk).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.mpu.cross_entropy import VocabPart
from megatron.mpu.head import HeadGradients, HeadInput, OutputLayer, chosen, chunks
from megatron.mpu.mappings import gather_from_tensor

_FP32_COPIES = 11  # of a chunk's logits at most at once, counted: logits, log-probabilities and their derivatives
_MIN_PROBABILITY = torch.finfo(torch.float32).tiny  # below which probabilities are clamped before the logarithm


@dataclass(frozen=True)
class Divergence:
    """The generalised Jensen-Shannon divergence of GKD (arXiv 2306.13649, equation 1), with beta as in TRL.

    beta: 0: KL(teacher || model); 1: KL(model || teacher); between: beta KL(teacher || mixture) + (1 - beta)
        KL(model || mixture), where mixture = beta teacher + (1 - beta) model.
    temperature: divides the logits of both. The result is not multiplied by its square (as in TRL, unlike
        Hinton et al.).
    """

    beta: float = 0.0
    temperature: float = 1.0

    def terms(self, model: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        """The contribution of each outcome to the divergence, and to its derivative by the model's
        log-probability.

        The derivative is exact up to a multiple of the model's probability, which does not change the
        gradient through a softmax. model, teacher: log-probabilities of all outcomes, fp32 `[..., outcomes]`.
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
    """A model's most likely tokens at each position.

    ids: `[places, k]` int64.
    logprobs: `[places, k + 1]` fp32, of these tokens; the last column is of all other tokens together.
    """

    ids: Tensor
    logprobs: Tensor


class DistillationSums(NamedTuple):
    """Weighted sums over tokens, fp32 scalars that are the same on every tensor rank.

    loss: share * divergence + (1 - share) * nll, with gradients.
    divergence, nll: the two terms (nll: negative log-likelihood), without gradients.
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
    """Returns the weighted sum over tokens of a divergence, by default KL(reference || model), as an fp32
    scalar.

    It is the same on every tensor rank. Gradients are computed in the forward pass if autograd is on, and
    allow one backward pass. The logits of all tokens are never in memory at once.

    reference: `HeadInput.use` of the model to compare with, which gets no gradients.
    weights: `[seq, batch]`.
    columns, places: as in `token_loss_sum`.
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
    """Returns the sums over tokens of share * divergence + (1 - share) * negative log-likelihood of the
    label.

    Gradients are computed in the forward pass if autograd is on, and allow one backward pass.

    teacher: `HeadInput.use` of the teacher, whose vocabulary is split like this model's, or its `TopTokens`
        at all positions in the order of `[seq, batch]`. The teacher gets no gradients.
    labels: `[seq, batch]`; None: share is 1 and the negative log-likelihood 0.
    weights: `[seq, batch]`.
    columns, places: as in `token_loss_sum`.
    """
    gradient = torch.is_grad_enabled()

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

    return head.use(use)


def top_tokens(
    head: HeadInput,
    k: int,
    temperature: float,
    group: dist.ProcessGroup | None,
    columns: int | None = None,
    places: Tensor | None = None,
) -> TopTokens:
    """The k most likely tokens of every place in the order of `[seq, batch]`, without gradients.

    Logits are divided by `temperature`. The result is the same on every tensor rank. With `places`, all other
    places have zeros. columns, places: as in `token_loss_sum`.
    """

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

    return head.use(use)


def _top_of_chunk(logprobs: Tensor, k: int, part: VocabPart) -> tuple[Tensor, Tensor]:
    """`TopTokens` from this rank's log-probabilities `[rows, local_columns]`."""
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
    """Returns fp32 `[rows, local_columns]`: 1 at this rank's columns that are not among `ids` `[rows, k]`,
    else 0."""
    local = ids - part.first_column
    # Tokens of other ranks go to an extra column.
    local = local.masked_fill((local < 0) | (local >= local_columns), local_columns)
    return torch.ones(len(ids), local_columns + 1, device=ids.device).scatter_(-1, local, 0.0)[:, :local_columns]


class _TeacherHidden(NamedTuple):
    """The teacher's hidden states `[tokens, hidden]` and output layer."""

    hidden: Tensor
    layer: OutputLayer


_Source = _TeacherHidden | TopTokens


class _Mixture(NamedTuple):
    """The settings of `distillation_sums`. labels: local `[tokens]` or None; weights: fp32 `[tokens]`."""

    divergence: Divergence
    share: float
    part: VocabPart
    labels: Tensor | None
    weights: Tensor
    gradient: bool


class _DistillationSums(torch.autograd.Function):
    """`DistillationSums` of tokens; the loss has gradients, computed in the same pass."""

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
            raise RuntimeError("the divergence supports only one backward pass, which frees its gradients")
        gradients, ctx.gradients = ctx.gradients, None
        return *gradients.scaled(grad), *(None,) * 3


# -- of a chunk: the divergence of each row, and its gradient by this rank's logits `[rows, local_columns]` --


def _full_divergence(
    logits: Tensor, teacher_logits: Tensor, mix: _Mixture, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns the divergence of each row over the full vocabulary, `[rows]`, and with `gradient` the logits'
    gradient.

    teacher_logits: the teacher's `[rows, vocab/T]`, sharded like the model's logits.
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
    """Returns the divergence of each row, `[rows]`, and with `gradient` the logits' gradient.

    The outcomes are the teacher's most likely tokens, and all other tokens together as one.
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
    # Gradient by a column's logit: its outcome's slope times its share of it, minus its share of all slopes.
    logit_slopes = other_probabilities * (slopes[:, -1:] / remaining) - probabilities * slopes.sum(-1, keepdim=True)
    if local_columns:
        logit_slopes.scatter_add_(-1, place, slopes[:, :-1].masked_fill(~is_own, 0.0))
    return values.sum(-1), logit_slopes.div_(temperature)


def _likelihood(logits: Tensor, labels: Tensor, part: VocabPart, gradient: bool) -> tuple[Tensor, Tensor | None]:
    """Returns the negative log-likelihood of the local labels, `[rows]`, and with `gradient` the logits'
    gradient."""
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
    """log p of this rank's columns that take part, fp32 `[rows, local_columns]`, of logits divided by
    `temperature`."""
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
