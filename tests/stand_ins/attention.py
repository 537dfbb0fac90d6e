"""Attention by its definition, for the stand-ins: one text at a time, every probability in memory."""

import torch
from torch import Tensor


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, left: int | None, right: int | None, dropout_p: float = 0.0
) -> Tensor:
    """q: `[queries, heads, head_dim]`; k, v: `[keys, kv_heads, head_dim]`. Query i sees the keys from
    i + keys - queries - left to i + keys - queries + right; None: to the end."""
    queries, keys = q.shape[0], k.shape[0]
    q, k, v = (x.double() for x in (q, k.repeat_interleave(q.shape[1] // k.shape[1], dim=1), _same_heads(v, q)))
    logits = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    places = torch.arange(keys) - torch.arange(queries).unsqueeze(1) - (keys - queries)
    hidden = torch.zeros(queries, keys, dtype=torch.bool)
    if left is not None:
        hidden |= places < -left
    if right is not None:
        hidden |= places > right
    shares = logits.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", torch.nn.functional.dropout(shares, dropout_p), v)


def _same_heads(v: Tensor, q: Tensor) -> Tensor:
    return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


def each_text(cu_seqlens: Tensor, longest: int) -> list[tuple[int, int]]:
    """(first token, end) of the texts, which `cu_seqlens` must be as the kernels want it."""
    assert cu_seqlens.dtype == torch.int32 and cu_seqlens.is_contiguous()
    ends: list[int] = cu_seqlens.tolist()
    texts = list(zip(ends, ends[1:], strict=False))
    assert type(longest) is int and all(0 <= end - start <= longest for start, end in texts)
    return texts
