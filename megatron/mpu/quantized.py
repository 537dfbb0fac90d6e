"""Weights of linear layers in 4-bit NormalFloat (QLoRA, arXiv 2305.14314), packed and unpacked by
bitsandbytes."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64
"""Number of consecutive elements of the flattened weight that share a scale (bitsandbytes' default). If the
row length is not a multiple of it, a block continues in the next row."""


class QuantizedProduct:
    """The matrix products (`Product`) of a linear layer whose weight is packed to 4 bits and is not trained.

    Each product unpacks the weight again, so no unpacked weight is saved for backward. This object holds the
    scales.

    shape: `[out, in]` of this tensor rank's part of the weight.
    dtype: of the unpacked weight.
    double_quant: also quantise the scales of blocks, to 8 bits.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype, double_quant: bool) -> None:
        """Raises ImportError if bitsandbytes is not installed."""
        import bitsandbytes.functional

        self._library: Any = bitsandbytes.functional
        self.shape, self.dtype, self._double_quant = shape, dtype, double_quant
        self._state: Any = None

    @property
    def packed_shape(self) -> tuple[int, int]:
        """The shape of the uint8 tensor that holds the packed weight: two 4-bit elements per byte."""
        return ((self.shape.numel() + 1) // 2, 1)

    def pack(self, weight: Tensor) -> Tensor:
        """Returns `weight` `[out, in]`, of any float dtype, packed to `packed_shape`; stores its scales in
        this object."""
        value = weight.to(self.dtype).contiguous()
        packed, self._state = self._library.quantize_4bit(
            value, blocksize=BLOCK, compress_statistics=self._double_quant, quant_type="nf4"
        )
        return packed

    def unpack(self, packed: Tensor) -> Tensor:
        """Returns the packed weight as a new `[out, in]` tensor in `dtype`."""
        return self._library.dequantize_4bit(packed, self._state)

    def scales(self) -> list[Tensor]:
        """Returns the tensors that hold the scales of the packed weight; [] before `pack`."""
        if self._state is None:
            return []
        inner = self._state.state2
        return [self._state.absmax] if inner is None else [self._state.absmax, inner.absmax, self._state.offset]

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, self.unpack(weight))

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        return grad @ self.unpack(weight)

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        raise TypeError(
            "a weight quantised to 4 bits has no gradient and cannot be trained; train LoRA adapters instead"
        )
