"""Dequantises weights of HuggingFace folders: FP8 with scales, and MXFP4.

A scheme (`scheme_of`) knows which stored tensors make a weight (`Packed`), and computes it in blocks of rows,
so only a few megabytes are in memory in addition to the result. Values are computed in fp32 and then cast.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding

from megatron.checkpointing.errors import CheckpointError

_AT_A_TIME = 1 << 20  # numbers that are dequantised together: 4 MB in fp32
_GROUP = 32  # numbers that share a scale in MXFP4
# E2M1: a sign, two bits of exponent and one of mantissa, by the four bits as a number.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_SCALE, _BLOCKS, _SCALES = "_scale_inv", "_blocks", "_scales"
# Static scales of activations, which are ignored because activations are not quantised here.
_ACTIVATION_SCALES = re.compile(r"(.+)[._](activation_scale|input_scale)")


@dataclass(frozen=True)
class Stored:
    """The dtype and shape of a tensor, from the header of its file. dtype: None for one we cannot read."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Packed:
    """A weight that is stored quantised.

    values, scales: the names of the two tensors that store it. shape: of the dequantised weight.
    """

    values: str
    scales: str
    shape: tuple[int, ...]


class Scheme(Protocol):
    """A quantisation scheme of weights, such as FP8 with scales. `str` gives its name for the user."""

    def packed(self, stored: Mapping[str, Stored]) -> dict[str, Packed]:
        """Finds the quantised weights among the tensors of a folder; returns them by the weight's name.

        stored: all tensors of the folder, by name.

        Raises CheckpointError for a weight whose scales are missing or do not match the shape of its values.
        """

    def hidden(self, names: Iterable[str], packed: Mapping[str, Packed]) -> set[str]:
        """Returns the names of tensors that are no weights but belong to quantised weights, such as scales.

        names: of all tensors of the folder. packed: the quantised weights.
        """

    def as_stored(self, weight: Tensor) -> Tensor:
        """Returns a view of a weight `[..., rows, columns]`, transposed if it is stored transposed."""

    def rows(self, values: Tensor, scales: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """Yields the dequantised weight in fp32 in pieces: (matrix, first row, rows `[n, columns]`).

        values, scales: the stored tensors.
        """


def scheme_of(config: Mapping[str, Any], folder_name: str) -> Scheme | None:
    """Returns the scheme in `quantization_config` of a config.json; None if weights are not quantised.

    folder_name: for errors. Raises CheckpointError for an unsupported scheme.
    """
    quantization = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if not quantization:
        return None
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
    if method == "fp8":
        block = quantization.get("weight_block_size", (128, 128))
        if block is not None and not (len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
            raise CheckpointError(f"{folder_name}: config.json: weight_block_size {block} is not a pair of sizes")
        return Fp8(folder_name, None if block is None else (block[0], block[1]))
    if method == "mxfp4":
        return Mxfp4(folder_name)
    raise CheckpointError(
        f"{folder_name}: is quantised by {method or 'an unnamed method'} (quantization_config of config.json); only "
        "fp8 and mxfp4 are supported; use the unquantised model"
    )


def weight_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The dtype to dequantise to: `dtype` of config.json, else its `torch_dtype`, else bfloat16."""
    places = (config, config.get("text_config") or {})
    name = next((str(place[key]) for place in places for key in ("dtype", "torch_dtype") if place.get(key)), "")
    dtypes = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    return dtypes.get(name, torch.bfloat16)


def dequantize(scheme: Scheme, values: Tensor, scales: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns a dequantised weight; needs some megabytes of memory besides the result.

    values, scales: the stored tensors. shape, dtype: of the result."""
    weight = torch.empty(shape, dtype=dtype)
    matrices = scheme.as_stored(weight)
    matrices = matrices.flatten(0, -3) if matrices.dim() > 2 else matrices[None]
    for matrix, begin, piece in scheme.rows(values, scales):
        matrices[matrix, begin : begin + len(piece)] = piece
    return weight


@dataclass(frozen=True)
class Fp8:
    """FP8 (E4M3) with scales: weight `X` is the stored `X` times `X_scale_inv`.

    folder_name: for errors. block: size (rows, columns) of a block of a matrix with one scale; the last
    blocks may be smaller; None: one scale for the matrix. Stacked experts have scales for each matrix.
    """

    folder_name: str
    block: tuple[int, int] | None

    def __str__(self) -> str:
        return "fp8, one scale a matrix" if self.block is None else "fp8 in blocks of {} x {}".format(*self.block)

    def packed(self, stored: Mapping[str, Stored]) -> dict[str, Packed]:
        weights = {}
        for name, tensor in stored.items():
            if tensor.dtype != torch.float8_e4m3fn:
                continue
            scales = stored.get(name + _SCALE)
            if scales is None or scales.dtype is None or len(tensor.shape) < 2:
                raise CheckpointError(f"{self.folder_name}: {name} is in FP8, without {name + _SCALE} of a known dtype")
            grid = self._grid(tensor.shape)
            is_single = self.block is None and math.prod(scales.shape) in (1, math.prod(grid))
            if scales.shape != grid and not is_single:
                raise CheckpointError(
                    f"{self.folder_name}: {name + _SCALE}: shape {scales.shape}, {grid} by weight_block_size of "
                    "config.json"
                )
            weights[name] = Packed(name, name + _SCALE, tensor.shape)
        return weights

    def _grid(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the scales for a weight of `shape`."""
        *lead, rows, columns = shape
        high, wide = self.block or (rows, columns)
        return (*lead, -(-rows // high), -(-columns // wide))

    def hidden(self, names: Iterable[str], packed: Mapping[str, Packed]) -> set[str]:
        scales = {tensor.scales for tensor in packed.values()}
        matches = ((name, _ACTIVATION_SCALES.fullmatch(name)) for name in names)
        return scales | {name for name, m in matches if m and (m[1] in packed or f"{m[1]}.weight" in packed)}

    def as_stored(self, weight: Tensor) -> Tensor:
        return weight

    def rows(self, values: Tensor, scales: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        matrices = values.reshape(-1, *values.shape[-2:])
        _, rows, columns = matrices.shape
        high, wide = self.block or (rows, columns)
        grid = scales.float().reshape(-1, *self._grid((rows, columns))).expand(len(matrices), -1, -1)
        strip = max(1, _AT_A_TIME // columns)
        for i, matrix in enumerate(matrices):
            factors = grid[i].repeat_interleave(wide, 1)[:, :columns]
            for begin in range(0, rows, strip):
                part = matrix[begin : begin + strip].float()
                yield i, begin, part.mul_(factors[torch.arange(begin, begin + len(part)) // high])


@dataclass(frozen=True)
class Mxfp4:
    """MXFP4: four bits a number, a scale for 32 numbers. `X` is stored as `X_blocks` and `X_scales`.

    X_blocks: uint8 `[..., rows, groups, 16]`, two E2M1 numbers a byte, the first in the low four bits.
    X_scales: uint8 `[..., rows, groups]`; s means the factor 2^(s - 127). A matrix becomes `[rows, groups *
    32]`; experts become `[experts, groups * 32, rows]`, as transformers has them. folder_name: for errors.
    """

    folder_name: str

    def __str__(self) -> str:
        return "mxfp4"

    def packed(self, stored: Mapping[str, Stored]) -> dict[str, Packed]:
        weights = {}
        for name, tensor in stored.items():
            weight = name.removesuffix(_BLOCKS)
            if weight == name or tensor.dtype != torch.uint8:
                continue
            scales = stored.get(weight + _SCALES)
            if scales is None or scales.dtype != torch.uint8:
                raise CheckpointError(f"{self.folder_name}: {name} is in MXFP4, without {weight + _SCALES} in uint8")
            if len(tensor.shape) not in (3, 4) or tensor.shape != (*scales.shape, _GROUP // 2):
                raise CheckpointError(
                    f"{self.folder_name}: {name} has shape {tensor.shape}, but its scales {scales.shape} need "
                    f"{(*scales.shape, _GROUP // 2)}; download the folder again"
                )
            *experts, rows, groups = scales.shape
            matrix = (groups * _GROUP, rows) if experts else (rows, groups * _GROUP)
            weights[weight] = Packed(name, weight + _SCALES, (*experts, *matrix))
        return weights

    def hidden(self, names: Iterable[str], packed: Mapping[str, Packed]) -> set[str]:
        return {name for tensor in packed.values() for name in (tensor.values, tensor.scales)}

    def as_stored(self, weight: Tensor) -> Tensor:
        return weight if weight.dim() == 2 else weight.transpose(-1, -2)

    def rows(self, values: Tensor, scales: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        matrices = values.reshape(-1, *values.shape[-3:])
        _, rows, groups, _ = matrices.shape
        exponents = scales.reshape(-1, rows, groups, 1).int() - 127
        numbers, strip = torch.tensor(_E2M1), max(1, _AT_A_TIME // (groups * _GROUP))
        pairs = torch.stack([numbers.repeat(16), numbers.repeat_interleave(16)], dim=-1)  # of a byte, low half first
        for i, matrix in enumerate(matrices):
            for begin in range(0, rows, strip):
                part = embedding(matrix[begin : begin + strip].int(), pairs).flatten(2)
                yield i, begin, torch.ldexp(part, exponents[i, begin : begin + strip]).flatten(1)
