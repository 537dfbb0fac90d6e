"""Weights of linears in 4-bit NormalFloat (QLoRA, arXiv 2305.14314), packed and unpacked by bitsandbytes."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64
"""Elements with one scale, bitsandbytes' own default. They follow each other down a row of the weight, and on
into the next row where a row is not a multiple."""


class QuantizedProduct:
    """The `Product` of a linear layer with a packed weight, which has no gradient.

    Each product unpacks the weight again; no unpacked weight is saved for backward. The scales are kept in
    this object.

    shape: `[out, in]` of this tensor rank's part.
    dtype: of the unpacked weight.
    double_quant: quantise the scales of blocks too, to 8 bits.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype, double_quant: bool) -> None:
        """Raises ImportError without bitsandbytes."""
        import bitsandbytes.functional

        self._library: Any = bitsandbytes.functional
        self.shape, self.dtype, self._double_quant = shape, dtype, double_quant
        self._state: Any = None

    @property
    def packed_shape(self) -> tuple[int, int]:
        """The shape of the uint8 tensor with the packed weight."""
        return ((self.shape.numel() + 1) // 2, 1)

    def pack(self, weight: Tensor) -> Tensor:
        """Packs `[out, in]` of any float type to `packed_shape`; stores its scales in this object."""
        value = weight.to(self.dtype).contiguous()
        packed, self._state = self._library.quantize_4bit(
            value, blocksize=BLOCK, compress_statistics=self._double_quant, quant_type="nf4"
        )
        return packed

    def unpack(self, packed: Tensor) -> Tensor:
        """Unpacks `packed_shape` to a new `[out, in]`."""
        return self._library.dequantize_4bit(packed, self._state)

    def scales(self) -> list[Tensor]:
        """The tensors of scales of the packed weight; [] before `pack`."""
        if self._state is None:
            return []
        inner = self._state.state2
        return [self._state.absmax] if inner is None else [self._state.absmax, inner.absmax, self._state.offset]

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, self.unpack(weight))

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        return grad @ self.unpack(weight)

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        raise TypeError("a quantised weight has no gradient and cannot be trained; train adapters (lora)")
