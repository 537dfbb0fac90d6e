"""A kernel of Triton that updates one tensor by AdamW: every operand is met in memory once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _kernel(
    master, gradient, average, square, weight, corrections, scale, skip, size, rate, decay, rest1, beta2, rest2, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(skip) != 0:
        return
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    g = tl.load(gradient + places, mask=inside).to(tl.float32) / tl.load(scale)
    p = tl.load(master + places, mask=inside)
    m = tl.load(average + places, mask=inside)
    v = tl.load(square + places, mask=inside)
    p -= rate * decay * p
    m += rest1 * (g - m)
    v = beta2 * v + rest2 * g * g
    p -= rate / tl.load(corrections) * m / (tl.sqrt(v) / tl.load(corrections + 1) + eps)
    tl.store(master + places, p, mask=inside)
    tl.store(average + places, m, mask=inside)
    tl.store(square + places, v, mask=inside)
    tl.store(weight + places, p.to(weight.dtype.element_ty), mask=inside)


def update(
    master: Tensor, gradient: Tensor, average: Tensor, square: Tensor, weight: Tensor, corrections: Tensor,
    scale: Tensor, skip: Tensor, rate: float, decay: float, beta1: float, beta2: float, eps: float,
) -> None:  # fmt: skip
    """One step of AdamW in place, in fp32: master, average and square; `weight` is the new master in its own
    dtype. Nothing changes where `skip` is not 0.

    gradient: divided by `scale` first. corrections `[2]` fp32: 1 - beta1^step, and the root of
    1 - beta2^step. All tensors are contiguous.
    """
    size = master.numel()
    with torch.cuda.device(master.device):
        _kernel[(triton.cdiv(size, BLOCK),)](
            master, gradient, average, square, weight, corrections, scale, skip, size, rate, decay,
            1 - beta1, beta2, 1 - beta2, eps,  # in fp32 what is near 1 would lose digits
            BLOCK=BLOCK,
        )  # fmt: skip
