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
    """The parts of Transformer-Engine that multiply.

    Raises PackageProblem where it cannot be imported.
    """

    def __init__(self) -> None:
        names = ("DType", "Float8Quantizer", "Float8CurrentScalingQuantizer", "MXFP8Quantizer")
        self.package: ModuleType = import_compiled("transformer_engine.pytorch", *names)
        self.gemm: Any = import_module("transformer_engine.pytorch.cpp_extensions").general_gemm
        types = self.package.DType
        self.types: dict[torch.dtype, Any] = {E4M3: types.kFloat8E4M3, E5M2: types.kFloat8E5M2}

    def multiply(self, a: Any, b: Any, layout: str, dtype: torch.dtype) -> Tensor:
        """TN: b a^T, the output of weight a for b; NN: b a, the input's gradient; NT: b^T a, the weight's."""
        forward = layout == "TN"
        out: Tensor
        out, *_ = self.gemm(
            a, b, out_dtype=dtype, layout=layout, grad=not forward, use_split_accumulator=not forward
        )  # fmt: skip
        return out


class _Products:
    """The methods of `Product` by a quantizer. rows: a matrix is multiplied along its rows, else along its
    columns."""

    engine: TransformerEngine
    fp8_weight_gradient: bool

    def quantized(self, matrix: Tensor, operand: Operand, rows: bool, noted: bool = False) -> Any:
        """`[tokens or out, features]` in FP8. noted: its largest magnitude counts for later scales."""
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
    """`Product` by the recipes `tensorwise` (Float8CurrentScaling) and `mxfp8` (MXFP8BlockScaling), without
    state."""

    def __init__(
        self, engine: TransformerEngine, formats: Formats, fp8_weight_gradient: bool, block_scales: bool
    ) -> None:
        self.engine, self.formats, self.fp8_weight_gradient = engine, formats, fp8_weight_gradient
        self.block_scales = block_scales

    def quantized(self, matrix: Tensor, operand: Operand, rows: bool, noted: bool = False) -> Any:
        package, dtype = self.engine.package, self.engine.types[self.formats.of(operand)]
        if self.block_scales:
            return package.MXFP8Quantizer(dtype, rowwise=rows, columnwise=not rows)(matrix)
        return package.Float8CurrentScalingQuantizer(dtype, matrix.device, rowwise=rows, columnwise=not rows)(matrix)


class EngineDelayedProduct(_Products, DelayedProduct):
    """`Product` by the recipe `te` (DelayedScaling), with the state of `DelayedProduct`: runs go on with
    either. A scale of which nothing is known is 1, as Transformer-Engine begins."""

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
        known, amax = self.scale[operand], matrix.new_zeros(1, dtype=torch.float32)
        scale = torch.where(known > 0, known, 1.0).view(1)
        dtype = self.engine.types[self.formats.of(operand)]
        cast = self.engine.package.Float8Quantizer(scale, amax, dtype, rowwise=rows, columnwise=not rows)(matrix)
        if noted:
            self.amax[operand].copy_(torch.maximum(self.amax[operand], amax[0]))
        # An infinity would saturate, and nobody would see it.
        cast._scale_inv = torch.where(amax.isfinite(), cast._scale_inv, torch.nan)
        return cast

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """dy^T x, the gradient of W: `[..., out]`, `[..., in]` to `[out, in]`."""
        if not self.fp8_weight_gradient:
            self._note(x, "input")
            self._note(grad, "gradient")
        return super().weight_gradient(grad, x)


def engine_problem(device: torch.device, recipe: str) -> str | None:
    """What is missing for FP8 products by Transformer-Engine, by one tiny call of each of them, in words that
    go on after "needs"; None where they work."""
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
    except Exception as problem:  # those of C++ extensions are of any kind
        reason = f"{type(problem).__name__}: {problem}".splitlines()[0]
        return f"Transformer-Engine to work on {device.type} ({reason})"
    return None


def _padded(x: Tensor) -> Tensor:
    """`[..., features]` as `[tokens, features]`, with tokens of zeros up to a multiple of `_TOKENS`."""
    tokens = x.flatten(0, -2).contiguous()
    missing = -tokens.shape[0] % _TOKENS
    return F.pad(tokens, (0, 0, 0, missing)) if missing else tokens


def _unpadded(out: Tensor, like: Tensor) -> Tensor:
    """The tokens of `like` of `[tokens, features]`."""
    tokens = like.shape[:-1].numel()
    return out[:tokens].unflatten(0, like.shape[:-1])
