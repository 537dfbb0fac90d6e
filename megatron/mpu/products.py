"""The matrix products of a linear layer as an object passed to the layer.

They are torch's, in the dtype of the weights, or others of the same shapes (FP8, or a library's).
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Product(Protocol):
    """The three matrix products of a linear layer y = x W^T: its output and both gradients.

    Each returns a new tensor, which the caller may overwrite. State of an object, such as scales, is in plain
    attributes; `torch.compile` traces its methods in full graphs.
    """

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        """x W^T, without bias: `[..., in]`, `[out, in]` to `[..., out]`."""
        ...

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        """dy W, the gradient of x: `[..., out]`, `[out, in]` to `[..., in]`."""
        ...

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """dy^T x, the gradient of W, summed over all but the last dimension: `[..., out]`, `[..., in]` to
        `[out, in]`."""
        ...


class PlainProduct:
    """torch's matrix products, in the dtype of the operands."""

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        return grad @ weight

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        return grad.flatten(0, -2).t() @ x.flatten(0, -2)


def biased_output(x: Tensor, weight: Tensor, bias: Tensor | None, product: Product) -> Tensor:
    """x W^T + b, a new tensor, by `product`, outside autograd."""
    if isinstance(product, PlainProduct):
        return F.linear(x, weight, bias)  # adds the bias as it multiplies
    out = product.output(x, weight)
    # Not in place: recomputation may keep the product, and where torch 2.11 compiles it gradients are wrong.
    return out if bias is None else out + bias


def bias_gradient(grad: Tensor) -> Tensor:
    """Returns the bias's gradient: `grad` `[..., out]` summed to `[out]`."""
    return grad.flatten(0, -2).sum(0)


class _Linear(torch.autograd.Function):
    """x W^T + b by a product without autograd formulas."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: Product) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.product = product
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        return biased_output(x, weight, bias, product)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        x_grad = ctx.product.input_gradient(grad, weight) if ctx.needs_input_grad[0] else None
        weight_grad = ctx.product.weight_gradient(grad, x) if ctx.needs_input_grad[1] else None
        bias_grad = bias_gradient(grad) if ctx.needs_input_grad[2] else None
        return x_grad, weight_grad, bias_grad, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, product: Product) -> Tensor:
    """Returns y = x W^T + b, `[..., in]` to `[..., out]`, with gradients computed by `product`.

    For a PlainProduct it calls `torch.nn.functional.linear`.
    """
    if isinstance(product, PlainProduct):
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias, product)
