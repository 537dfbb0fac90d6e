"""Implements AdamW for one tensor as a Triton kernel that reads every operand once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _mix(x):
    """Mixes 32 bits one-to-one, as `stochastic_rounding._mix` does."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def _rounded(x, noise):
    """Rounds x stochastically to a bf16 value, kept in fp32, as `stochastic_rounding.rounded` does."""
    return ((x.to(tl.uint32, bitcast=True) + noise) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def _kernel(
    master, gradient, average, square, weight, corrections, scale, skip, keys, start, size, rate, decay, rest1, beta2,
    rest2, eps, WRITES_WEIGHT: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(skip) != 0:
        return
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_bounds = places < size
    g = tl.load(gradient + places, mask=in_bounds).to(tl.float32) / tl.load(scale)
    p = tl.load(master + places, mask=in_bounds)
    m = tl.load(average + places, mask=in_bounds).to(tl.float32)
    v = tl.load(square + places, mask=in_bounds).to(tl.float32)
    p -= rate * decay * p
    m += rest1 * (g - m)
    v = beta2 * v + rest2 * g * g
    p -= rate / tl.load(corrections) * m / (tl.sqrt(v) / tl.load(corrections + 1) + eps)
    tl.store(master + places, p, mask=in_bounds)
    if WRITES_WEIGHT:
        tl.store(weight + places, p.to(weight.dtype.element_ty), mask=in_bounds)
    if ROUNDS:
        element = places + start
        low, high = element.to(tl.uint32), (element >> 32).to(tl.uint32)
        key0, key1 = tl.load(keys).to(tl.uint32), tl.load(keys + 1).to(tl.uint32)
        noise = _mix(_mix(low ^ key0) ^ high ^ key1)
        m = _rounded(m, noise & 0xFFFF)
        v = _rounded(v, noise >> 16)
    tl.store(average + places, m.to(average.dtype.element_ty), mask=in_bounds)
    tl.store(square + places, v.to(square.dtype.element_ty), mask=in_bounds)


def update(
    master: Tensor, gradient: Tensor, average: Tensor, square: Tensor, weight: Tensor | None, corrections: Tensor,
    scale: Tensor, skip: Tensor, keys: Tensor | None, start: int, rate: float, decay: float, beta1: float,
    beta2: float, eps: float,
) -> None:  # fmt: skip
    """Take one step of AdamW on one tensor, in place, with arithmetic in fp32.

    It changes `master` (the fp32 master weight), `average` and `square` (the moments). `weight` gets the new
    master weight in its own dtype. Nothing changes if `skip` is not 0. All tensors must be contiguous.

    gradient: is divided by `scale` first. corrections `[2]` fp32: 1 - beta1^step, and the root of
    1 - beta2^step. keys `[2]` int64: from `step_keys`, for bf16 moments; None: moments are fp32. start: index
    of the first element in the full parameter.
    """
    size = master.numel()
    with torch.cuda.device(master.device):
        _kernel[(triton.cdiv(size, BLOCK),)](
            master, gradient, average, square, master if weight is None else weight, corrections, scale, skip,
            corrections if keys is None else keys, start, size, rate, decay,
            1 - beta1, beta2, 1 - beta2, eps,  # computed here, because 1 - beta would lose digits in fp32
            WRITES_WEIGHT=weight is not None, ROUNDS=keys is not None, BLOCK=BLOCK,
        )  # fmt: skip
