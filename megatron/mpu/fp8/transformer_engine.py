"""FP8 products by Transformer-Engine: calls its quantizers and its GEMM as its `ops.BasicLinear` does.

`te.Linear` is not used, because its parameter names and extra state would appear in every checkpoint.
"""

from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.mpu.fp8.casting import E4M3, E5M2, Formats, Operand
from megatron.mpu.fp8.delayed import DelayedProduct
from megatron.mpu.products import PlainProduct, Product
from megatron.neox_arguments.optional_packages import PackageProblem, import_compiled

_TOKENS = 32
"""The number of tokens is padded to a multiple of this: MXFP8 has blocks of 32, the other recipes need 16."""


class TransformerEngine:
    """The functions of Transformer-Engine that cast to FP8 and multiply.

    The constructor raises PackageProblem if Transformer-Engine cannot be imported.
    """

    def __init__(self) -> None:
        names = ("DType", "Float8Quantizer", "Float8CurrentScalingQuantizer", "MXFP8Quantizer")
        self.package: ModuleType = import_compiled("transformer_engine.pytorch", *names)
        self.gemm: Any = import_module("transformer_engine.pytorch.cpp_extensions").general_gemm
        types = self.package.DType
        self.types: dict[torch.dtype, Any] = {E4M3: types.kFloat8E4M3, E5M2: types.kFloat8E5M2}

    def multiply(self, a: Any, b: Any, layout: str, dtype: torch.dtype) -> Tensor:
        """Returns the product of two FP8 matrices in `dtype`. `layout` says which product:

        TN: b a^T, the output, if a is the weight and b the input.
        NN: b a, the gradient of the input, if a is the weight and b the output's gradient.
        NT: b^T a, the gradient of the weight, if a is the input and b the output's gradient.
        """
        forward = layout == "TN"
        out: Tensor
        out, *_ = self.gemm(a, b, out_dtype=dtype, layout=layout, grad=not forward, use_split_accumulator=not forward)
        return out


class _Products:
    """The matrix products of a linear layer, by Transformer-Engine. Subclasses define `quantized`, the cast
    to FP8."""

    engine: TransformerEngine
    fp8_weight_gradient: bool

    def quantized(self, matrix: Tensor, operand: Operand, rows: bool, noted: bool = False) -> Any:
        """Casts `matrix` `[tokens or out, features]` to FP8.

        rows: whether it is scaled along its rows for a product that sums over them; else along its columns.
        noted: whether to record its largest magnitude for later scales.
        """
        raise NotImplementedError

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        """Returns x W^T, without bias. x: `[..., in]`; weight: W `[out, in]`; result: `[..., out]`."""
        a, b = self.quantized(weight, "weight", True), self.quantized(_padded(x), "input", True)
        return _unpadded(self.engine.multiply(a, b, "TN", x.dtype), x)

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Returns the gradient of x, dy W. grad: dy `[..., out]`; weight: W `[out, in]`; result: `[...,
        in]`."""
        a = self.quantized(weight, "weight", False, noted=True)
        b = self.quantized(_padded(grad), "gradient", True, noted=True)
        return _unpadded(self.engine.multiply(a, b, "NN", grad.dtype), grad)

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """Returns the gradient of W, dy^T x. grad: dy `[..., out]`; x: `[..., in]`; result: `[out, in]`."""
        if not self.fp8_weight_gradient:
            return PlainProduct().weight_gradient(grad, x)
        a = self.quantized(_padded(x), "input", False, noted=True)
        b = self.quantized(_padded(grad), "gradient", False, noted=True)
        return self.engine.multiply(a, b, "NT", grad.dtype)


class EngineProduct(_Products):
    """Transformer-Engine's products for `tensorwise` (Float8CurrentScaling) and `mxfp8` (MXFP8BlockScaling).

    These recipes keep no state between steps. block_scales: True selects mxfp8.
    """

    def __init__(
        self, engine: TransformerEngine, formats: Formats, fp8_weight_gradient: bool, block_scales: bool
    ) -> None:
        self.engine, self.formats, self.fp8_weight_gradient = engine, formats, fp8_weight_gradient
        self.block_scales = block_scales

    def quantized(self, matrix: Tensor, operand: Operand, rows: bool, noted: bool = False) -> Any:
        package, dtype = self.engine.package, self.engine.types[self.formats.dtype_of(operand)]
        if self.block_scales:
            return package.MXFP8Quantizer(dtype, rowwise=rows, columnwise=not rows)(matrix)
        return package.Float8CurrentScalingQuantizer(dtype, matrix.device, rowwise=rows, columnwise=not rows)(matrix)


class EngineDelayedProduct(_Products, DelayedProduct):
    """Transformer-Engine's products for the recipe `te` (DelayedScaling).

    Its state is that of `DelayedProduct`, so a run may resume with either class. A scale that is not known
    yet is 1, as in Transformer-Engine.
    """

    def __init__(
        self,
        formats: Formats,
        fp8_weight_gradient: bool,
        margin: int,
        device: torch.device,
        engine: TransformerEngine | None = None,
    ) -> None:
        DelayedProduct.__init__(self, formats, fp8_weight_gradient, margin, device)
        self.engine = engine or TransformerEngine()

    def quantized(self, matrix: Tensor, operand: Operand, rows: bool, noted: bool = False) -> Any:
        known_scale, amax = self.scale[operand], matrix.new_zeros(1, dtype=torch.float32)
        scale = torch.where(known_scale > 0, known_scale, 1.0).view(1)
        dtype = self.engine.types[self.formats.dtype_of(operand)]
        cast = self.engine.package.Float8Quantizer(scale, amax, dtype, rowwise=rows, columnwise=not rows)(matrix)
        if noted:
            self.amax[operand].copy_(torch.maximum(self.amax[operand], amax[0]))
        # Without this an infinity would saturate to a finite value unnoticed.
        cast._scale_inv = torch.where(amax.isfinite(), cast._scale_inv, torch.nan)
        return cast

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """Returns the gradient of W, dy^T x. grad: dy `[..., out]`; x: `[..., in]`; result: `[out, in]`."""
        if not self.fp8_weight_gradient:
            self._note(x, "input")
            self._note(grad, "gradient")
        return super().weight_gradient(grad, x)


def engine_problem(device: torch.device, recipe: str) -> str | None:
    """Runs each FP8 product of Transformer-Engine once on `device`; returns None if all work.

    Otherwise returns what is missing, as the text that follows "needs" in a message, such as
    "Transformer-Engine to work on cuda (...)".

    recipe: value of `precision_fp8`: te, tensorwise or mxfp8.
    """
    formats, dtype = Formats(), torch.bfloat16
    try:
        engine = TransformerEngine()
        product: Product = EngineProduct(engine, formats, True, recipe == "mxfp8")
        if recipe == "te":
            product = EngineDelayedProduct(formats, True, 0, device, engine)
        x, weight = (torch.ones(32, 64, device=device, dtype=dtype) for _ in range(2))
        out = product.output(x, weight)
        product.input_gradient(out, weight)
        product.weight_gradient(out, x)
    except PackageProblem as problem:
        return str(problem)
    except Exception as problem:  # C++ extensions raise exceptions of any kind
        reason = f"{type(problem).__name__}: {problem}".splitlines()[0]
        return f"Transformer-Engine to work on {device.type}, but a trial product failed ({reason})"
    return None


def _padded(x: Tensor) -> Tensor:
    """Returns x `[..., features]` as `[tokens, features]`, padded with rows of zeros to a multiple of
    `_TOKENS`."""
    tokens = x.flatten(0, -2).contiguous()
    missing = -tokens.shape[0] % _TOKENS
    return F.pad(tokens, (0, 0, 0, missing)) if missing else tokens


def _unpadded(out: Tensor, x: Tensor) -> Tensor:
    """Removes the padding rows from `out` `[tokens, features]`, and gives it the leading dimensions of
    `x`."""
    tokens = x.shape[:-1].numel()
    return out[:tokens].unflatten(0, x.shape[:-1])
