"""A linear multiplies with the product it is given; that of 4-bit NormalFloat is bitsandbytes'."""

from typing import Any

import bitsandbytes as bnb
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.mpu import (
    Linear,
    LinearSpec,
    LoraSpec,
    LowRank,
    ParallelGroups,
    Product,
    adapters_of,
    linear,
    seed_tensor,
)
from megatron.mpu.quantized import QuantizedProduct

SHAPES = {"x": (6, 2, 12), "weight": (16, 12), "bias": (16,), "grad": (6, 2, 16)}
ROWS, COLUMNS = 96, 128


class CountingProduct:
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
    values = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {name: tensor.requires_grad_(name in trained) for name, tensor in values.items()}


@pytest.mark.parametrize("trained", ["x weight bias", "x", "weight", "bias", "x bias", "weight bias"])
def test_gradients_of_another_product(trained: str) -> None:
    """Equal to autograd's, and only the products that are needed."""
    values, autograd, product = tensors(*trained.split()), tensors(*trained.split()), CountingProduct()
    linear(values["x"], values["weight"], values["bias"], product).backward(values["grad"])
    F.linear(autograd["x"], autograd["weight"], autograd["bias"]).backward(autograd["grad"])
    for name, tensor in values.items():
        torch.testing.assert_close(tensor.grad, autograd[name].grad)
    gradient_calls = {"x": "input_gradient", "weight": "weight_gradient"}
    assert product.calls == ["output", *(call for name, call in gradient_calls.items() if name in trained.split())]


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
    gradients: list[dict[str, Tensor | None]] = []
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
        gradients.append({"x": values["x"].grad, **{name: p.grad for name, p in layer.named_parameters()}})
    assert counter.frame_count == 1
    product: Product = Scaled(2.0)
    reference = tensors("x", "weight", "bias")
    (product.output(reference["x"], reference["weight"]) + reference["bias"]).backward(reference["grad"])
    for actual in gradients:
        for name, gradient in actual.items():
            torch.testing.assert_close(gradient, reference[name].grad)


def layer(dtype: torch.dtype, double_quant: bool, bias: bool, weight: Tensor, **overrides: Any) -> Linear:
    linear_layer = Linear(LinearSpec(COLUMNS, ROWS, "column", bias, **overrides), ParallelGroups.single()).to(dtype)
    linear_layer.quantize(QuantizedProduct(linear_layer.weight.shape, dtype, double_quant))
    linear_layer.set_quantized(weight)
    return linear_layer


@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_and_input_gradient(dtype: torch.dtype, double_quant: bool) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(ROWS, COLUMNS).to(dtype), torch.randn(3, 2, COLUMNS).to(dtype)
    options = {"compute_dtype": dtype, "compress_statistics": double_quant, "quant_type": "nf4"}
    bnb_layer = bnb.nn.Linear4bit(COLUMNS, ROWS, bias=False, **options)
    bnb_layer.load_state_dict({"weight": weight})
    bnb_layer.to("cpu")  # quantises
    quantized = layer(dtype, double_quant, False, weight)
    assert quantized.weight.dtype == torch.uint8 and torch.equal(quantized.weight, bnb_layer.weight.data)
    held = quantized.weight.numel() + sum(scale.nbytes for scale in quantized.product.scales())  # type: ignore[union-attr]
    # Half a byte each, and of 64 a scale: 4 bytes, or one and a share.
    min_bytes = ROWS * COLUMNS / 2 + ROWS * COLUMNS / 64 * (1 if double_quant else 4)
    assert min_bytes <= held < 1.01 * min_bytes
    results = []
    for module in (quantized, bnb_layer):
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        out.backward(torch.ones_like(out))
        assert leaf.grad is not None
        results.append((out.detach(), leaf.grad))
    torch.testing.assert_close(*results)
    assert not torch.equal(results[0][0], torch.nn.functional.linear(x, weight))


def test_nothing_unpacked_is_kept_for_backward() -> None:
    quantized = layer(torch.float32, False, True, torch.randn(ROWS, COLUMNS))
    quantized.requires_grad_(False)
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        quantized(torch.randn(3, 2, COLUMNS, requires_grad=True))
    assert [tensor.dtype for tensor in saved] == [torch.uint8]


def test_dora_takes_the_norms_of_unpacked_rows() -> None:
    lora = LoraSpec(0.0, True, "kaiming_uniform", "kaiming_uniform", {"up_proj": LowRank(4, 2.0)})
    torch.manual_seed(0)
    spec = {"adapters": adapters_of(lora, ROWS, "up_proj")}
    packed = layer(torch.float32, False, True, torch.randn(ROWS, COLUMNS), **spec)
    dense = Linear(LinearSpec(COLUMNS, ROWS, "column", True, **spec), ParallelGroups.single())
    with torch.no_grad():
        for param in packed.parameters():
            param.normal_()
        dense.weight.copy_(packed.dense_weight())
        for name, param in packed.named_parameters():
            dense.get_parameter(name).copy_(param)
    x = torch.randn(3, 2, COLUMNS)
    outs = [module(x) for module in (packed, dense)]
    torch.testing.assert_close(*outs)
    for out in outs:
        out.square().sum().backward()
    for name, param in packed.named_parameters():
        torch.testing.assert_close(param.grad, dense.get_parameter(name).grad)


def test_projections_drop_inputs_of_their_own() -> None:
    """Adapters of two projections, with one seed: the low-rank part alone shows which inputs each keeps."""
    lora = LoraSpec(
        0.5, False, "kaiming_uniform", "kaiming_uniform", dict.fromkeys(["up_proj", "gate_proj"], LowRank(4, 2.0))
    )
    masks = []
    for name in ("up_proj", "gate_proj"):
        spec = LinearSpec(COLUMNS, COLUMNS, "column", False, adapters=adapters_of(lora, COLUMNS, name))
        projection = Linear(spec, ParallelGroups.single()).train()
        with torch.no_grad():
            projection.weight.zero_()
            for param in projection.lora.parameters():  # type: ignore[union-attr]
                param.copy_(torch.eye(*param.shape))
        masks.append(projection(torch.ones(1, 1, COLUMNS), seed_tensor(3))[0, 0, :4] != 0)
    assert not masks[0].equal(masks[1])
