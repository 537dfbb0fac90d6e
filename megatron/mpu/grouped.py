"""Grouped matrix products: each group of consecutive rows is multiplied by its own matrix, as for experts."""

from collections.abc import Callable
from typing import Any, Protocol

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


class GroupedProduct(Protocol):
    """The interface for the products of stacked experts: rows sorted by group, and a matrix for each group.

    `Product` is the same for one matrix. ends: as in `grouped_mm`.
    """

    def output(self, x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        """Returns x W of each group. x: `[rows, in]`; weights: `[groups, in, out]`; result: `[rows, out]`."""
        ...

    def input_gradient(self, grad: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        """Returns the gradient of x, dy W^T. grad: dy `[rows, out]`; result: `[rows, in]`."""
        ...

    def weight_gradient(self, x: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
        """Returns the gradients of the matrices, x^T dy, `[groups, in, out]`; 0 for empty groups."""
        ...


class PlainGroupedProduct:
    """The products of stacked experts by torch, in the dtype of their operands."""

    def output(self, x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        return grouped_mm(x, weights, ends)

    def input_gradient(self, grad: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        return grouped_mm(grad, weights.transpose(1, 2), ends)

    def weight_gradient(self, x: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
        if _has_kernel(x, grad.unsqueeze(0)):
            return F.grouped_mm(x.t(), grad, offs=ends)
        return _weight_gradients(x, grad, ends)


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    matrices: Callable[[Tensor], Tensor],
    product: GroupedProduct,
    deferred: DeferredGradients | None,
) -> Tensor:
    """Multiplies each row of `x` by the matrix of its group; output and gradients are computed by `product`.

    weight: a parameter. matrices: returns a view of it, `[groups, in, out]`. deferred: may leave the gradient
    of `weight` for later.
    """
    if deferred is None and isinstance(product, PlainGroupedProduct):
        return grouped_mm(x, matrices(weight), ends)
    return _Products.apply(x, weight, ends, matrices, product, deferred)


class _Products(torch.autograd.Function):
    """Implements `grouped_linear`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        ends: Tensor,
        matrices: Callable[[Tensor], Tensor],
        product: GroupedProduct,
        deferred: DeferredGradients | None,
    ) -> Tensor:
        ctx.matrices, ctx.product, ctx.deferred = matrices, product, deferred
        # Gradients that are left for later are added to this very parameter, which a saved tensor is not.
        ctx.parameter = None if deferred is None else weight
        ctx.save_for_backward(x, ends, weight if deferred is None else None)
        return product.output(x, matrices(weight), ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, ends, weight = ctx.saved_tensors
        weight, grad = ctx.parameter if weight is None else weight, grad.contiguous()
        x_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = ctx.product.input_gradient(grad, ctx.matrices(weight.detach()), ends)

        def gradient() -> Tensor:
            out = torch.empty_like(weight)
            ctx.matrices(out).copy_(ctx.product.weight_gradient(x, grad, ends))
            return out

        if ctx.needs_input_grad[1] and ctx.deferred is not None and ctx.deferred.is_collecting:
            ctx.deferred.add(weight, gradient)
        elif ctx.needs_input_grad[1]:
            weight_grad = gradient()
        return x_grad, weight_grad, None, None, None, None


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
