"""Products of linears and experts whose weights are rounded to a 4-bit format in every forward pass.

They are for quantisation-aware training (arXiv 1712.05877): outputs and input gradients come from the rounded
weight. The gradient of the rounded weight is taken as that of the weight itself (straight-through, arXiv
1308.3432). The formats are MXFP4 (OCP MX 1.0) and NVFP4 (arXiv 2509.25149), for weights only.
"""

from typing import Literal

import torch
from torch import Tensor

from megatron.mpu.grouped import PlainGroupedProduct
from megatron.mpu.products import PlainProduct

Format = Literal["mxfp4", "nvfp4"]
BLOCKS: dict[Format, int] = {"mxfp4": 32, "nvfp4": 16}
"""Number of consecutive elements of a row that share a scale."""
_E2M1_MAX, _E4M3_MAX, _E4M3_MIN = 6.0, 448.0, 2.0**-9


def fake_quantize(weight: Tensor, name: Format) -> Tensor:
    """Returns a weight `[..., out, in]` rounded to a format and back, in its dtype; rounding is in fp32.

    mxfp4: the scale of a block is 2^(floor(log2(amax)) - 2), as OCP MX 1.0 (6.3) suggests.
    nvfp4: the scale of a matrix is 6 x 448 / amax; fused projections share it, as in llm-compressor.
        The scale of a block is amax / 6 in E4M3.
    Numbers are rounded to the nearest of E2M1, ties to even, and saturate at 6. `in` must be a multiple of
    the block.
    """
    blocks = weight.float().unflatten(-1, (-1, BLOCKS[name]))
    amax = blocks.abs().amax(-1, keepdim=True)
    if name == "mxfp4":
        # The exponent of the fp32 number, minus that of 6. Blocks of zeros have the smallest scale.
        scale = ((amax.view(torch.int32) >> 23) - 127 - 2).clamp(min=-126).float().exp2()
    else:
        largest = amax.amax(dim=(-3, -2), keepdim=True)
        global_scale = _E2M1_MAX * _E4M3_MAX / torch.where(largest > 0, largest, 1.0)
        scale = (amax / _E2M1_MAX * global_scale).clamp(_E4M3_MIN, _E4M3_MAX).to(
            torch.float8_e4m3fn
        ).float() / global_scale
    return (rounded_to_e2m1(blocks / scale) * scale).flatten(-2).to(weight.dtype)


def rounded_to_e2m1(x: Tensor) -> Tensor:
    """Returns fp32 numbers rounded to the nearest of E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return ((x / step).round() * step).clamp(-_E2M1_MAX, _E2M1_MAX)


class FakeQuantizedProduct:
    """The matrix products of a linear layer (`Product`) with its weight rounded by `fake_quantize`."""

    def __init__(self, name: Format) -> None:
        self.name: Format = name

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        return PlainProduct().output(x, fake_quantize(weight, self.name))

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        return PlainProduct().input_gradient(grad, fake_quantize(weight, self.name))

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        return PlainProduct().weight_gradient(grad, x)


class FakeQuantizedGroupedProduct:
    """The products of stacked experts (`GroupedProduct`) with each matrix rounded by `fake_quantize`."""

    def __init__(self, name: Format) -> None:
        self.name: Format = name

    def output(self, x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        return PlainGroupedProduct().output(x, self._rounded(weights), ends)

    def input_gradient(self, grad: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        return PlainGroupedProduct().input_gradient(grad, self._rounded(weights), ends)

    def weight_gradient(self, x: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
        return PlainGroupedProduct().weight_gradient(x, grad, ends)

    def _rounded(self, weights: Tensor) -> Tensor:
        return fake_quantize(weights.transpose(1, 2), self.name).transpose(1, 2)
