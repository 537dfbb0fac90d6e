"""The matrix products of a linear layer, as an object that is passed to the layer.

The object computes with torch in the dtype of the weights (`PlainProduct`), or in another way, such as FP8.
"""

from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.mpu.deferred import DeferredGradients


class Product(Protocol):
    """The interface for the three matrix products of a linear layer y = x W^T: its output and both gradients.

    Each method returns a new tensor, which the caller may overwrite. An object keeps state, such as scales,
    in plain attributes, because `torch.compile` traces its methods in full graphs.
    """

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        """Returns x W^T, without bias. x: `[..., in]`; weight: W `[out, in]`; result: `[..., out]`."""
        ...

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Returns the gradient of x, dy W. grad: dy `[..., out]`; weight: W `[out, in]`; result: `[...,
        in]`."""
        ...

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """Returns the gradient of W, dy^T x, summed over all tokens. grad: dy `[..., out]`; x: `[..., in]`;
        result: `[out, in]`.
        """
        ...


class PlainProduct:
    """The matrix products of a linear layer by torch, in the dtype of their operands."""

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        return grad @ weight

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        return grad.flatten(0, -2).t() @ x.flatten(0, -2)


class DeferredProduct:
    """The matrix products of another object, whose weight gradients may be computed later.

    product: computes them. layer: the layer with the weight, as its attribute `weight`. deferred: takes the
    weight gradients while it collects.
    """

    def __init__(self, product: Product, layer: nn.Module, deferred: DeferredGradients) -> None:
        self.product, self.layer, self.deferred = product, layer, deferred

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.product.output(x, weight)

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        return self.product.input_gradient(grad, weight)

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        return self.product.weight_gradient(grad, x)


def weight_gradient(product: Product, grad: Tensor, x: Tensor) -> Tensor | None:
    """Returns `product.weight_gradient(grad, x)`; None if it is left for later (`DeferredProduct`)."""
    if isinstance(product, DeferredProduct) and product.deferred.is_collecting:
        product.deferred.add(product.layer.weight, partial(product.weight_gradient, grad, x))  # type: ignore[arg-type]
        return None
    return product.weight_gradient(grad, x)


def biased_output(x: Tensor, weight: Tensor, bias: Tensor | None, product: Product) -> Tensor:
    """Returns x W^T + b as a new tensor, computed by `product` without autograd."""
    if isinstance(product, DeferredProduct):
        product = product.product
    if isinstance(product, PlainProduct):
        return F.linear(x, weight, bias)  # one kernel multiplies and adds the bias
    out = product.output(x, weight)
    # Not in place: recomputation may keep the product, and torch 2.11 compiles the in-place sum with wrong
    # gradients.
    return out if bias is None else out + bias


def bias_gradient(grad: Tensor) -> Tensor:
    """Returns the gradient of the bias, `[out]`: `grad` `[..., out]` summed over all other dimensions."""
    return grad.flatten(0, -2).sum(0)


class _Linear(torch.autograd.Function):
    """Computes x W^T + b with a product that autograd cannot differentiate; backward calls the product's
    gradients."""

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
        weight_grad = weight_gradient(ctx.product, grad, x) if ctx.needs_input_grad[1] else None
        bias_grad = bias_gradient(grad) if ctx.needs_input_grad[2] else None
        return x_grad, weight_grad, bias_grad, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, product: Product) -> Tensor:
    """Returns x W^T + b, `[..., in]` to `[..., out]`. Output and gradients are computed by `product`.

    For a PlainProduct it calls `torch.nn.functional.linear`.
    """
    if isinstance(product, PlainProduct):
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias, product)
