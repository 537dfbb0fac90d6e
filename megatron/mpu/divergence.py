"""The divergence of two models' distributions over a vocabulary that may be split over tensor ranks, made
from their hidden states a chunk of tokens at a time.

Of the other model all outcomes are compared (its head is asked beside the model's), or its most likely tokens
and all others together as one more outcome (`TopTokens`, which can be kept on disk).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.mpu.cross_entropy import VocabPart
from megatron.mpu.head import HeadInput, OutputLayer, WeightGradient, chosen, chunks
from megatron.mpu.mappings import gather_from_tensor

_FP32_COPIES = 11  # of a chunk's logits at most at once, counted: logits, log-probabilities, and what is made of these
_LEAST = torch.finfo(torch.float32).tiny  # probability of an outcome whose logarithm is taken


@dataclass(frozen=True)
class Divergence:
    """The generalised Jensen-Shannon divergence of GKD (arXiv 2306.13649, equation 1), in TRL's orientation.

    beta: 0: KL(teacher || model); 1: KL(model || teacher); between them beta KL(teacher || mixture) +
    (1 - beta) KL(model || mixture), of the mixture beta teacher + (1 - beta) model. temperature: divides the
    logits of both; the result is not multiplied by its square (Hinton et al. do, TRL does not).
    """

    beta: float = 0.0
    temperature: float = 1.0

    def of(self, model: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        """What each outcome adds to the divergence, and to its derivative by the model's log-probability, up
        to a multiple of the model's probability, which a softmax does not feel.

        model, teacher: log-probabilities of all outcomes, fp32 `[..., outcomes]`.
        """
        p, q = teacher.exp(), model.exp()
        if self.beta == 0.0:
            return p * (teacher - model), q - p
        if self.beta == 1.0:
            each = q * (model - teacher)
            return each, each
        mixture = (self.beta * p + (1 - self.beta) * q).clamp_(min=_LEAST).log_()
        of_model = (1 - self.beta) * q * (model - mixture)
        return self.beta * p * (teacher - mixture) + of_model, of_model


class TopTokens(NamedTuple):
    """The most likely tokens of each place under a model.

    ids: `[places, k]` int64. logprobs: theirs, and last that of all other tokens together,
    `[places, k + 1]` fp32.
    """

    ids: Tensor
    logprobs: Tensor


class DistillationSums(NamedTuple):
    """Sums over tokens, each times its weight, fp32 scalars that are the same on every tensor rank.

    loss: of the mixture of divergence and negative log-likelihood, with gradients; divergence, nll: of each,
    without.
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
    """The sum over tokens of a divergence, KL(reference || model) if no other is given, each times its
    weight, fp32 scalar, the same on every tensor rank.

    reference: `HeadInput.use` of the model that is compared with, which gets no gradients.
    weights: `[seq, batch]`; columns, places: as of `token_loss_sum`. Gradients are made in the forward pass,
    where autograd is on, and serve for one backward pass. The logits of all tokens are never there at once.
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
    """The sum over tokens of share * divergence + (1 - share) * negative log-likelihood of the label, with
    its gradients made in the forward pass, where autograd is on; they serve for one backward pass.

    teacher: `HeadInput.use` of the model that is learned from, whose vocabulary is cut as this one's, or its
    `TopTokens` of all places in the order of `[seq, batch]`. It gets no gradients. labels: `[seq, batch]`;
    None: there are none, share is 1 and the negative log-likelihood 0. weights: `[seq, batch]`; columns,
    places: as of `token_loss_sum`.
    """
    gradient = torch.is_grad_enabled()

    def use(hidden: Tensor, layer: OutputLayer) -> DistillationSums:
        part = VocabPart.of(layer.weight.shape[0], group, columns)
        x, of_weights = (chosen(v, places) for v in (hidden.flatten(0, -2), weights.reshape(-1).float()))
        local = None if labels is None else part.local(chosen(labels.reshape(-1), places))
        mix = _Mixture(divergence, share, part, local, of_weights, gradient)

        def beside(source: _Source) -> DistillationSums:
            return DistillationSums(*_DistillationSums.apply(x, layer.weight, layer, source, mix))

        if isinstance(teacher, TopTokens):
            return beside(TopTokens(*(chosen(value, places) for value in teacher)))
        return teacher(lambda y, other: beside(_Beside(chosen(y.flatten(0, -2), places).detach(), other)))

    return head.use(use)


def top_tokens(
    head: HeadInput,
    k: int,
    temperature: float,
    group: dist.ProcessGroup | None,
    columns: int | None = None,
    places: Tensor | None = None,
) -> TopTokens:
    """The k most likely tokens of every place in the order of `[seq, batch]`, of logits that are divided by
    `temperature`, without gradients; the same on every tensor rank. With `places` zeros at all others.
    columns, places: as of `token_loss_sum`."""

    @torch.no_grad()
    def use(hidden: Tensor, layer: OutputLayer) -> TopTokens:
        part = VocabPart.of(layer.weight.shape[0], group, columns)
        flat = hidden.flatten(0, -2)
        x = chosen(flat, places)
        found = []
        for chunk in chunks(len(x), _FP32_COPIES * 4 * layer.weight.shape[0]):
            logits = layer.logits(x[chunk])
            found.append(_top_of_chunk(_log_softmax(logits, part, temperature), k, part))
        top = TopTokens(*(torch.cat(parts) for parts in zip(*found, strict=True)))
        if places is None:
            return top
        return TopTokens(*(v.new_zeros(len(flat), v.shape[1]).index_copy(0, places, v) for v in top))

    return head.use(use)


def _top_of_chunk(logprobs: Tensor, k: int, part: VocabPart) -> tuple[Tensor, Tensor]:
    """`TopTokens` from this rank's columns `[rows, own]`."""
    most = min(k, logprobs.shape[1])
    values, ids = logprobs.topk(most) if most else (logprobs, logprobs.long())
    missing = (0, k - most)
    values = gather_from_tensor(torch.nn.functional.pad(values, missing, value=-torch.inf), part.group)
    ids = gather_from_tensor(torch.nn.functional.pad(ids + part.first, missing), part.group)
    values, order = values.topk(k)
    ids = ids.gather(-1, order)
    rest = (logprobs.exp() * _is_other(ids, logprobs.shape[1], part)).sum(-1)
    if part.group is not None:
        dist.all_reduce(rest, group=part.group)
    return ids, torch.cat([values, rest.clamp(min=_LEAST).log()[:, None]], -1)


def _is_other(ids: Tensor, own: int, part: VocabPart) -> Tensor:
    """1 at this rank's columns that are not among `ids` `[rows, k]`, else 0: fp32 `[rows, own]`."""
    local = ids - part.first
    local = local.masked_fill((local < 0) | (local >= own), own)  # a column of its own for those of other ranks
    return torch.ones(len(ids), own + 1, device=ids.device).scatter_(-1, local, 0.0)[:, :own]


class _Beside(NamedTuple):
    """Hidden states `[tokens, hidden]` of the other model, and its output layer."""

    hidden: Tensor
    layer: OutputLayer


_Source = _Beside | TopTokens


class _Mixture(NamedTuple):
    """What is made of each token. labels: local `[tokens]` or None; weights: fp32 `[tokens]`."""

    divergence: Divergence
    share: float
    part: VocabPart
    labels: Tensor | None
    weights: Tensor
    gradient: bool


class _DistillationSums(torch.autograd.Function):
    """`DistillationSums` of tokens; the first has gradients, made with it."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: Tensor, weight: Tensor, layer: OutputLayer, source: _Source, mix: _Mixture
    ) -> tuple[Tensor, Tensor, Tensor]:
        of_hidden = torch.empty_like(hidden) if mix.gradient and ctx.needs_input_grad[0] else None
        of_weight = WeightGradient(layer) if mix.gradient and ctx.needs_input_grad[1] else None
        gradient = of_hidden is not None or of_weight is not None
        total, part, own = hidden.new_zeros(2, dtype=torch.float32), mix.part, mix.part.own
        for chunk in chunks(len(hidden), _FP32_COPIES * 4 * weight.shape[0]):
            x, weights = hidden[chunk], mix.weights[chunk]
            logits = layer.logits(x)
            slope = layer.slope(logits) if gradient else None
            if isinstance(source, TopTokens):
                top = TopTokens(source.ids[chunk], source.logprobs[chunk])
                rows, slopes = _beside_top(logits, top, mix, gradient)
            else:
                others = source.layer.logits(source.hidden[chunk])
                rows, slopes = _beside_all(logits, others, mix, gradient)
            nll = torch.zeros_like(rows)
            if mix.labels is not None:
                nll, of_nll = _likelihood(logits, mix.labels[chunk], part, gradient and mix.share < 1.0)
                if of_nll is not None and slopes is not None:
                    slopes = slopes.mul_(mix.share).add_(of_nll, alpha=1.0 - mix.share)
            total += torch.stack([rows, nll]) @ weights
            if slopes is None:
                continue
            logits[:, :own] = slopes * weights[:, None]
            logits[:, own:] = 0
            if slope is not None:
                logits.mul_(slope)
            if of_hidden is not None:
                of_hidden[chunk] = layer.product.input_gradient(logits, weight)
            if of_weight is not None:
                of_weight.add(logits, x)
        ctx.gradients = of_hidden, of_weight
        divergence, nll = total.unbind()
        divergence, nll = divergence.clone(), nll.clone()
        ctx.mark_non_differentiable(divergence, nll)
        return mix.share * divergence + (1.0 - mix.share) * nll, divergence, nll

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if ctx.gradients is None:
            raise RuntimeError("the gradients of a divergence in chunks are there for one backward pass")
        (of_hidden, of_weight), ctx.gradients = ctx.gradients, None
        found = None if of_hidden is None else of_hidden.mul_(grad)
        return found, None if of_weight is None else of_weight.scaled(grad), *(None,) * 3


# -- of a chunk: the divergence of each row, and its gradient by this rank's logits `[rows, own]` ------------


def _beside_all(logits: Tensor, others: Tensor, mix: _Mixture, gradient: bool) -> tuple[Tensor, Tensor | None]:
    """Beside the logits of another model, `[rows, vocab/T]` as the model's own."""
    temperature, part = mix.divergence.temperature, mix.part
    model, teacher = _log_softmax(logits, part, temperature), _log_softmax(others, part, temperature)
    values, slopes = mix.divergence.of(model, teacher)
    sums = torch.stack([values.sum(-1), slopes.sum(-1)])
    if part.group is not None:
        dist.all_reduce(sums, group=part.group)
    if not gradient:
        return sums[0], None
    return sums[0], (slopes - model.exp_().mul_(sums[1][:, None])).div_(temperature)


def _beside_top(logits: Tensor, top: TopTokens, mix: _Mixture, gradient: bool) -> tuple[Tensor, Tensor | None]:
    """Beside the most likely tokens of another model; all others are one outcome."""
    temperature, part, own = mix.divergence.temperature, mix.part, mix.part.own
    model = _log_softmax(logits, part, temperature)
    local = part.local(top.ids)
    is_own, place = local >= 0, local.clamp(min=0)
    at_top = model.gather(-1, place).masked_fill_(~is_own, 0.0) if own else torch.zeros_like(top.logprobs[:, 1:])
    probabilities = model.exp()
    others = probabilities * _is_other(top.ids, own, part)
    outcomes = torch.cat([at_top, others.sum(-1, keepdim=True)], -1)
    if part.group is not None:
        dist.all_reduce(outcomes, group=part.group)
    rest = outcomes[:, -1:].clamp(min=_LEAST)
    outcomes[:, -1:] = rest.log()
    values, slopes = mix.divergence.of(outcomes, top.logprobs)
    if not gradient:
        return values.sum(-1), None
    # of the logits of a column: of its outcome, by its share in it, less what every outcome loses to it
    found = others * (slopes[:, -1:] / rest) - probabilities * slopes.sum(-1, keepdim=True)
    if own:
        found.scatter_add_(-1, place, slopes[:, :-1].masked_fill(~is_own, 0.0))
    return values.sum(-1), found.div_(temperature)


def _likelihood(logits: Tensor, labels: Tensor, part: VocabPart, gradient: bool) -> tuple[Tensor, Tensor | None]:
    """The negative log-likelihood of the labels, local `[rows]`."""
    model = _log_softmax(logits, part)
    is_own, place = labels >= 0, labels.clamp(min=0)[:, None]
    rows = torch.zeros(len(labels), device=labels.device)
    if part.own:
        rows = -model.gather(-1, place).squeeze(-1).masked_fill(~is_own, 0.0)
    if part.group is not None:
        dist.all_reduce(rows, group=part.group)
    if not gradient:
        return rows, None
    slopes = model.exp_()
    if part.own:
        slopes.scatter_add_(-1, place, -is_own[:, None].float())
    return rows, slopes


def _log_softmax(logits: Tensor, part: VocabPart, temperature: float = 1.0) -> Tensor:
    """log p of this rank's columns that take part, fp32 `[rows, own]`, of logits divided by `temperature`."""
    own = logits[:, : part.own].float()
    if temperature != 1.0:
        own = own / temperature
    highest = own.amax(-1) if part.own else own.new_full((len(own),), -torch.inf)
    if part.group is not None:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=part.group)
    own = own - highest[:, None]
    total = own.exp().sum(-1)
    if part.group is not None:
        dist.all_reduce(total, group=part.group)
    return own - total.log()[:, None]
