"""A stand-in for flash-attn, by the docstrings of its flash_attn_interface.py."""

from typing import Any

import torch
from torch import Tensor

from tests.stand_ins.signatures import bind


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, left: int | None, right: int | None, dropout_p: float = 0.0
) -> Tensor:
    """q: `[queries, heads, head_dim]`; k, v: `[keys, kv_heads, head_dim]`. Query i sees the keys from
    i + keys - queries - left to i + keys - queries + right; None: to the end."""
    queries, keys = q.shape[0], k.shape[0]
    q, k, v = q.double(), *(x.double().repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    places = torch.arange(keys) - torch.arange(queries).unsqueeze(1) - (keys - queries)
    hidden = torch.zeros(queries, keys, dtype=torch.bool)
    if left is not None:
        hidden |= places < -left
    if right is not None:
        hidden |= places > right
    shares = logits.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", torch.nn.functional.dropout(shares, dropout_p), v)


def each_text(cu_seqlens: Tensor, longest: int) -> list[tuple[int, int]]:
    """(first token, end) of the texts, which `cu_seqlens` must be as the kernels want it."""
    assert cu_seqlens.dtype == torch.int32 and cu_seqlens.is_contiguous()
    ends: list[int] = cu_seqlens.tolist()
    texts = list(zip(ends, ends[1:], strict=False))
    assert type(longest) is int and all(0 <= end - start <= longest for start, end in texts)
    return texts


def modules(any_dtype: bool = True, calls: list[dict[str, Any]] | None = None) -> dict[str, dict[str, Any]]:
    """any_dtype: fp32 is taken too, which the kernels refuse. calls: takes the arguments of every call."""

    def flash_attn_func(*args: Any, **kwargs: Any) -> Tensor:
        call = bind("flash_attn", "flash_attn_func", args, kwargs)
        assert call["q"].dim() == 4, "[batch, seq, heads, head_dim]"
        return torch.stack([_run(call, *row) for row in zip(call["q"], call["k"], call["v"], strict=True)])

    def flash_attn_varlen_func(*args: Any, **kwargs: Any) -> Tensor:
        call = bind("flash_attn", "flash_attn_varlen_func", args, kwargs)
        assert call["q"].dim() == 3, "[tokens, heads, head_dim]"
        queries = each_text(call["cu_seqlens_q"], call["max_seqlen_q"])
        keys = each_text(call["cu_seqlens_k"], call["max_seqlen_k"])
        pairs = zip(queries, keys, strict=True)
        outs = [_run(call, call["q"][a:b], call["k"][c:d], call["v"][c:d]) for (a, b), (c, d) in pairs if b > a]
        return torch.cat(outs)

    def _run(call: dict[str, Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not any_dtype and q.dtype not in (torch.float16, torch.bfloat16):
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        assert call["softcap"] == 0.0 and call["alibi_slopes"] is None and not call["return_attn_probs"]
        if calls is not None:
            calls.append(call)
        left, right = (None if width < 0 else width for width in call["window_size"])
        right = 0 if call["causal"] else right
        return attend(q, k, v, call["softmax_scale"], left, right, call["dropout_p"]).to(q.dtype)

    functions = {"flash_attn_func": flash_attn_func, "flash_attn_varlen_func": flash_attn_varlen_func}
    return {"flash_attn": {"__version__": "2.8.3.post2", **functions}}
