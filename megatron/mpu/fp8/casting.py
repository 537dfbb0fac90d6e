"""Casts matrices to FP8: 8-bit values, and scales that multiply them to recover the matrix.

E4M3 has 3 bits of mantissa and reaches 448; E5M2 has 2 bits and reaches 57344 (arXiv 2209.05433). A cast
multiplies values in fp32, rounds to nearest even, and saturates. Non-finite values are not hidden: they, or
all values that share their scale, become NaN.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MX_BLOCK = 32
"""Number of consecutive elements of a row that share a scale in the MX formats."""

Operand = Literal["input", "weight", "gradient"]
OPERANDS: tuple[Operand, ...] = ("input", "weight", "gradient")
"""The operands of a linear layer's products: its input, its weight, the gradient of its output."""


@dataclass(frozen=True)
class Formats:
    """The 8-bit dtypes of forward operands (input and weight) and of gradients.

    The default is Transformer-Engine's HYBRID; `Formats(E4M3, E4M3)` is its E4M3.
    """

    forward: torch.dtype = E4M3
    gradient: torch.dtype = E5M2

    def dtype_of(self, operand: Operand) -> torch.dtype:
        """Returns the 8-bit dtype of an operand: "input", "weight" or "gradient"."""
        return self.gradient if operand == "gradient" else self.forward


class Scaled(NamedTuple):
    """A matrix `[rows, columns]` in FP8; its value is `values` times `scale`.

    values: contiguous, of an 8-bit dtype.
    scale: `[]` fp32 for the full matrix; `[rows, 1]` fp32 for each row; or `[rows, columns / 32]` uint8 for
        each block of 32. The uint8 are E8M0 codes: 2^(code - 127), and 255 is NaN.
    """

    values: Tensor
    scale: Tensor

    def dequantized(self) -> Tensor:
        """Returns the matrix in fp32: values times scales."""
        if self.scale.dtype != torch.uint8:
            return self.values.float() * self.scale
        factors = torch.where(self.scale == 255, torch.nan, (self.scale.float() - 127).exp2())
        return self.values.float() * factors.repeat_interleave(MX_BLOCK, dim=1)


def encode_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the factor that maps `amax`, the largest magnitude, to the largest value of `dtype`; fp32,
    shaped as `amax`.

    It is finite for amax 0. The division is in fp64, as in torchao, since compilers round fp32 division
    differently.
    """
    return (torch.finfo(dtype).max / amax.double().clamp(min=1e-30)).float()


def power_of_two(scale: Tensor) -> Tensor:
    """Returns `scale` rounded down to a power of two. Multiplying by a power of two causes no rounding
    error."""
    return scale.log2().floor().exp2()


def rounded(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `matrix` times `scale` in `dtype`: rounded, saturated at the dtype's largest value, and
    contiguous."""
    limit = torch.finfo(dtype).max
    # torch's own cast saturates only from 2.12 on.
    return (matrix.float() * scale).clamp(-limit, limit).to(dtype).contiguous()


def cast_tensorwise(matrix: Tensor, dtype: torch.dtype, transposed: bool) -> Scaled:
    """Casts a matrix to FP8 with one scale, from its current largest magnitude. transposed: cast the
    transposed matrix."""
    scale = encode_scale(matrix.abs().amax(), dtype)
    return Scaled(rounded(matrix.t() if transposed else matrix, scale, dtype), scale.reciprocal())


def cast_rowwise(matrix: Tensor, dtype: torch.dtype, transposed: bool) -> Scaled:
    """Casts a matrix to FP8 with a power of two as the scale of each row, as torchao's `rowwise`.

    transposed: cast the transposed matrix.
    """
    matrix = matrix.t() if transposed else matrix
    scale = power_of_two(encode_scale(matrix.abs().amax(dim=1, keepdim=True), dtype))
    return Scaled(rounded(matrix, scale, dtype), scale.reciprocal())


def cast_mx(matrix: Tensor, dtype: torch.dtype, transposed: bool) -> Scaled:
    """Casts a matrix to FP8 with a power of two as the scale of every 32 consecutive elements of a row (OCP
    MX 1.0).

    The scale is the smallest with which no value exceeds the dtype's largest, as in cuBLAS and
    Transformer-Engine. A block with a non-finite value gets the scale NaN. The number of columns must be a
    multiple of 32.

    transposed: cast the transposed matrix.
    """
    matrix = (matrix.t() if transposed else matrix).float()
    blocks = matrix.unflatten(1, (-1, MX_BLOCK))
    min_scale = (blocks.abs().amax(dim=2) / torch.finfo(dtype).max).view(torch.int32)
    # The exponent of the fp32 number, plus 1 if it has a mantissa: rounds up to a power of two. Infinite and
    # NaN give 255, which is NaN in E8M0.
    exponent = ((min_scale >> 23) + ((min_scale & 0x7FFFFF) > 0).int()).clamp(max=255)
    inverse = ((254 - exponent) << 23).view(torch.float32)
    values = rounded(blocks, inverse.unsqueeze(2), dtype).flatten(1)
    return Scaled(values, exponent.to(torch.uint8))


def swizzled(scale: Tensor) -> Tensor:
    """Reorders the scales `[rows, blocks]` of `cast_mx` into the layout that Blackwell's tensor cores read.

    They are padded to tiles of 128 x 4, and flattened (cuBLAS, "1D block scaling factors layout").
    """
    rows, blocks = scale.shape
    padding = (0, -blocks % 4, 0, -rows % 128)
    padded = torch.nn.functional.pad(scale, padding)
    tiles = padded.unflatten(0, (-1, 4, 32)).unflatten(3, (-1, 4))  # [tile, 4, 32, tile, 4]
    return tiles.permute(0, 3, 2, 1, 4).flatten().view(torch.float8_e8m0fnu)
