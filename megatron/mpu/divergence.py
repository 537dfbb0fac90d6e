"""The divergence of two models' distributions over a vocabulary that may be split over tensor ranks, made
from their hidden states a chunk of tokens at a time."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.mpu.cross_entropy import VocabPart
from megatron.mpu.head import HeadInput, OutputLayer, WeightGradient, chosen, chunks

_FP32_COPIES = 7  # of a chunk's logits at once: both models', their log-probabilities, and what is made of these


def token_divergence_sum(
    head: HeadInput,
    reference: Callable[[Callable[..., Any]], Any],
    weights: Tensor,
    group: dist.ProcessGroup | None,
    columns: int | None = None,
    places: Tensor | None = None,
) -> Tensor:
    """The sum over tokens of KL(reference || model), each times its weight, fp32 scalar, the same on every
    tensor rank.

    reference: `HeadInput.use` of the model that is compared with, which gets no gradients.
    weights: `[seq, batch]`; columns, places: as of `token_loss_sum`. Gradients are made in the forward pass,
    where autograd is on, and serve for one backward pass. The logits of all tokens are never there at once.
    """
    gradient = torch.is_grad_enabled()

    def use(hidden: Tensor, layer: OutputLayer) -> Tensor:
        part = VocabPart.of(layer.weight.shape[0], group, columns)
        x, of_weights = (chosen(v, places) for v in (hidden.flatten(0, -2), weights.reshape(-1).float()))

        def beside(reference_hidden: Tensor, reference_layer: OutputLayer) -> Tensor:
            y = chosen(reference_hidden.flatten(0, -2), places).detach()
            return _DivergenceSum.apply(x, layer.weight, layer, y, reference_layer, of_weights, part, gradient)

        return reference(beside)

    return head.use(use)


class _DivergenceSum(torch.autograd.Function):
    """The sum of KL(reference || model) over tokens, with its gradients made with it."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        layer: OutputLayer,
        reference_hidden: Tensor,
        reference_layer: OutputLayer,
        weights: Tensor,
        part: VocabPart,
        gradient: bool,
    ) -> Tensor:
        of_hidden = torch.empty_like(hidden) if gradient and ctx.needs_input_grad[0] else None
        of_weight = WeightGradient(layer) if gradient and ctx.needs_input_grad[1] else None
        total = hidden.new_zeros((), dtype=torch.float32)
        for chunk in chunks(len(hidden), _FP32_COPIES * 4 * weight.shape[0]):
            x = hidden[chunk]
            logits = layer.product.output(x, weight)
            others = reference_layer.product.output(reference_hidden[chunk], reference_layer.weight)
            logprobs, expected = _log_softmax(logits, part), _log_softmax(others, part)
            of_rows = (expected.exp() * (expected - logprobs)).sum(-1)
            if part.group is not None:
                dist.all_reduce(of_rows, group=part.group)
            total += (of_rows * weights[chunk]).sum()
            if of_hidden is None and of_weight is None:
                continue
            logits[:, : part.own] = (logprobs.exp_() - expected.exp_()) * weights[chunk, None]
            logits[:, part.own :] = 0
            if of_hidden is not None:
                of_hidden[chunk] = layer.product.input_gradient(logits, weight)
            if of_weight is not None:
                of_weight.add(logits, x)
        ctx.gradients = of_hidden, of_weight
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if ctx.gradients is None:
            raise RuntimeError("the gradients of a divergence in chunks are there for one backward pass")
        (of_hidden, of_weight), ctx.gradients = ctx.gradients, None
        found = None if of_hidden is None else of_hidden.mul_(grad)
        return found, None if of_weight is None else of_weight.scaled(grad), *(None,) * 6


def _log_softmax(logits: Tensor, part: VocabPart) -> Tensor:
    """log p of this rank's columns that take part, fp32 `[rows, own]`."""
    own = logits[:, : part.own].float()
    highest = own.amax(-1) if part.own else own.new_full((len(own),), -torch.inf)
    if part.group is not None:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=part.group)
    own = own - highest[:, None]
    total = own.exp().sum(-1)
    if part.group is not None:
        dist.all_reduce(total, group=part.group)
    return own - total.log()[:, None]
