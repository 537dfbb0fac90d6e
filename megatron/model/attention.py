"""Self-attention: one function over all backends, and the layer around it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.model.positions import Rope, apply_rope
from megatron.mpu import Linear, ParallelGroups, seeded
from megatron.neox_arguments import ConfigError, NeoXArgs


class AttentionInputs(NamedTuple):
    """What every block's attention shares for one micro-batch, made once a stage.

    rope: tables of `positions.rope_tables`, None without rotary positions.
    mask: additive or boolean `[batch or 1, heads or 1, seq, seq]`; None means plainly causal.
    cu_seqlens: int32 `[batch * (seq + 1)]` document starts over the flattened batch, for the varlen kernel (CUDA only).
    """

    rope: Rope | None = None
    mask: Tensor | None = None
    cu_seqlens: Tensor | None = None


@dataclass(frozen=True)
class Backend:
    """An attention implementation, chosen once at start: SDPA kernels in order of preference."""

    name: str
    kernels: tuple[SDPBackend, ...]


def choose_backend(name: str, device: torch.device) -> Backend:
    """The kernels behind `attention_backend`; `auto` prefers cuDNN, then flash, on a GPU and torch's choice on a CPU.

    Raises ConfigError for a kernel that the device does not have.
    """
    single = {
        "math": SDPBackend.MATH,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
    }
    if name == "auto":
        if device.type == "cuda":
            order = (single["cudnn"], single["flash"], single["efficient"], single["math"])
            return Backend("cudnn, flash, efficient, math (in this order)", order)
        return Backend("torch's choice among flash and math", ())
    if device.type != "cuda" and name in ("efficient", "cudnn"):
        raise ConfigError([f"attention_backend: {name} needs a GPU; set attention_backend: auto, flash or math"])
    return Backend(name, (single[name],))


def document_mask(cu_seqlens: Tensor, seq: int) -> Tensor:
    """Causal attention within documents, boolean `[batch, 1, seq, seq]`, from `[batch, seq + 1]` starts."""
    steps = torch.arange(seq, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens, steps.int().expand(cu_seqlens.shape[0], -1).contiguous(), right=True)
    same = document.unsqueeze(2) == document.unsqueeze(1)
    return (same & (steps.unsqueeze(0) <= steps.unsqueeze(1))).unsqueeze(1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inputs: AttentionInputs,
    *,
    backend: Backend,
    dropout_p: float = 0.0,
    seed: int = 0,
) -> Tensor:
    """Causal attention, softmax(q k^T / sqrt(head_dim) + bias) v.

    q: `[seq, batch, heads, head_dim]`; k, v: `[seq, batch, kv_heads, head_dim]`; returns q's shape.
    Dropout of the probabilities is a function of `seed` alone.
    """
    if inputs.cu_seqlens is not None:
        return _attend_varlen(q, k, v, inputs.cu_seqlens)
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    grouped = k.shape[1] != q.shape[1]
    mask = None if inputs.mask is None else inputs.mask.to(q.dtype) if inputs.mask.is_floating_point() else inputs.mask

    sdpa = partial(
        F.scaled_dot_product_attention,
        q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=mask is None, enable_gqa=grouped,
    )  # fmt: skip
    with sdpa_kernel(list(backend.kernels), set_priority=True) if backend.kernels else nullcontext():
        out = seeded(sdpa, seed, q.device) if dropout_p > 0.0 else sdpa()
    return out.permute(2, 0, 1, 3)


def _attend_varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    # Padding starts (equal to the row's end) are empty documents to the kernel, so shapes stay fixed without a sync.
    from torch.nn.attention.varlen import varlen_attn

    seq, batch, heads, head_dim = q.shape
    q, k, v = (x.transpose(0, 1).reshape(batch * seq, x.shape[2], head_dim) for x in (q, k, v))
    if k.shape[1] != heads:
        k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, seq, seq, window_size=(-1, 0))
    assert isinstance(out, Tensor)
    return out.view(batch, seq, heads, head_dim).transpose(0, 1)


class SelfAttention(nn.Module):
    """Multi-head or grouped-query attention over this rank's heads; `[seq, batch, hidden]` in and out.

    Parameters `query_key_value` (rows [q|k|v] per head for MHA, [Q|K|V] per rank for GQA) and `dense`.
    """

    def __init__(self, args: NeoXArgs, groups: ParallelGroups, backend: Backend) -> None:
        super().__init__()
        size = groups.size("tensor")
        self.heads, self.kv_heads = args.num_attention_heads // size, args.kv_heads // size
        self.head_dim = args.head_dim
        self.dropout_p = args.attention_dropout
        self.tensor_rank = groups.rank("tensor")
        self.backend = backend
        query, kv = args.num_attention_heads * args.head_dim, args.kv_heads * args.head_dim
        bias, sequence_parallel = args.use_bias_in_attn_linear, args.sequence_parallel
        self.query_key_value = Linear(
            args.hidden_size, query + 2 * kv, parallel="column", bias=bias, groups=groups,
            sequence_parallel=sequence_parallel,
        )  # fmt: skip
        self.dense = Linear(
            query, args.hidden_size, parallel="row", bias=bias, groups=groups, sequence_parallel=sequence_parallel
        )

    def _split(self, qkv: Tensor) -> Sequence[Tensor]:
        if self.kv_heads == self.heads:
            return qkv.unflatten(-1, (self.heads, 3 * self.head_dim)).chunk(3, dim=-1)
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        parts = qkv.split([query, kv, kv], dim=-1)
        return [part.unflatten(-1, (-1, self.head_dim)) for part in parts]

    def core(self, x: Tensor, inputs: AttentionInputs, seed: int) -> Tensor:
        """Everything before `dense`: `[seq, batch, local heads * head_dim]`."""
        q, k, v = self._split(self.query_key_value(x))
        if inputs.rope is not None:
            q, k = apply_rope(q, inputs.rope), apply_rope(k, inputs.rope)
        p = self.dropout_p if self.training else 0.0
        return attend(q, k, v, inputs, backend=self.backend, dropout_p=p, seed=seed + self.tensor_rank).flatten(2)
