"""FP8 products by Transformer-Engine, of which there is a stand-in, beside our own recipes."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.mpu import ParallelGroups, Product, linear
from megatron.mpu.fp8 import DelayedProduct, DelayedScaling, Formats, MXProduct, TensorwiseProduct
from megatron.mpu.fp8.casting import E4M3, OPERANDS
from megatron.mpu.fp8.transformer_engine import EngineDelayedProduct, EngineProduct, TransformerEngine, engine_problem
from tests.stand_ins import installed, modules, transformer_engine

CPU, HYBRID, E4M3_ONLY = torch.device("cpu"), Formats(), Formats(E4M3, E4M3)


def calibrated(product: DelayedProduct) -> DelayedProduct:
    """With scales as after some steps."""
    for operand, scale in zip(OPERANDS, (7.0, 300.0, 2.0**20), strict=True):
        product.scale[operand].fill_(scale)
    return product


# Formats, whether gradients of weights are in FP8 too, and whether scales are of blocks.
RECIPES: dict[str, tuple[Callable[..., Product], tuple[Any, ...]]] = {
    "tensorwise": (TensorwiseProduct, (HYBRID, True, False)),
    "tensorwise, e4m3": (TensorwiseProduct, (E4M3_ONLY, True, False)),
    "tensorwise, gradients of weights in bf16": (TensorwiseProduct, (HYBRID, False, False)),
    "mxfp8": (lambda *_: MXProduct(), (E4M3_ONLY, True, True)),
    "te": (DelayedProduct, (HYBRID, True)),
    "te, gradients of weights in bf16": (DelayedProduct, (HYBRID, False)),
}


def tensors(seed: int = 1) -> list[Tensor]:
    """Input and gradient of 20 tokens, which are no multiple of 8, and a weight."""
    make = torch.Generator().manual_seed(seed)
    shapes, sizes = ((5, 4, 64), (32, 64), (5, 4, 32)), (3.0, 0.1, 1e-4)
    return [(torch.randn(s, generator=make) * size).bfloat16() for s, size in zip(shapes, sizes, strict=True)]


def step(product: Product, values: list[Tensor]) -> list[Tensor]:
    x, weight = (value.clone().requires_grad_() for value in values[:2])
    out = linear(x, weight, None, product)
    out.backward(values[2])
    return [out.detach(), x.grad, weight.grad]


@pytest.mark.parametrize("name", RECIPES)
def test_products_are_those_of_our_recipes(name: str) -> None:
    make_own, options = RECIPES[name]
    with installed("transformer_engine"):
        if make_own is DelayedProduct:
            product, native = (
                calibrated(EngineDelayedProduct(*options, 0, CPU)),
                calibrated(DelayedProduct(*options, 0, CPU)),
            )
        else:
            product, native = EngineProduct(TransformerEngine(), *options), make_own(*options[:2])
        for actual, expected in zip(step(product, tensors()), step(native, tensors()), strict=True):
            assert actual.dtype == torch.bfloat16 and actual.shape == expected.shape
            # The same 8 bits, but for rounding of the scale; sums are rounded once.
            assert (actual - expected).float().norm() <= 2**-7 * expected.float().norm()
    if isinstance(product, DelayedProduct) and isinstance(native, DelayedProduct):
        assert {o: float(product.amax[o]) for o in OPERANDS} == {o: float(native.amax[o]) for o in OPERANDS}


def test_scales_begin_at_one_and_go_on_as_ours() -> None:
    """State goes over between both in either direction; passes without gradients note nothing."""
    groups = ParallelGroups.single()
    with installed("transformer_engine"):
        engine_scaling = DelayedScaling(groups, HYBRID, True, 2, "max", 0, EngineDelayedProduct)
        native_scaling = DelayedScaling(groups, HYBRID, True, 2, "max", 0)
        product, native_product = engine_scaling.add("a"), native_scaling.add("a")
        x, weight, _ = tensors()
        first_output = product.output(x, weight)
        expected = x.to(E4M3).double() @ weight.to(E4M3).double().t()
        torch.testing.assert_close(first_output.double(), expected, rtol=2**-7, atol=1e-6)
        assert not any(product.amax[operand] for operand in OPERANDS)
        for seed in (1, 2, 3):
            for scaling in (engine_scaling, native_scaling):
                step(scaling.products["a"], tensors(seed))
                scaling.end_step(torch.tensor(False))
            for key in ("scale", "history"):
                torch.testing.assert_close(engine_scaling.state()["a"][key], native_scaling.state()["a"][key])
        fresh = DelayedScaling(groups, HYBRID, True, 2, "max", 0, EngineDelayedProduct)
        fresh.add("a")
        fresh.load(native_scaling.state())
        for actual, reference in zip(
            step(fresh.products["a"], tensors(4)), step(native_product, tensors(4)), strict=True
        ):
            assert (actual - reference).float().norm() <= 2**-7 * reference.float().norm()


def test_an_infinity_is_seen() -> None:
    with installed("transformer_engine"):
        product = calibrated(EngineDelayedProduct(HYBRID, True, 0, CPU))
        for spoiled in range(3):
            values = tensors()
            values[spoiled].view(-1)[7] = math.inf
            out = step(product, values)
            reads = [i for i, pair in enumerate([(0, 1), (2, 1), (2, 0)]) if spoiled in pair]
            assert all(not out[i].isfinite().all() for i in reads), spoiled


def test_what_does_not_work_is_reported() -> None:
    assert "Transformer-Engine, which is not installed" in str(engine_problem(CPU, "te"))
    with installed("transformer_engine"):
        assert all(engine_problem(CPU, recipe) is None for recipe in ("te", "tensorwise", "mxfp8"))

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("cuBLAS Error: the requested functionality is not supported")

    kernels = {"transformer_engine.pytorch.cpp_extensions": {"general_gemm": broken}}
    with modules(transformer_engine.modules() | kernels):
        assert "RuntimeError: cuBLAS Error" in str(engine_problem(CPU, "te"))
