"""Grouped matrix products: each group of consecutive rows is multiplied by its own matrix, as for experts."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.mpu.deferred import DeferredGradients

_ALIGNED = 16  # torch's kernel needs rows whose size in bytes is a multiple of this


def grouped_mm(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiplies each row of `x` `[rows, in]` by the matrix of its group; returns `[rows, out]`.

    x: its rows are sorted by group.
    weights: `[groups, in, out]`.
    ends: `[groups]` int32, the index after the last row of each group. Output rows after the last end are
        undefined.

    bf16 on GPUs uses torch's `grouped_mm`, for which the host does not wait. Otherwise the products run one
    after another.
    """
    if _has_kernel(x, weights):
        return F.grouped_mm(x, weights, offs=ends)
    return _one_by_one(x, weights, ends)


def deferred_grouped_mm(
    x: Tensor, weight: Tensor, ends: Tensor, matrices: Callable[[Tensor], Tensor], deferred: DeferredGradients
) -> Tensor:
    """Computes `grouped_mm(x, matrices(weight), ends)`; `deferred` may leave the gradient of `weight` for
    later.

    weight: a parameter. matrices: returns a view of it, `[groups, in, out]`.
    """
    return _DeferredProducts.apply(x, weight, ends, matrices, deferred)


class _DeferredProducts(torch.autograd.Function):
    """Implements `deferred_grouped_mm`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        ends: Tensor,
        matrices: Callable[[Tensor], Tensor],
        deferred: DeferredGradients,
    ) -> Tensor:
        # Not a saved tensor: the gradient is added to this very parameter.
        ctx.weight, ctx.matrices, ctx.deferred = weight, matrices, deferred
        ctx.save_for_backward(x, ends)
        return grouped_mm(x, matrices(weight), ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x, ends), weight, grad = ctx.saved_tensors, ctx.weight, grad.contiguous()
        x_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = grouped_mm(grad, ctx.matrices(weight.detach()).transpose(1, 2), ends)

        def gradient() -> Tensor:
            out = torch.empty_like(weight)
            ctx.matrices(out).copy_(_weight_products(x, grad, ends))
            return out

        if ctx.needs_input_grad[1] and ctx.deferred.is_collecting:
            ctx.deferred.add(weight, gradient)
        elif ctx.needs_input_grad[1]:
            weight_grad = gradient()
        return x_grad, weight_grad, None, None, None


def _weight_products(x: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    """Returns the gradients of the groups' matrices, `[groups, in, out]`, as autograd of `grouped_mm`
    does."""
    if _has_kernel(x, grad.unsqueeze(0)):
        return F.grouped_mm(x.t(), grad, offs=ends)
    return _weight_gradients(x, grad, ends)


def _has_kernel(x: Tensor, weights: Tensor) -> bool:
    sizes = (x.shape[-1], *weights.shape[1:])
    return x.is_cuda and len(x) > 0 and x.dtype == torch.bfloat16 and all(n * x.itemsize % _ALIGNED == 0 for n in sizes)


# A custom operator: it reads the sizes of groups on the host, which would break a compiled graph.
@torch.library.custom_op("megatron::grouped_mm", mutates_args=())
def _one_by_one(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Computes `grouped_mm` as one product per group. Output rows after the last group are 0."""
    out = x.new_empty((x.shape[0], weights.shape[2]))
    start = 0
    for weight, end in zip(weights, ends.tolist(), strict=True):
        if end > start:
            torch.mm(x[start:end], weight, out=out[start:end])
        start = end
    out[start:] = 0.0
    return out


@torch.library.custom_op("megatron::grouped_mm_weights", mutates_args=())
def _weight_gradients(x: Tensor, gradient: Tensor, ends: Tensor) -> Tensor:
    """Returns the gradients of the groups' matrices, `[groups, in, out]`; 0 for empty groups.

    x: the sorted rows `[rows, in]`. gradient: of the output, `[rows, out]`. ends: as in `grouped_mm`.
    """
    out = x.new_empty((ends.shape[0], x.shape[1], gradient.shape[1]))
    start = 0
    for group_gradient, end in zip(out, ends.tolist(), strict=True):
        torch.mm(x[start:end].t(), gradient[start:end], out=group_gradient)  # an empty product is 0
        start = end
    return out


@_one_by_one.register_fake
def _shape(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weights.shape[2]))


@_weight_gradients.register_fake
def _weight_shape(x: Tensor, gradient: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty((ends.shape[0], x.shape[1], gradient.shape[1]))


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weights, ends = ctx.saved_tensors
    gradient = gradient.contiguous()
    x_gradient = _one_by_one(gradient, weights.transpose(1, 2), ends) if ctx.needs_input_grad[0] else None
    weights_gradient = _weight_gradients(x, gradient, ends) if ctx.needs_input_grad[1] else None
    return x_gradient, weights_gradient, None


_one_by_one.register_autograd(_gradients, setup_context=_keep)
