"""A linear layer multiplies with the product that it is given, forwards and backwards."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.mpu import Linear, LinearSpec, ParallelGroups, Product, linear

SHAPES = {"x": (6, 2, 12), "weight": (16, 12), "bias": (16,), "grad": (6, 2, 16)}


class Counted:
    """Products in fp64, returned in the dtype of what is given; `calls` says which were asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        self.calls.append("output")
        return (x.double() @ weight.double().t()).to(x.dtype)

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        self.calls.append("input_gradient")
        return (grad.double() @ weight.double()).to(grad.dtype)

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        self.calls.append("weight_gradient")
        return torch.einsum("sbo,sbi->oi", grad.double(), x.double()).to(grad.dtype)


class Doubled:
    """2 x W^T and its gradients; nothing to count, so that a compiler may trace it."""

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        return 2 * F.linear(x, weight)

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        return 2 * (grad @ weight)

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        return 2 * torch.einsum("sbo,sbi->oi", grad, x)


def tensors(*trained: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {name: tensor.requires_grad_(name in trained) for name, tensor in made.items()}


@pytest.mark.parametrize("trained", ["x weight bias", "x", "weight", "bias", "x bias", "weight bias"])
def test_gradients_of_another_product(trained: str) -> None:
    """Equal to autograd's, and only the products that are needed."""
    ours, autograd, product = tensors(*trained.split()), tensors(*trained.split()), Counted()
    linear(ours["x"], ours["weight"], ours["bias"], product).backward(ours["grad"])
    F.linear(autograd["x"], autograd["weight"], autograd["bias"]).backward(autograd["grad"])
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor.grad, autograd[name].grad)
    needed = {"x": "input_gradient", "weight": "weight_gradient"}
    assert product.calls == ["output", *(call for name, call in needed.items() if name in trained.split())]


@pytest.mark.parametrize("bias", [False, True])
def test_the_plain_product_is_torchs_own(bias: bool) -> None:
    layer = Linear(LinearSpec(12, 16, "none", bias), ParallelGroups.single())
    values = tensors("x")
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(values[name])
    out = layer(values["x"])
    assert torch.equal(out, F.linear(values["x"], layer.weight, layer.bias))
    assert out.grad_fn is not None and out.grad_fn.name() in ("AddmmBackward0", "ViewBackward0", "UnsafeViewBackward0")


@pytest.mark.parametrize("parallel", ["column", "row", "none"])
def test_a_compiled_layer_takes_another_product(parallel: str) -> None:
    """In one graph, which serves for layers with products of their own."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    seen: list[dict[str, Tensor | None]] = []
    for compiled in (False, True, True):
        values = tensors("x")
        layer = Linear(LinearSpec(12, 16, parallel, bias=True), ParallelGroups.single())  # type: ignore[arg-type]
        layer.product = doubled = Doubled()
        assert isinstance(doubled, Doubled) and "product" not in dict(layer.state_dict())
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                parameter.copy_(values[name])
        if compiled:
            layer.compile(backend=counter, fullgraph=True)
        layer(values["x"]).backward(values["grad"])
        seen.append({"x": values["x"].grad, **{name: p.grad for name, p in layer.named_parameters()}})
    assert counter.frame_count == 1
    product: Product = Doubled()
    whole = tensors("x", "weight", "bias")
    (product.output(whole["x"], whole["weight"]) + whole["bias"]).backward(whole["grad"])
    for found in seen:
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, whole[name].grad)
