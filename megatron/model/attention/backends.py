"""The kernels of attention: what each can do, and how it is run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.model.attention.inputs import AttentionInputs
from megatron.model.cache import LayerCache
from megatron.mpu import seeded


@dataclass(frozen=True)
class Call:
    """One kind of call that a run makes, and all that decides whether a backend can do it.

    heads, kv_heads: of the whole model. queries, keys: tokens to try it with; where they are as many, its gradient is
    wanted too. bias: what is added to attention logits (`pos_emb`), None for nothing. dropout: of this run's training.
    masked, dropping, documents (their starts instead of a mask), windowed, compiled: what holds for these calls.
    """

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    queries: int
    keys: int
    bias: str | None = None
    dropout: float = 0.0
    masked: bool = False
    dropping: bool = False
    documents: bool = False
    windowed: bool = False
    compiled: bool = False


class Options(NamedTuple):
    """Of one call. cache: where queries attend to all of it, k and v included; else None. Others as of `attend`."""

    cache: LayerCache | None = None
    dropout_p: float = 0.0
    seed: int = 0
    scale: float | None = None


class Backend(Protocol):
    """One way to run attention. name: the `attention_backend` that asks for it."""

    @property
    def name(self) -> str: ...

    @property
    def needs_gpu(self) -> bool: ...

    def supports(self, call: Call) -> str | None:
        """Why it cannot do such calls, in words; None when it can."""

    def run(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs, options: Options) -> Tensor:
        """As `attend`."""


@dataclass(frozen=True)
class Sdpa:
    """A kernel of torch's scaled_dot_product_attention; on CPUs it runs documents one after another."""

    name: str
    kernel: SDPBackend
    needs_gpu: bool = False

    def supports(self, call: Call) -> str | None:
        why = _needs_mask(call)
        if call.device.type == "cuda":
            why = "a GPU would wait for the lengths of documents"
        elif call.windowed or call.compiled:
            why = why or "windows need a mask, and compiled code is made anew for each length of documents"
        return why if call.documents and why else tried(self, call)

    def run(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs, options: Options) -> Tensor:
        sdpa = partial(F.scaled_dot_product_attention, enable_gqa=k.shape[2] != q.shape[2], scale=options.scale)
        with sdpa_kernel(self.kernel):
            if inputs.cu_seqlens is not None:
                return _one_by_one(sdpa, q, k, v, inputs.cu_seqlens)
            q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
            mask = inputs.mask
            if mask is not None and mask.is_floating_point():
                mask = mask.to(q.dtype)
            if options.cache is not None:
                assert mask is not None
                outs = [
                    sdpa(q[n], keys, values, mask[n, ..., : keys.shape[2]]) for n, keys, values in options.cache.read()
                ]
                out = outs[0] if len(outs) == 1 else torch.cat(outs)
            else:
                sdpa = partial(sdpa, q, k, v, attn_mask=mask, dropout_p=options.dropout_p, is_causal=mask is None)
                out = seeded(sdpa, options.seed, q.device) if options.dropout_p > 0.0 else sdpa()
        return out.permute(2, 0, 1, 3)


@dataclass(frozen=True)
class Varlen:
    """Flash attention over documents, windows too, without a mask."""

    name: str = "flash"
    needs_gpu: bool = True

    def supports(self, call: Call) -> str | None:
        if not call.documents:
            return "it is for documents and windows"
        return _needs_mask(call) or ("it has 16 bits" if call.dtype == torch.float32 else None)

    def run(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs, options: Options) -> Tensor:
        # Padding starts (equal to the row's end) are empty documents to it, so shapes stay fixed without a sync.
        from torch.nn.attention.varlen import varlen_attn

        seq, batch, heads, head_dim = q.shape
        q, k, v = (x.transpose(0, 1).reshape(batch * seq, x.shape[2], head_dim) for x in (q, k, v))
        if k.shape[1] != heads:
            k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
        starts, window = inputs.cu_seqlens, (inputs.window, 0)
        assert starts is not None
        out = varlen_attn(q, k, v, starts, starts, seq, seq, window_size=window, scale=options.scale)
        assert isinstance(out, Tensor)
        return out.view(batch, seq, heads, head_dim).transpose(0, 1)


def _needs_mask(call: Call) -> str | None:
    return "biases and dropout need a mask" if call.bias or call.dropout > 0.0 else None


def _one_by_one(sdpa: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    seq, batch, heads, head_dim = q.shape
    lengths = [length for length in cu_seqlens.diff().tolist() if length > 0]
    rows = (x.transpose(0, 1).reshape(batch * seq, -1, head_dim) for x in (q, k, v))
    flat = ([one.transpose(0, 1).unsqueeze(0) for one in x.split(lengths)] for x in rows)
    outs = [sdpa(q, k, v, is_causal=True) for q, k, v in zip(*flat, strict=True)]
    return torch.cat([out.squeeze(0).transpose(0, 1) for out in outs]).view(batch, seq, heads, head_dim).transpose(0, 1)


def tried(backend: Backend, call: Call) -> str | None:
    """Why a tiny call fails (and its gradient, for a whole text); None when it works."""
    kv_heads = min(call.kv_heads, 2)
    heads, training = kv_heads * call.heads // call.kv_heads, call.queries == call.keys

    def zeros(seq: int, heads: int) -> Tensor:
        shape = (seq, 2, heads, call.head_dim)
        return torch.zeros(shape, device=call.device, dtype=call.dtype, requires_grad=training)

    mask = None
    if call.masked:
        # Masks over a cache are added, see `Stage`.
        dtype = torch.bool if training and call.bias is None else call.dtype
        shape = (2, heads if call.bias else 1, call.queries, call.keys)
        mask = torch.ones(shape, device=call.device, dtype=dtype, requires_grad=call.bias == "rpe" and training)
    q, k, v = zeros(call.queries, heads), zeros(call.keys, kv_heads), zeros(call.keys, kv_heads)
    with warnings.catch_warnings(record=True) as said, torch.set_grad_enabled(training):
        warnings.simplefilter("always")
        try:
            options = Options(dropout_p=call.dropout if call.dropping else 0.0)
            out = backend.run(q, k, v, AttentionInputs(mask=mask), options)
            if training:
                out.sum().backward()
                if mask is not None and mask.requires_grad and mask.grad is None:
                    return "it gives no gradient to biases"
            if call.device.type == "cuda":
                torch.cuda.synchronize(call.device)
        except RuntimeError as problem:
            # torch warns of its reasons, kernel by kernel; those of the others are that they were switched off.
            texts = [str(warning.message).split(" (Triggered")[0] for warning in said]
            reasons = [text for text in texts if "not used because" not in text and "disabled" not in text]
            return " ".join(reasons).rstrip(".") or str(problem).splitlines()[0]
    return None
