"""Products of a linear layer in FP8, without state.

Every product is A B^T, summed along rows. Both matrices are cast along their rows and are contiguous, since
Hopper multiplies no other layout. Each operand is cast from full precision where it is needed: no 8-bit
tensor is saved from forward to backward.
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
    """`Product` with operands in FP8 and results in the operands' original dtype.

    multiple: features in and out must be multiples of this. fp8_weight_gradient: False computes the weight
    gradient in the original dtype.
    """

    multiple = 16

    def __init__(self, formats: Formats, fp8_weight_gradient: bool = True) -> None:
        self.formats = formats
        self.fp8_weight_gradient = fp8_weight_gradient

    @abstractmethod
    def cast(self, matrix: Tensor, operand: Operand, transposed: bool = False) -> Scaled:
        """Casts `[rows, columns]`, or its transpose, to the operand's format, scaled along its rows."""

    @abstractmethod
    def scaled_mm(self, a: Scaled, b: Scaled, dtype: torch.dtype, fast: bool) -> Tensor:
        """A B^T by tensor cores. fast: allows Hopper to accumulate in fewer bits."""

    def multiply(self, a: Scaled, b: Scaled, dtype: torch.dtype, fast: bool) -> Tensor:
        """A B^T. On a CPU the operands are dequantized and multiplied in fp32, since torch releases differ in
        their FP8 products there."""
        if a.values.device.type == "cpu":
            return (a.dequantized() @ b.dequantized().t()).to(dtype)
        return self.scaled_mm(a, b, dtype, fast)

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        """x W^T without bias: `[..., in]`, `[out, in]` to `[..., out]`."""
        a, b = self.cast(x.flatten(0, -2), "input"), self.cast(weight, "weight")
        return self.multiply(a, b, x.dtype, fast=True).unflatten(0, x.shape[:-1])

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        """dy W, the gradient of x: `[..., out]`, `[out, in]` to `[..., in]`."""
        a, b = self.cast(grad.flatten(0, -2), "gradient"), self.cast(weight, "weight", transposed=True)
        return self.multiply(a, b, grad.dtype, fast=False).unflatten(0, grad.shape[:-1])

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """dy^T x, the gradient of W: `[..., out]`, `[..., in]` to `[out, in]`."""
        if not self.fp8_weight_gradient:
            return PlainProduct().weight_gradient(grad, x)
        grad, x = self._padded(grad.flatten(0, -2)), self._padded(x.flatten(0, -2))
        a, b = self.cast(grad, "gradient", transposed=True), self.cast(x, "input", transposed=True)
        return self.multiply(a, b, grad.dtype, fast=False)

    def _padded(self, tokens: Tensor) -> Tensor:
        """Returns the tokens, padded with zero rows to a multiple of `multiple`, because FP8 products sum
        over tokens."""
        missing = -tokens.shape[0] % self.multiple
        return F.pad(tokens, (0, 0, 0, missing)) if missing else tokens


class TensorwiseProduct(ScaledProduct):
    """One scale per matrix, from its current largest magnitude: torchao's and torchtitan's `tensorwise`,
    Transformer-Engine's Float8CurrentScaling. Under tensor parallelism a rank scales its own part of a
    matrix."""

    def cast(self, matrix: Tensor, operand: Operand, transposed: bool = False) -> Scaled:
        return cast_tensorwise(matrix, self.formats.dtype_of(operand), transposed)

    def scaled_mm(self, a: Scaled, b: Scaled, dtype: torch.dtype, fast: bool) -> Tensor:
        return torch._scaled_mm(
            a.values, b.values.t(), scale_a=a.scale, scale_b=b.scale, out_dtype=dtype, use_fast_accum=fast
        )


class RowwiseProduct(ScaledProduct):
    """Scales each row and column by a power of two, E4M3 throughout: torchao's `rowwise`.

    Without `fp8_weight_gradient` it is nearly torchao's `rowwise_with_gw_hp`, which uses one scale for the
    weight in the input's gradient.
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
        # the result by them rounds nothing.
        unit_scale = torch.ones((), device=a.scale.device)
        unscaled = torch._scaled_mm(a.values, b.values.t(), scale_a=unit_scale, scale_b=unit_scale, out_dtype=dtype)
        return unscaled * a.scale.to(dtype) * b.scale.t().to(dtype)


class MXProduct(ScaledProduct):
    """MXFP8: a power of two scales every 32 neighbours, E4M3 throughout (arXiv 2506.08027), on Blackwell's
    tensor cores."""

    multiple = MX_BLOCK

    def __init__(self, fp8_weight_gradient: bool = True) -> None:
        super().__init__(Formats(E4M3, E4M3), fp8_weight_gradient)

    def cast(self, matrix: Tensor, operand: Operand, transposed: bool = False) -> Scaled:
        return cast_mx(matrix, self.formats.dtype_of(operand), transposed)

    def scaled_mm(self, a: Scaled, b: Scaled, dtype: torch.dtype, fast: bool) -> Tensor:
        scales = (swizzled(a.scale), swizzled(b.scale))
        return torch._scaled_mm(a.values, b.values.t(), scale_a=scales[0], scale_b=scales[1], out_dtype=dtype)
