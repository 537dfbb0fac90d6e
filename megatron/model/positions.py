"""Rotary and alibi position information, computed in fp32 from the batch's positions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

Rope = tuple[Tensor, Tensor]


def rope_tables(positions: Tensor, rotary_dim: int, base: float) -> Rope:
    """cos and sin `[seq, batch, 1, rotary_dim]` fp32 for positions `[batch, seq]` (half-rotation, arXiv 2104.09864)."""
    exponent = torch.arange(0, rotary_dim, 2, device=positions.device, dtype=torch.float32) / rotary_dim
    angles = positions.t().unsqueeze(-1).float() * base**-exponent
    angles = torch.cat([angles, angles], dim=-1).unsqueeze(2)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, rope: Rope) -> Tensor:
    """Rotate the first `rotary_dim` of `[seq, batch, heads, head_dim]` in fp32; the rest passes."""
    cos, sin = rope
    rotary_dim = cos.shape[-1]
    turning, passing = x[..., :rotary_dim].float(), x[..., rotary_dim:]
    first, second = turning.chunk(2, dim=-1)
    turned = turning * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned.to(x.dtype), passing], dim=-1)


def alibi_slopes(num_heads: int) -> list[float]:
    """One slope a head (arXiv 2108.12409; interpolated where heads are no power of two, as its authors' code)."""

    def powers(n: int) -> list[float]:
        start = 2.0 ** -(2.0 ** -(math.log2(n) - 3))
        return [start ** (i + 1) for i in range(n)]

    whole = 2 ** math.floor(math.log2(num_heads))
    return powers(whole) + powers(2 * whole)[0::2][: num_heads - whole]


def alibi_bias(
    seq: int,
    num_heads: int,
    first_head: int,
    local_heads: int,
    device: torch.device,
    positions: Tensor | None = None,
) -> Tensor:
    """slope * (key - query) with future keys masked, `[1, local_heads, seq, seq]` fp32.

    positions: of other queries than all of `seq`, `[batch, queries]`; then `[batch, local_heads, queries, seq]`.
    """
    slopes = torch.tensor(alibi_slopes(num_heads)[first_head : first_head + local_heads], device=device)
    keys = torch.arange(seq, device=device)
    queries = keys.unsqueeze(0) if positions is None else positions
    distance = (keys - queries.unsqueeze(2)).unsqueeze(1)
    return (slopes.view(-1, 1, 1) * distance.float()).masked_fill(distance > 0, float("-inf"))
