"""The matrix products of a linear layer, as an object that the layer is given: torch's, in the dtype of the
weights, or others of the same shapes (in FP8, a library's)."""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Product(Protocol):
    """The three matrix products of a linear layer y = x W^T: its output and both gradients.

    Each returns a new tensor, which the caller may write to. What an object keeps (scales, say) it keeps in
    plain attributes; `torch.compile` traces its methods in whole graphs.
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
    """torch's matrix products, in the dtype of what is given."""

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        return grad @ weight

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        return grad.flatten(0, -2).t() @ x.flatten(0, -2)


def biased_output(x: Tensor, weight: Tensor, bias: Tensor | None, product: Product) -> Tensor:
    """x W^T + b, a new tensor, by `product`; no autograd is asked for."""
    if isinstance(product, PlainProduct):
        return F.linear(x, weight, bias)  # adds the bias as it multiplies
    out = product.output(x, weight)
    # Not in place: recomputation may keep the product, and where torch 2.11 compiles it gradients are wrong.
    return out if bias is None else out + bias


def bias_gradient(grad: Tensor) -> Tensor:
    """`[..., out]` summed to `[out]`."""
    return grad.flatten(0, -2).sum(0)


class _Linear(torch.autograd.Function):
    """x W^T + b by a product that autograd does not know."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: Product) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.product = product
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        return biased_output(x, weight, bias, product)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        of_x = ctx.product.input_gradient(grad, weight) if ctx.needs_input_grad[0] else None
        of_weight = ctx.product.weight_gradient(grad, x) if ctx.needs_input_grad[1] else None
        of_bias = bias_gradient(grad) if ctx.needs_input_grad[2] else None
        return of_x, of_weight, of_bias, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, product: Product) -> Tensor:
    """y = x W^T + b, `[..., in]` to `[..., out]`, with its gradients, by `product`; the plain one is
    `torch.nn.functional.linear`."""
    if isinstance(product, PlainProduct):
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias, product)
