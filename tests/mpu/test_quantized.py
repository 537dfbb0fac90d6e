"""Linears in 4-bit NormalFloat beside bitsandbytes' own."""

from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from torch import Tensor

from megatron.mpu import Linear, LinearSpec, ParallelGroups
from megatron.mpu.lora import LoraSpec, adapters_of
from megatron.mpu.quantized import QuantizedProduct

ROWS, COLUMNS = 96, 128


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
    theirs = bnb.nn.Linear4bit(
        COLUMNS, ROWS, bias=False, compute_dtype=dtype, compress_statistics=double_quant, quant_type="nf4"
    )
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
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
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
