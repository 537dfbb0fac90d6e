"""A linear multiplies with the product it is given; that of 4-bit NormalFloat is bitsandbytes'."""

from typing import Any

import bitsandbytes as bnb
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.mpu import Linear, LinearSpec, LoraSpec, ParallelGroups, Product, adapters_of, linear, seed_tensor
from megatron.mpu.quantized import QuantizedProduct

SHAPES = {"x": (6, 2, 12), "weight": (16, 12), "bias": (16,), "grad": (6, 2, 16)}
ROWS, COLUMNS = 96, 128


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
        return torch.einsum("...o,...i->oi", grad.double(), x.double()).to(grad.dtype)


class Scaled:
    """A multiple of x W^T and its gradients, in other words than torch's, that a compiler may trace."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.factor * torch.einsum("...i,oi->...o", x, weight).contiguous()

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        return self.factor * torch.einsum("...o,oi->...i", grad, weight).contiguous()

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        return self.factor * torch.einsum("sbo,sbi->oi", grad, x).contiguous()


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
        layer.product = Scaled(2.0)
        assert "product" not in dict(layer.state_dict())
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                parameter.copy_(values[name])
        if compiled:
            layer.compile(backend=counter, fullgraph=True)
        layer(values["x"]).backward(values["grad"])
        seen.append({"x": values["x"].grad, **{name: p.grad for name, p in layer.named_parameters()}})
    assert counter.frame_count == 1
    product: Product = Scaled(2.0)
    whole = tensors("x", "weight", "bias")
    (product.output(whole["x"], whole["weight"]) + whole["bias"]).backward(whole["grad"])
    for found in seen:
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, whole[name].grad)


def layer(dtype: torch.dtype, double_quant: bool, bias: bool, weight: Tensor, **more: Any) -> Linear:
    made = Linear(LinearSpec(COLUMNS, ROWS, "column", bias, **more), ParallelGroups.single()).to(dtype)
    made.quantize(QuantizedProduct(made.weight.shape, dtype, double_quant))
    made.set_quantized(weight)
    return made


@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_and_input_gradient(dtype: torch.dtype, double_quant: bool) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(ROWS, COLUMNS).to(dtype), torch.randn(3, 2, COLUMNS).to(dtype)
    how = {"compute_dtype": dtype, "compress_statistics": double_quant, "quant_type": "nf4"}
    theirs = bnb.nn.Linear4bit(COLUMNS, ROWS, bias=False, **how)
    theirs.load_state_dict({"weight": weight})
    theirs.to("cpu")  # quantises
    ours = layer(dtype, double_quant, False, weight)
    assert ours.weight.dtype == torch.uint8 and torch.equal(ours.weight, theirs.weight.data)
    held = ours.weight.numel() + sum(scale.nbytes for scale in ours.product.scales())  # type: ignore[union-attr]
    # Half a byte each, and of 64 a scale: 4 bytes, or one and a share.
    least = ROWS * COLUMNS / 2 + ROWS * COLUMNS / 64 * (1 if double_quant else 4)
    assert least <= held < 1.01 * least
    results = []
    for each in (ours, theirs):
        given = x.clone().requires_grad_()
        out = each(given)
        out.backward(torch.ones_like(out))
        assert given.grad is not None
        results.append((out.detach(), given.grad))
    torch.testing.assert_close(*results)
    assert not torch.equal(results[0][0], torch.nn.functional.linear(x, weight))


def test_nothing_unpacked_is_kept_for_backward() -> None:
    made = layer(torch.float32, False, True, torch.randn(ROWS, COLUMNS))
    made.requires_grad_(False)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        made(torch.randn(3, 2, COLUMNS, requires_grad=True))
    assert [tensor.dtype for tensor in kept] == [torch.uint8]


def test_dora_takes_the_norms_of_unpacked_rows() -> None:
    lora = LoraSpec(4, 2.0, 0.0, True, "kaiming_uniform", "kaiming_uniform", frozenset(["up_proj"]))
    torch.manual_seed(0)
    spec = {"adapters": adapters_of(lora, ROWS, "up_proj")}
    packed = layer(torch.float32, False, True, torch.randn(ROWS, COLUMNS), **spec)
    plain = Linear(LinearSpec(COLUMNS, ROWS, "column", True, **spec), ParallelGroups.single())
    with torch.no_grad():
        for param in packed.parameters():
            param.normal_()
        plain.weight.copy_(packed.dense_weight())
        for name, param in packed.named_parameters():
            plain.get_parameter(name).copy_(param)
    x = torch.randn(3, 2, COLUMNS)
    outs = [each(x) for each in (packed, plain)]
    torch.testing.assert_close(*outs)
    for out in outs:
        out.square().sum().backward()
    for name, param in packed.named_parameters():
        torch.testing.assert_close(param.grad, plain.get_parameter(name).grad)


def test_projections_drop_inputs_of_their_own() -> None:
    """Adapters of two projections, with one seed: the low-rank part alone shows which inputs each keeps."""
    lora = LoraSpec(4, 2.0, 0.5, False, "kaiming_uniform", "kaiming_uniform", frozenset(["up_proj", "gate_proj"]))
    kept = []
    for name in ("up_proj", "gate_proj"):
        spec = LinearSpec(COLUMNS, COLUMNS, "column", False, adapters=adapters_of(lora, COLUMNS, name))
        made = Linear(spec, ParallelGroups.single()).train()
        with torch.no_grad():
            made.weight.zero_()
            for param in made.lora.parameters():  # type: ignore[union-attr]
                param.copy_(torch.eye(*param.shape))
        kept.append(made(torch.ones(1, 1, COLUMNS), seed_tensor(3))[0, 0, :4] != 0)
    assert not kept[0].equal(kept[1])
