"""A stand-in for flash-attn, by the docstrings of flash_attn/flash_attn_interface.py."""

from typing import Any

import torch
from torch import Tensor

from tests.stand_ins.attention import attend, each_text
from tests.stand_ins.signatures import bind


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

    return {
        "flash_attn": {
            "__version__": "2.8.3.post2",
            "flash_attn_func": flash_attn_func,
            "flash_attn_varlen_func": flash_attn_varlen_func,
        }
    }
