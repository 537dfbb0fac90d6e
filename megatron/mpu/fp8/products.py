"""Matrix products of a linear layer in FP8, for the recipes that keep no state between steps.

Every product is A B^T, summed along rows. Both matrices are cast along their rows and are contiguous, since
Hopper multiplies no other layout. Each operand is cast from full precision when it is needed: no 8-bit tensor
is saved from forward to backward.
"""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.mpu.fp8.casting import (
    E4M3,
    MX_BLOCK,
    Formats,
    Operand,
    Scaled,
    cast_mx,
    cast_rowwise,
    cast_tensorwise,
    swizzled,
)
from megatron.mpu.products import PlainProduct


class ScaledProduct(ABC):
    """The matrix products of a linear layer (`Product`) with FP8 operands; results have the operands'
    original dtype.

    multiple: input and output features must be multiples of it.
    fp8_weight_gradient: False computes the weight gradient in the original dtype.
    """

    multiple = 16

    def __init__(self, formats: Formats, fp8_weight_gradient: bool = True) -> None:
        self.formats = formats
        self.fp8_weight_gradient = fp8_weight_gradient

    @abstractmethod
    def cast(self, matrix: Tensor, operand: Operand, transposed: bool = False) -> Scaled:
        """Casts `matrix` `[rows, columns]` to FP8 in the operand's format, with the scales of this recipe.

        transposed: cast the transposed matrix, so that it is scaled along what were its columns.
        """

    @abstractmethod
    def scaled_mm(self, a: Scaled, b: Scaled, dtype: torch.dtype, fast: bool) -> Tensor:
        """Returns A B^T, computed by FP8 tensor cores. fast: allows Hopper to accumulate in fewer bits."""

    def multiply(self, a: Scaled, b: Scaled, dtype: torch.dtype, fast: bool) -> Tensor:
        """Returns A B^T in `dtype`. fast: allows Hopper to accumulate in fewer bits.

        On a CPU the operands are dequantized and multiplied in fp32, since torch releases differ in their FP8
        products there.
        """
        if a.values.device.type == "cpu":
            return (a.dequantized() @ b.dequantized().t()).to(dtype)
        return self.scaled_mm(a, b, dtype, fast)

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        """Returns x W^T, without bias. x: `[..., in]`; weight: W `[out, in]`; result: `[..., out]`."""
        a, b = self.cast(x.flatten(0, -2), "input"), self.cast(weight, "weight")
        return self.multiply(a, b, x.dtype, fast=True).unflatten(0, x.shape[:-1])

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Returns the gradient of x, dy W. grad: dy `[..., out]`; weight: W `[out, in]`; result: `[...,
        in]`."""
        a, b = self.cast(grad.flatten(0, -2), "gradient"), self.cast(weight, "weight", transposed=True)
        return self.multiply(a, b, grad.dtype, fast=False).unflatten(0, grad.shape[:-1])

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """Returns the gradient of W, dy^T x. grad: dy `[..., out]`; x: `[..., in]`; result: `[out, in]`."""
        if not self.fp8_weight_gradient:
            return PlainProduct().weight_gradient(grad, x)
        grad, x = self._padded(grad.flatten(0, -2)), self._padded(x.flatten(0, -2))
        a, b = self.cast(grad, "gradient", transposed=True), self.cast(x, "input", transposed=True)
        return self.multiply(a, b, grad.dtype, fast=False)

    def _padded(self, tokens: Tensor) -> Tensor:
        """Pads `tokens` with rows of zeros to a multiple of `multiple`, which FP8 products need when they sum
        over tokens."""
        missing = -tokens.shape[0] % self.multiple
        return F.pad(tokens, (0, 0, 0, missing)) if missing else tokens


class TensorwiseProduct(ScaledProduct):
    """Scales each matrix by one factor, from its current largest magnitude. Under tensor parallelism a rank
    scales its own part.

    It is `tensorwise` of torchao and torchtitan, and Float8CurrentScaling of Transformer-Engine.
    """

    def cast(self, matrix: Tensor, operand: Operand, transposed: bool = False) -> Scaled:
        return cast_tensorwise(matrix, self.formats.dtype_of(operand), transposed)

    def scaled_mm(self, a: Scaled, b: Scaled, dtype: torch.dtype, fast: bool) -> Tensor:
        return torch._scaled_mm(
            a.values, b.values.t(), scale_a=a.scale, scale_b=b.scale, out_dtype=dtype, use_fast_accum=fast
        )


class RowwiseProduct(ScaledProduct):
    """Scales each row of A and each column of B^T by a power of two, in E4M3: torchao's `rowwise`.

    Without `fp8_weight_gradient` it is close to torchao's `rowwise_with_gw_hp`. That uses one scale for the
    full weight in the input gradient.
    """

    def __init__(self, fp8_weight_gradient: bool = True) -> None:
        super().__init__(Formats(E4M3, E4M3), fp8_weight_gradient)

    def cast(self, matrix: Tensor, operand: Operand, transposed: bool = False) -> Scaled:
        return cast_rowwise(matrix, self.formats.dtype_of(operand), transposed)

    def scaled_mm(self, a: Scaled, b: Scaled, dtype: torch.dtype, fast: bool) -> Tensor:
        if fast:
            return torch._scaled_mm(
                a.values, b.values.t(), scale_a=a.scale, scale_b=b.scale.t(), out_dtype=dtype, use_fast_accum=True
            )
        # The kernel for row scales is slow with full accumulation. Scales are powers of two, so multiplying
        # the result by them afterwards causes no rounding error.
        unit_scale = torch.ones((), device=a.scale.device)
        unscaled = torch._scaled_mm(a.values, b.values.t(), scale_a=unit_scale, scale_b=unit_scale, out_dtype=dtype)
        return unscaled * a.scale.to(dtype) * b.scale.t().to(dtype)


class MXProduct(ScaledProduct):
    """MXFP8 on Blackwell's tensor cores: a power of two scales every 32 elements of a row, in E4M3 (arXiv
    2506.08027)."""

    multiple = MX_BLOCK

    def __init__(self, fp8_weight_gradient: bool = True) -> None:
        super().__init__(Formats(E4M3, E4M3), fp8_weight_gradient)

    def cast(self, matrix: Tensor, operand: Operand, transposed: bool = False) -> Scaled:
        return cast_mx(matrix, self.formats.dtype_of(operand), transposed)

    def scaled_mm(self, a: Scaled, b: Scaled, dtype: torch.dtype, fast: bool) -> Tensor:
        scales = (swizzled(a.scale), swizzled(b.scale))
        return torch._scaled_mm(a.values, b.values.t(), scale_a=scales[0], scale_b=scales[1], out_dtype=dtype)
