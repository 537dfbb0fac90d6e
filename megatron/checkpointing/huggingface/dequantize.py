"""Dequantises weights of HuggingFace folders: FP8 with scales, MXFP4 and NVFP4.

A scheme (`scheme_of`) knows which stored tensors make up a weight (`Packed`). It computes the weight in
blocks of rows, so only a few megabytes are in memory in addition to the result. Values are computed in fp32
and then cast.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.huggingface.model_files import read_json

_AT_A_TIME = 1 << 20  # elements that are dequantised together: 4 MB in fp32
_GROUP, _NV_GROUP = 32, 16  # elements that share a scale in MXFP4 and NVFP4
# Values of E2M1 (sign, two exponent bits, one mantissa bit), indexed by the four bits.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_SCALE, _BLOCKS, _SCALES = "_scale_inv", "_blocks", "_scales"
# Static scales of activations; they are ignored, because this program does not quantise activations.
_ACTIVATION_SCALES = re.compile(r"(.+)[._](activation_scale|input_scale)")
# Names of NVFP4's tensors: (values, scales, global scale, the scale of activations), after the module's name.
_NVFP4_NAMES = {
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"),
    "modelopt": ("weight", "weight_scale", "weight_scale_2", "input_scale"),
}
_CACHE_SCALES = re.compile(r".+\.(k_scale|v_scale|q_scale)")


@dataclass(frozen=True)
class Stored:
    """The dtype and shape of a tensor, from the header of its file. dtype: None if it is not supported."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Packed:
    """A quantised weight: the tensors that store it, and its shape.

    values, scales: the names of the two tensors that store it. shape: of the dequantised weight.
    global_scale: the name of the tensor with one scale for the full weight; None if it has none.
    """

    values: str
    scales: str
    shape: tuple[int, ...]
    global_scale: str | None = None


class Scheme(Protocol):
    """A quantisation scheme of weights, such as FP8 with scales. `str` gives its name for the user."""

    def packed(self, stored: Mapping[str, Stored]) -> dict[str, Packed]:
        """Finds the quantised weights among the tensors of a folder; returns them by the weight's name.

        stored: all tensors of the folder, by name. Raises CheckpointError for a weight whose scales are
            missing or do not match the shape of its values."""

    def hidden(self, names: Iterable[str], packed: Mapping[str, Packed]) -> set[str]:
        """Returns the names of tensors that only serve to store quantised weights, such as scales.

        names: of all tensors of the folder. packed: the quantised weights."""

    def full_scales(self, scales: Tensor, global_scale: Tensor) -> Tensor:
        """Returns scales that include the one of the full weight (`Packed.global_scale`)."""

    def as_stored(self, weight: Tensor) -> Tensor:
        """Returns a view of a weight `[..., rows, columns]`, transposed if files store it transposed."""

    def rows(self, values: Tensor, scales: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """Yields a dequantised weight in fp32 in pieces: (number of the matrix, first row, rows `[n,
        columns]`).

        values, scales: the stored tensors."""


def scheme_of(config: Mapping[str, Any], folder: Path, folder_name: str) -> Scheme | None:
    """Returns the quantisation scheme that a config.json names; None if weights are not quantised.

    The field is `quantization_config`; without it, a file of ModelOpt in `folder`. folder_name: for errors.
    Raises CheckpointError for an unsupported scheme."""
    config = _with_modelopt(config, folder)
    quantization = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if not quantization:
        return None
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
    if method == "fp8":
        block = quantization.get("weight_block_size", (128, 128))
        is_pair = isinstance(block, Sequence) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)
        if block is not None and not is_pair:
            raise CheckpointError(
                f"{folder_name}: config.json: quantization_config.weight_block_size: {block} is not a pair of whole "
                "numbers above 0; correct the file"
            )
        return Fp8(folder_name, None if block is None else (block[0], block[1]))
    if method == "mxfp4":
        return Mxfp4(folder_name)
    kind = quantization.get("format" if method == "compressed-tensors" else "quant_algo", "an unnamed format")
    if method in ("compressed-tensors", "modelopt") and kind in ("nvfp4-pack-quantized", "NVFP4"):
        return Nvfp4(folder_name, method)
    name = f"{method} ({kind})" if method in ("compressed-tensors", "modelopt") else method or "an unnamed method"
    raise CheckpointError(
        f"{folder_name}: is quantised by {name} (quantization_config of config.json); only fp8, mxfp4 and nvfp4 (of "
        "compressed-tensors and modelopt) are supported; use the unquantised model"
    )


def _with_modelopt(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """Adds to a config.json without `quantization_config` the contents of ModelOpt's own file, if any.

    path: of the folder."""
    file = path / "hf_quant_config.json"
    if config.get("quantization_config") or not file.is_file():
        return config
    quantization = read_json(file).get("quantization") or {}
    return {**config, "quantization_config": {**quantization, "quant_method": "modelopt"}}


def weight_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """Returns the dtype to dequantise weights to: `dtype` of config.json, else its `torch_dtype`, else
    bfloat16."""
    places = (config, config.get("text_config") or {})
    name = next((str(place[key]) for place in places for key in ("dtype", "torch_dtype") if place.get(key)), "")
    dtypes = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    return dtypes.get(name, torch.bfloat16)


def dequantize(scheme: Scheme, stored: Callable[[str], Tensor], packed: Packed, dtype: torch.dtype) -> Tensor:
    """Returns a dequantised weight; needs a few megabytes of memory in addition to the result and its scales.

    stored: returns a stored tensor by its name. dtype: of the result."""
    values, scales, shape = stored(packed.values), stored(packed.scales), packed.shape
    if packed.global_scale is not None:
        scales = scheme.full_scales(scales, stored(packed.global_scale))
    weight = torch.empty(shape, dtype=dtype)
    matrices = scheme.as_stored(weight)
    matrices = matrices.flatten(0, -3) if matrices.dim() > 2 else matrices[None]
    for matrix, begin, piece in scheme.rows(values, scales):
        matrices[matrix, begin : begin + len(piece)] = piece
    return weight


@dataclass(frozen=True)
class Fp8:
    """FP8 (E4M3) with scales: weight `X` is the stored `X` times `X_scale_inv`.

    folder_name: for errors. block: (rows, columns) of a block of a matrix that has one scale; blocks at the
        edges may be smaller; None: one scale for the matrix. Stacked experts have scales for each matrix.
    """

    folder_name: str
    block: tuple[int, int] | None

    def __str__(self) -> str:
        return "fp8, one scale per matrix" if self.block is None else "fp8 in blocks of {} x {}".format(*self.block)

    def packed(self, stored: Mapping[str, Stored]) -> dict[str, Packed]:
        weights = {}
        for name, tensor in stored.items():
            if tensor.dtype != torch.float8_e4m3fn:
                continue
            scales = stored.get(name + _SCALE)
            if scales is None or scales.dtype is None or len(tensor.shape) < 2:
                raise CheckpointError(
                    f"{self.folder_name}: {name} is in FP8, but it is no matrix, or its scales {name + _SCALE} are "
                    "missing or of an unknown dtype"
                )
            grid = self._grid(tensor.shape)
            is_single = self.block is None and math.prod(scales.shape) in (1, math.prod(grid))
            if scales.shape != grid and not is_single:
                raise CheckpointError(
                    f"{self.folder_name}: {name + _SCALE}: has shape {scales.shape}, but weight_block_size "
                    f"in config.json implies {grid}"
                )
            weights[name] = Packed(name, name + _SCALE, tensor.shape)
        return weights

    def _grid(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the scales for a weight of `shape`."""
        *lead, rows, columns = shape
        high, wide = self.block or (rows, columns)
        return (*lead, -(-rows // high), -(-columns // wide))

    def full_scales(self, scales: Tensor, global_scale: Tensor) -> Tensor:
        raise AssertionError("FP8 weights have no global scale")

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
    """MXFP4: four bits per number, one scale per 32 numbers. `X` is stored as `X_blocks` and `X_scales`.

    X_blocks: uint8 `[..., rows, groups, 16]`, two E2M1 numbers per byte, the first in the low four bits.
    X_scales: uint8 `[..., rows, groups]`; s means the factor 2^(s - 127).
    A matrix becomes `[rows, groups * 32]`; experts become `[experts, groups * 32, rows]`, as in transformers.
    folder_name: for errors.
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
                raise CheckpointError(
                    f"{self.folder_name}: {name} is in MXFP4, but its scales {weight + _SCALES} in uint8 are missing"
                )
            if len(tensor.shape) not in (3, 4) or tensor.shape != (*scales.shape, _GROUP // 2):
                raise CheckpointError(
                    f"{self.folder_name}: {name} has shape {tensor.shape}, but its scales {scales.shape} need "
                    f"{(*scales.shape, _GROUP // 2)}; download the folder again"
                )
            *experts, rows, groups = scales.shape
            matrix = (groups * _GROUP, rows) if experts else (rows, groups * _GROUP)
            weights[weight] = Packed(name, weight + _SCALES, (*experts, *matrix))
        return weights

    def full_scales(self, scales: Tensor, global_scale: Tensor) -> Tensor:
        raise AssertionError("MXFP4 weights have no global scale")

    def hidden(self, names: Iterable[str], packed: Mapping[str, Packed]) -> set[str]:
        return {name for tensor in packed.values() for name in (tensor.values, tensor.scales)}

    def as_stored(self, weight: Tensor) -> Tensor:
        return weight if weight.dim() == 2 else weight.transpose(-1, -2)

    def rows(self, values: Tensor, scales: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        matrices = values.reshape(-1, *values.shape[-3:])
        _, rows, groups, _ = matrices.shape
        exponents = scales.reshape(-1, rows, groups, 1).int() - 127
        pairs, strip = _pairs(), max(1, _AT_A_TIME // (groups * _GROUP))
        for i, matrix in enumerate(matrices):
            for begin in range(0, rows, strip):
                part = embedding(matrix[begin : begin + strip].int(), pairs).flatten(2)
                yield i, begin, torch.ldexp(part, exponents[i, begin : begin + strip]).flatten(1)


@dataclass(frozen=True)
class Nvfp4:
    """NVFP4: four bits per number, one FP8 scale per 16 numbers of a row, one fp32 scale per matrix.

    Values: uint8 `[rows, columns / 2]`, two E2M1 numbers per byte, the first in the low four bits. Scales:
    E4M3 `[rows, columns / 16]`. A number is its E2M1 value times its scale. Files of ModelOpt multiply it by
    the global scale (`weight_scale_2`), those of compressed-tensors divide it (`weight_global_scale`). Scales
    of activations and of the key-value cache are ignored.
    folder_name: for errors. method: `quant_method` of config.json.
    """

    folder_name: str
    method: str

    def __str__(self) -> str:
        return f"nvfp4 of {self.method}"

    def packed(self, stored: Mapping[str, Stored]) -> dict[str, Packed]:
        values_name, scales_name, global_name, _ = _NVFP4_NAMES[self.method]
        weights = {}
        for name, tensor in stored.items():
            module, _, kind = name.rpartition(".")
            if kind != values_name or tensor.dtype != torch.uint8:
                continue
            scales, global_scale = stored.get(f"{module}.{scales_name}"), stored.get(f"{module}.{global_name}")
            if scales is None or scales.dtype != torch.float8_e4m3fn or global_scale is None:
                raise CheckpointError(
                    f"{self.folder_name}: {name} is in NVFP4, but its scales {scales_name} in FP8 or {global_name} "
                    "are missing"
                )
            if len(tensor.shape) != 2 or math.prod(global_scale.shape) != 1 or global_scale.dtype != torch.float32:
                raise CheckpointError(
                    f"{self.folder_name}: {name} has shape {tensor.shape} and {global_name} {global_scale.shape}; only "
                    "matrices with one global scale in fp32 are supported"
                )
            columns = 2 * tensor.shape[1]
            if columns % _NV_GROUP or scales.shape != (tensor.shape[0], columns // _NV_GROUP):
                raise CheckpointError(
                    f"{self.folder_name}: {name} has shape {tensor.shape}, but its scales {scales.shape} are not one "
                    f"for {_NV_GROUP} numbers of a row; download the folder again"
                )
            shape = (tensor.shape[0], columns)
            weights[f"{module}.weight"] = Packed(name, f"{module}.{scales_name}", shape, f"{module}.{global_name}")
        return weights

    def full_scales(self, scales: Tensor, global_scale: Tensor) -> Tensor:
        factor = global_scale.float().reshape(())
        return scales.float() * factor if self.method == "modelopt" else scales.float() / factor

    def hidden(self, names: Iterable[str], packed: Mapping[str, Packed]) -> set[str]:
        kinds = _NVFP4_NAMES[self.method]
        modules = {name.removesuffix(".weight") for name in packed}
        serving = {f"{module}.{kind}" for module in modules for kind in kinds}
        return {name for name in names if name in serving or _CACHE_SCALES.fullmatch(name)}

    def as_stored(self, weight: Tensor) -> Tensor:
        return weight

    def rows(self, values: Tensor, scales: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        rows, width = values.shape
        pairs, strip = _pairs(), max(1, _AT_A_TIME // (2 * width))
        for begin in range(0, rows, strip):
            part = embedding(values[begin : begin + strip].int(), pairs).flatten(1).unflatten(1, (-1, _NV_GROUP))
            yield 0, begin, (part * scales[begin : begin + strip].float().unsqueeze(2)).flatten(1)


def _pairs() -> Tensor:
    """Returns the two E2M1 numbers of each byte, `[256, 2]` fp32; the first is in the low four bits."""
    numbers = torch.tensor(_E2M1)
    return torch.stack([numbers.repeat(16), numbers.repeat_interleave(16)], dim=-1)
