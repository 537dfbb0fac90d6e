"""Quantised weights of HuggingFace folders as numbers: FP8 with scales, and MXFP4.

A scheme (`scheme_of`) says which stored tensors one weight is made of (`Packed`), and makes the weight of
them in blocks of rows, so that beside the result only a few megabytes are in memory. Everything is computed
in fp32 and then cast.
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
# Of activations, where they are static: a run of ours computes with activations as they are.
_OF_ACTIVATIONS = re.compile(r"(.+)[._](activation_scale|input_scale)")


@dataclass(frozen=True)
class Stored:
    """What the header of a file says of a tensor: its dtype (None: one that is not known here) and shape."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Packed:
    """A weight that is stored quantised. values, scales: the names of the tensors that it is made of; shape:
    of the weight."""

    values: str
    scales: str
    shape: tuple[int, ...]


class Scheme(Protocol):
    """A way in which weights are quantised. `str` of it is its name, as the user is told."""

    def packed(self, stored: Mapping[str, Stored]) -> dict[str, Packed]:
        """The weights that are quantised, by name. stored: all tensors of a folder, by name.

        Raises CheckpointError for a weight whose scales are missing or have another shape than its values ask
        for.
        """

    def hidden(self, names: Iterable[str], packed: Mapping[str, Packed]) -> set[str]:
        """Those of `names`, of all tensors of a folder, that only serve the weights `packed`."""

    def as_stored(self, weight: Tensor) -> Tensor:
        """A view of a weight `[..., rows, columns]` with the rows and columns of its stored tensors."""

    def rows(self, values: Tensor, scales: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """The weight in fp32 in pieces: the number of a matrix, that of its first row, and the rows
        `[n, columns]`. values, scales: the stored tensors."""


def scheme_of(config: Mapping[str, Any], where: str) -> Scheme | None:
    """The scheme of a config.json by its `quantization_config`; None where weights are not quantised.

    where: what errors call the folder. Raises CheckpointError for a scheme that is not here.
    """
    given = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if not given:
        return None
    method = given.get("quant_method") if isinstance(given, Mapping) else given
    if method == "fp8":
        block = given.get("weight_block_size", (128, 128))
        if block is not None and not (len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
            raise CheckpointError(f"{where}: config.json: weight_block_size {block} is no pair of sizes")
        return Fp8(where, None if block is None else (block[0], block[1]))
    if method == "mxfp4":
        return Mxfp4(where)
    raise CheckpointError(
        f"{where}: is quantised by {method or 'an unnamed method'} (quantization_config of config.json), which is not "
        "read (fp8 and mxfp4 are); take the model it was made from"
    )


def weight_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The dtype in which a quantised model computes, by its config.json: `dtype`, else `torch_dtype`, else
    bfloat16."""
    places = (config, config.get("text_config") or {})
    name = next((str(place[key]) for place in places for key in ("dtype", "torch_dtype") if place.get(key)), "")
    known = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    return known.get(name, torch.bfloat16)


def dequantize(scheme: Scheme, values: Tensor, scales: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A weight of `shape` in `dtype`, of its two stored tensors. Memory beside the result: some megabytes."""
    weight = torch.empty(shape, dtype=dtype)
    matrices = scheme.as_stored(weight)
    matrices = matrices.flatten(0, -3) if matrices.dim() > 2 else matrices[None]
    for matrix, begin, piece in scheme.rows(values, scales):
        matrices[matrix, begin : begin + len(piece)] = piece
    return weight


@dataclass(frozen=True)
class Fp8:
    """E4M3 with scales: `X` is stored as X in FP8 and `X_scale_inv`, which it is multiplied with.

    where: what errors call the folder. block: rows and columns of a matrix that share a scale, the last block
    of either being what is left; None: the whole matrix. Weights of more dimensions (experts) have scales for
    each matrix.
    """

    where: str
    block: tuple[int, int] | None

    def __str__(self) -> str:
        return "fp8, one scale a matrix" if self.block is None else "fp8 in blocks of {} x {}".format(*self.block)

    def packed(self, stored: Mapping[str, Stored]) -> dict[str, Packed]:
        found = {}
        for name, tensor in stored.items():
            if tensor.dtype != torch.float8_e4m3fn:
                continue
            scales = stored.get(name + _SCALE)
            if scales is None or scales.dtype is None or len(tensor.shape) < 2:
                raise CheckpointError(f"{self.where}: {name} is in FP8, without {name + _SCALE} in numbers known here")
            grid = self._grid(tensor.shape)
            one = self.block is None and math.prod(scales.shape) in (1, math.prod(grid))
            if scales.shape != grid and not one:
                raise CheckpointError(
                    f"{self.where}: {name + _SCALE}: shape {scales.shape}, {grid} by weight_block_size of config.json"
                )
            found[name] = Packed(name, name + _SCALE, tensor.shape)
        return found

    def _grid(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scales of a weight."""
        *lead, rows, columns = shape
        high, wide = self.block or (rows, columns)
        return (*lead, -(-rows // high), -(-columns // wide))

    def hidden(self, names: Iterable[str], packed: Mapping[str, Packed]) -> set[str]:
        scales = {tensor.scales for tensor in packed.values()}
        matches = ((name, _OF_ACTIVATIONS.fullmatch(name)) for name in names)
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
    """Four bits a number, 32 of a row sharing a scale: `X` is stored as `X_blocks` and `X_scales`.

    X_blocks: uint8 `[..., rows, groups, 16]`, two E2M1 numbers a byte, the first in its low half. X_scales:
    uint8 `[..., rows, groups]`, s for 2^(s - 127). A matrix becomes `[rows, groups * 32]`; experts become
    `[experts, groups * 32, rows]`, as transformers has them. where: what errors call the folder.
    """

    where: str

    def __str__(self) -> str:
        return "mxfp4"

    def packed(self, stored: Mapping[str, Stored]) -> dict[str, Packed]:
        found = {}
        for name, tensor in stored.items():
            weight = name.removesuffix(_BLOCKS)
            if weight == name or tensor.dtype != torch.uint8:
                continue
            scales = stored.get(weight + _SCALES)
            if scales is None or scales.dtype != torch.uint8:
                raise CheckpointError(f"{self.where}: {name} is in MXFP4, without {weight + _SCALES} in bytes")
            if len(tensor.shape) not in (3, 4) or tensor.shape != (*scales.shape, _GROUP // 2):
                raise CheckpointError(
                    f"{self.where}: {name}: shape {tensor.shape}, that of its scales {scales.shape}; "
                    f"wanted rows, groups and {_GROUP // 2} bytes, and a scale for each group"
                )
            *experts, rows, groups = scales.shape
            matrix = (groups * _GROUP, rows) if experts else (rows, groups * _GROUP)
            found[weight] = Packed(name, weight + _SCALES, (*experts, *matrix))
        return found

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
