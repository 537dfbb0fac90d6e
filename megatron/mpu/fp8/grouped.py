"""FP8 products of experts: rows sorted by group, each group multiplied by its own matrix.

Recipes are those with a grouped kernel in torch (`_scaled_grouped_mm`), which torchao has for experts too:
`rowwise` and `mxfp8`. Groups are padded with rows of zeros, so that the kernel and the MX blocks
never cross from one group into the next. The host never waits for the sizes of groups.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.mpu.fp8.casting import (
    E4M3,
    MX_BLOCK,
    Operand,
    Scaled,
    encode_scale,
    power_of_two,
    rounded,
    swizzled,
)
from megatron.mpu.fp8.products import MXProduct, RowwiseProduct
from megatron.mpu.grouped import PlainGroupedProduct, grouped_mm

_MX_ROWS = 128  # rows of a tile of scales


class Groups(NamedTuple):
    """The places of the rows of groups after padding.

    places: `[rows]` int64, the index of each row among the padded rows. Rows past the last end get the index
        `number`, which does not exist.
    ends: `[groups]` int32, the index after each group's last padded row.
    number: of padded rows, for any sizes of groups.
    """

    places: Tensor
    ends: Tensor
    number: int

    def padded(self, x: Tensor) -> Tensor:
        """Returns the rows of `x` `[rows, columns]` at their places, and zeros: `[number, columns]`."""
        return x.new_zeros(self.number + 1, x.shape[1]).index_copy(0, self.places, x)[:-1]

    def unpadded(self, x: Tensor) -> Tensor:
        """Returns `[rows, columns]` from padded rows. Rows past the last end are copies of another."""
        return x[self.places.clamp(max=self.number - 1)]


def pad_groups(rows: int, ends: Tensor, multiple: int) -> Groups:
    """Returns the places of `rows` rows if each group is padded to a multiple of `multiple` rows."""
    sizes = ends.diff(prepend=ends.new_zeros(1))
    padded_sizes = (sizes + multiple - 1) // multiple * multiple
    padded_ends = padded_sizes.cumsum(0, dtype=ends.dtype)
    number = (-(-rows // multiple) + len(ends)) * multiple
    index = torch.arange(rows, device=ends.device)
    group = torch.searchsorted(ends, index.to(ends.dtype), right=True)
    shifts = (padded_ends - padded_sizes) - (ends - sizes)
    places = torch.where(group < len(ends), index + shifts[group.clamp(max=len(ends) - 1)], number)
    return Groups(places, padded_ends, number)


class GroupedScaledProduct:
    """Computes products of stacked experts (`GroupedProduct`) with FP8 operands, cast as those of a linear.

    A group's weight gradient is scaled along its own rows only. Results have the operands' original dtype.
    product: of the recipe `rowwise` or `mxfp8`.
    """

    def __init__(self, product: RowwiseProduct | MXProduct) -> None:
        self.product = product
        self.is_mx = isinstance(product, MXProduct)

    def output(self, x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        return self._multiply(x, weights, ends, "input")

    def input_gradient(self, grad: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        return self._multiply(grad, weights.transpose(1, 2), ends, "gradient")

    def weight_gradient(self, x: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
        if not self.product.fp8_weight_gradient:
            return PlainGroupedProduct().weight_gradient(x, grad, ends)
        groups = self._groups(x, ends)
        a, b = (self._cast_columns(groups.padded(rows), groups) for rows in (x, grad))
        return multiply_columns(a, b, groups.ends, x.dtype)

    def _multiply(self, rows: Tensor, matrices: Tensor, ends: Tensor, operand: Operand) -> Tensor:
        groups = self._groups(rows, ends)
        a = self.product.cast(groups.padded(rows), operand)
        # Scales belong to rows, so all matrices are cast as one: `[groups * out, in]`.
        b = self.product.cast(matrices.transpose(1, 2).flatten(0, 1), "weight")
        out = multiply_rows(a, b, groups.ends, rows.dtype, fast=operand == "input")
        return groups.unpadded(out)

    def _groups(self, rows: Tensor, ends: Tensor) -> Groups:
        in_tiles = self.is_mx and rows.device.type != "cpu"
        return pad_groups(len(rows), ends, _MX_ROWS if in_tiles else self.product.multiple)

    def _cast_columns(self, rows: Tensor, groups: Groups) -> Scaled:
        """Casts the transposed matrix of padded rows; `rowwise`: with a scale for each column of each group.

        Returns values `[columns, rows]`, and scales `[groups + 1, columns]` fp32 (the last is of no group) or
        those of `cast_mx`.
        """
        if self.is_mx:
            return self.product.cast(rows, "input", transposed=True)
        number = len(groups.ends)
        index = torch.arange(groups.number, device=rows.device, dtype=groups.ends.dtype)
        group = torch.searchsorted(groups.ends, index, right=True)
        amax = rows.new_zeros(number + 1, rows.shape[1])
        amax = amax.scatter_reduce(0, group.unsqueeze(1).expand_as(rows), rows.abs(), "amax")
        scale = power_of_two(encode_scale(amax, E4M3))
        return Scaled(rounded(rows.t(), scale[group].t(), E4M3), scale.reciprocal())


def multiply_rows(a: Scaled, b: Scaled, ends: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    """Multiplies the rows of each group by its matrix, `[rows, in]` to `[rows, out]`.

    a: padded rows. b: `[groups * out, in]`. On a CPU operands are dequantized and multiplied in fp32.
    """
    values = b.values.unflatten(0, (len(ends), -1)).transpose(1, 2)
    if a.values.device.type == "cpu":
        matrices = b.dequantized().unflatten(0, (len(ends), -1)).transpose(1, 2)
        return grouped_mm(a.dequantized(), matrices, ends).to(dtype)
    if b.scale.dtype != torch.uint8:
        scales = a.scale.flatten(), b.scale.view(len(ends), -1)
    else:
        stacked = b.scale.unflatten(0, (len(ends), -1))
        scales = swizzled(a.scale).view(len(a.scale), -1), torch.stack([swizzled(s) for s in stacked])
    return torch._scaled_grouped_mm(a.values, values, *scales, offs=ends, out_dtype=dtype, use_fast_accum=fast)


def multiply_columns(a: Scaled, b: Scaled, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns A B^T over the columns of each group, `[groups, rows of a, rows of b]`.

    a, b: `[rows, padded columns]`, as `_cast_columns` makes them; `ends` divides the columns into groups.
    """
    if a.values.device.type == "cpu":
        x, grad = (_dequantized_columns(m, ends) for m in (a, b))
        return PlainGroupedProduct().weight_gradient(x.t(), grad.t(), ends).to(dtype)
    if a.scale.dtype == torch.uint8:
        a_scale, b_scale = (grouped_tiles(m.scale, ends) for m in (a, b))
    else:
        a_scale, b_scale = (m.scale[:-1].flatten() for m in (a, b))
    return torch._scaled_grouped_mm(a.values, b.values.t(), a_scale, b_scale, offs=ends, out_dtype=dtype)


def _dequantized_columns(matrix: Scaled, ends: Tensor) -> Tensor:
    if matrix.scale.dtype == torch.uint8:
        return matrix.dequantized()
    index = torch.arange(matrix.values.shape[1], dtype=ends.dtype, device=ends.device)
    return matrix.values.float() * matrix.scale[torch.searchsorted(ends, index, right=True)].t()


def grouped_tiles(scale: Tensor, ends: Tensor) -> Tensor:
    """Returns MX scales `[rows, blocks]` as `swizzled` orders them, but each group's blocks by themselves.

    The groups come one after another, as the kernel reads them (torchao's `mx_block_rearrange_2d_K_groups`).
    ends: the index after each group's last column, multiples of 128: tiles of four blocks. Result: `[rows
    padded to 128, blocks]`.
    """
    rows, columns = -(-scale.shape[0] // 128), scale.shape[1] // 4
    tiles = swizzled(scale).view(torch.uint8).view(rows * columns, 512)
    bounds = torch.cat([ends.new_zeros(1), ends // (4 * MX_BLOCK), ends.new_full((1,), columns)])
    column = torch.arange(columns, dtype=ends.dtype, device=ends.device)
    group = torch.searchsorted(bounds[1:-1].contiguous(), column, right=True)
    start, width = bounds[group], bounds[group + 1] - bounds[group]
    row = torch.arange(rows, device=ends.device).unsqueeze(1)
    places: Any = rows * start + row * width + (column - start)
    ordered = torch.empty_like(tiles).index_copy(0, places.flatten().long(), tiles)
    return ordered.view(rows * 128, columns * 4).view(torch.float8_e8m0fnu)
