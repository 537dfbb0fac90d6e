"""FP8 products by Transformer-Engine: its quantizers and its GEMM, called as its `ops.BasicLinear` does.

`te.Linear` is not used: its parameter names and extra state would be in every checkpoint.
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
"""Numbers of tokens are padded to a multiple of this: MXFP8 has blocks of 32, the others need 16."""


class TransformerEngine:
    """Transformer-Engine's functions that cast to FP8 and multiply.

    Raises PackageProblem if it cannot be imported.
    """

    def __init__(self) -> None:
        names = ("DType", "Float8Quantizer", "Float8CurrentScalingQuantizer", "MXFP8Quantizer")
        self.package: ModuleType = import_compiled("transformer_engine.pytorch", *names)
        self.gemm: Any = import_module("transformer_engine.pytorch.cpp_extensions").general_gemm
        types = self.package.DType
        self.types: dict[torch.dtype, Any] = {E4M3: types.kFloat8E4M3, E5M2: types.kFloat8E5M2}

    def multiply(self, a: Any, b: Any, layout: str, dtype: torch.dtype) -> Tensor:
        """Returns the product of two FP8 matrices that `layout` names.

        TN: b a^T, the output, if a is the weight and b the input. NN: b a, the input's gradient. NT: b^T a,
        the weight's gradient.
        """
        forward = layout == "TN"
        out: Tensor
        out, *_ = self.gemm(a, b, out_dtype=dtype, layout=layout, grad=not forward, use_split_accumulator=not forward)
        return out


class _Products:
    """The matrix products of `Product`. Subclasses define `quantized`, which casts an operand to FP8."""

    engine: TransformerEngine
    fp8_weight_gradient: bool

    def quantized(self, matrix: Tensor, operand: Operand, rows: bool, noted: bool = False) -> Any:
        """Casts `[tokens or out, features]` to FP8. rows: scaled for a product along rows, else along
        columns. noted: record its largest magnitude for later scales."""
        raise NotImplementedError

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        """x W^T without bias: `[..., in]`, `[out, in]` to `[..., out]`."""
        a, b = self.quantized(weight, "weight", True), self.quantized(_padded(x), "input", True)
        return _unpadded(self.engine.multiply(a, b, "TN", x.dtype), x)

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        """dy W, the gradient of x: `[..., out]`, `[out, in]` to `[..., in]`."""
        a = self.quantized(weight, "weight", False, noted=True)
        b = self.quantized(_padded(grad), "gradient", True, noted=True)
        return _unpadded(self.engine.multiply(a, b, "NN", grad.dtype), grad)

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """dy^T x, the gradient of W: `[..., out]`, `[..., in]` to `[out, in]`."""
        if not self.fp8_weight_gradient:
            return PlainProduct().weight_gradient(grad, x)
        a = self.quantized(_padded(x), "input", False, noted=True)
        b = self.quantized(_padded(grad), "gradient", False, noted=True)
        return self.engine.multiply(a, b, "NT", grad.dtype)


class EngineProduct(_Products):
    """`Product` by the recipes `tensorwise` (Float8CurrentScaling) and `mxfp8` (MXFP8BlockScaling), which
    keep no state between steps."""

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
    """`Product` by the recipe `te` (DelayedScaling) with Transformer-Engine's kernels.

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
        # An infinity would saturate unnoticed.
        cast._scale_inv = torch.where(amax.isfinite(), cast._scale_inv, torch.nan)
        return cast

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """dy^T x, the gradient of W: `[..., out]`, `[..., in]` to `[out, in]`."""
        if not self.fp8_weight_gradient:
            self._note(x, "input")
            self._note(grad, "gradient")
        return super().weight_gradient(grad, x)


def engine_problem(device: torch.device, recipe: str) -> str | None:
    """Tries each FP8 product of Transformer-Engine once; returns None if they work.

    Otherwise returns what is missing, in words that continue a sentence after "needs".
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
        return f"Transformer-Engine to work on {device.type} ({reason})"
    return None


def _padded(x: Tensor) -> Tensor:
    """`[..., features]` as `[tokens, features]`, padded with zero tokens to a multiple of `_TOKENS`."""
    tokens = x.flatten(0, -2).contiguous()
    missing = -tokens.shape[0] % _TOKENS
    return F.pad(tokens, (0, 0, 0, missing)) if missing else tokens


def _unpadded(out: Tensor, x: Tensor) -> Tensor:
    """Removes the padding from `[tokens, features]` and restores the leading dimensions of `x`."""
    tokens = x.shape[:-1].numel()
    return out[:tokens].unflatten(0, x.shape[:-1])
