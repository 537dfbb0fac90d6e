"""Casts matrices to FP8: 8-bit values, and scales by which they are multiplied to recover the matrix.

E4M3 has 3 bits of mantissa and reaches 448, E5M2 has 2 and reaches 57344 (arXiv 2209.05433). Values are
multiplied in fp32, rounded to the nearest, ties to even, and saturate. Non-finite values stay non-finite: the
scale, or the value, becomes NaN.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MX_BLOCK = 32
"""Neighbours along a row that share a scale in the MX formats."""

Operand = Literal["input", "weight", "gradient"]
OPERANDS: tuple[Operand, ...] = ("input", "weight", "gradient")
"""The operands of a linear layer's products: its input, its weight, the gradient of its output."""


@dataclass(frozen=True)
class Formats:
    """The 8-bit type of forward operands (input and weight) and of gradients: Transformer-Engine's HYBRID by
    default, its E4M3 with `Formats(E4M3, E4M3)`."""

    forward: torch.dtype = E4M3
    gradient: torch.dtype = E5M2

    def dtype_of(self, operand: Operand) -> torch.dtype:
        """The type of an operand."""
        return self.gradient if operand == "gradient" else self.forward


class Scaled(NamedTuple):
    """A matrix `[rows, columns]` in FP8: `values` times `scale`.

    values: contiguous, of an 8-bit type. scale: `[]` fp32 for the full matrix, `[rows, 1]` fp32, or `[rows,
    columns / 32]` uint8, codes of E8M0: 2^(code - 127), 255 is NaN.
    """

    values: Tensor
    scale: Tensor

    def dequantized(self) -> Tensor:
        """The matrix in fp32."""
        if self.scale.dtype != torch.uint8:
            return self.values.float() * self.scale
        factors = torch.where(self.scale == 255, torch.nan, (self.scale.float() - 127).exp2())
        return self.values.float() * factors.repeat_interleave(MX_BLOCK, dim=1)


def encode_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The factor that maps the largest magnitude `amax` to the type's largest value: fp32, shaped as `amax`.

    It is finite for amax 0. The division is in fp64, as in torchao, since compilers round fp32 division
    differently.
    """
    return (torch.finfo(dtype).max / amax.double().clamp(min=1e-30)).float()


def power_of_two(scale: Tensor) -> Tensor:
    """`scale` rounded down to a power of two, so that multiplying by it rounds nothing."""
    return scale.log2().floor().exp2()


def rounded(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`matrix` times `scale` in `dtype`, saturated, contiguous."""
    limit = torch.finfo(dtype).max
    # torch before 2.12 does not saturate by itself.
    return (matrix.float() * scale).clamp(-limit, limit).to(dtype).contiguous()


def cast_tensorwise(matrix: Tensor, dtype: torch.dtype, transposed: bool) -> Scaled:
    """Casts with one scale for the full matrix, from its current largest magnitude. transposed: cast the
    transposed matrix."""
    scale = encode_scale(matrix.abs().amax(), dtype)
    return Scaled(rounded(matrix.t() if transposed else matrix, scale, dtype), scale.reciprocal())


def cast_rowwise(matrix: Tensor, dtype: torch.dtype, transposed: bool) -> Scaled:
    """Casts with a power of two as the scale of each row: torchao's `rowwise`. transposed: cast the
    transposed matrix."""
    matrix = matrix.t() if transposed else matrix
    scale = power_of_two(encode_scale(matrix.abs().amax(dim=1, keepdim=True), dtype))
    return Scaled(rounded(matrix, scale, dtype), scale.reciprocal())


def cast_mx(matrix: Tensor, dtype: torch.dtype, transposed: bool) -> Scaled:
    """Casts with a power of two as the scale of every 32 neighbours in a row (OCP MX 1.0).

    The scale is the smallest with which no value exceeds the type's largest: cuBLAS's and
    Transformer-Engine's choice. A block with a non-finite value has the scale NaN. The number of columns must
    be a multiple of 32.
    """
    matrix = (matrix.t() if transposed else matrix).float()
    blocks = matrix.unflatten(1, (-1, MX_BLOCK))
    min_scale = (blocks.abs().amax(dim=2) / torch.finfo(dtype).max).view(torch.int32)
    # Exponent and mantissa of an fp32 number: up to the next power of two. Infinite or NaN: 255, NaN in E8M0.
    exponent = ((min_scale >> 23) + ((min_scale & 0x7FFFFF) > 0).int()).clamp(max=255)
    inverse = ((254 - exponent) << 23).view(torch.float32)
    values = rounded(blocks, inverse.unsqueeze(2), dtype).flatten(1)
    return Scaled(values, exponent.to(torch.uint8))


def swizzled(scale: Tensor) -> Tensor:
    """Reorders scales `[rows, blocks]` of `cast_mx` for Blackwell's tensor cores.

    They are padded to tiles of 128 x 4 and flat (cuBLAS, "1D block scaling factors layout").
    """
    rows, blocks = scale.shape
    padding = (0, -blocks % 4, 0, -rows % 128)
    padded = torch.nn.functional.pad(scale, padding)
    tiles = padded.unflatten(0, (-1, 4, 32)).unflatten(3, (-1, 4))  # [tile, 4, 32, tile, 4]
    return tiles.permute(0, 3, 2, 1, 4).flatten().view(torch.float8_e8m0fnu)
