"""The attention backends: one class per kernel, which says what the kernel supports, and runs it."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.model.attention.inputs import AttentionInputs, KeyRuns
from megatron.model.attention.masks import block_mask
from megatron.model.attention.seeded_attention import VARLEN, efficient_varlen, seeded_attention
from megatron.model.cache import LayerCache
from megatron.model.specs import AttentionSpec
from megatron.mpu import seed_tensor
from megatron.mpu.gpu_kernels import Capability, not_run_on
from megatron.mpu.torch_versions import varlen_attn

_QUERIES_AT_ONCE = 512  # of a context rank, on CPUs


@dataclass(frozen=True)
class AttentionCall:
    """A kind of attention call, with everything that decides whether a backend supports it.

    queries, keys: numbers of tokens of the trial call. If they are equal, its gradient is tried too.
    masked: a mask is given.
    dropping: attention probabilities have dropout.
    documents: document boundaries (and the layer's window, if any) are given instead of a mask.
    contexts: the branches of trees, which share contexts, are given instead of a mask.
    compiled: torch compiles the code around the call.
    """

    spec: AttentionSpec
    device: torch.device
    dtype: torch.dtype
    queries: int
    keys: int
    masked: bool = False
    dropping: bool = False
    documents: bool = False
    contexts: bool = False
    compiled: bool = False


class AttentionOptions(NamedTuple):
    """The options of one attention call.

    cache: keys and values of earlier tokens. `AttentionBackends.attend` first writes the new ones to it. If
        `AttentionInputs.columns` is set, queries attend to all keys in the cache that the mask allows.
    dropout_p: dropout of attention probabilities.
    seed: the dropout mask is a function of it alone; None: no dropout.
    scale: factor of the logits; None: 1 / sqrt(head_dim).
    softcap: c; logits x become c tanh(x / c) before masks are added. None: no cap.
    sinks: `[heads]`, an additional logit in each query's softmax, with no value. None: no sinks.
    """

    cache: LayerCache | None = None
    dropout_p: float = 0.0
    seed: Tensor | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True)
class AttentionBackend:
    """One way to compute attention. A new backend is a subclass in this folder, and an entry of
    `ATTENTION_BACKENDS`.

    name: the value of `attention_backend` that chooses it.
    needs_gpu: it runs only on GPUs.
    opt_in: `auto` never chooses it.
    plans_shapes: its first call with each new shape is slow.
    mixes_widths: it supports values narrower or wider than keys; for others, the narrower are padded.
    caps_logits: it supports `AttentionOptions.softcap`.
    has_sinks: it supports `AttentionOptions.sinks`.
    takes_runs: with cu_seqlens it also supports context parallelism (`AttentionInputs.runs`).
    form: the field of `AttentionInputs` that tells it the visible keys of documents, windows and trees.
    """

    name: str
    needs_gpu: ClassVar[bool] = False
    opt_in: ClassVar[bool] = False
    plans_shapes: ClassVar[bool] = False
    mixes_widths: ClassVar[bool] = False
    caps_logits: ClassVar[bool] = False
    has_sinks: ClassVar[bool] = False
    takes_runs: ClassVar[bool] = False
    form: ClassVar[Literal["cu_seqlens", "blocks"]] = "cu_seqlens"

    def missing(self) -> str | None:
        """Returns the package that must be installed for this backend, as text after "needs"; None if nothing
        is missing."""
        return None

    def unasked(self, call: AttentionCall, capability: Capability | None) -> str | None:
        """Returns why `auto` should not choose this backend for such calls; None if it may.

        Reasons are that the backend was not tested on such a GPU, or is slow. It also applies when a named
        backend does not support a call and a replacement is chosen.

        capability: compute capability of the GPU; None on a CPU.
        """
        return not_run_on(f"attention_backend: {self.name}", capability)

    def handles(self, call: AttentionCall) -> bool:
        """Whether the backend is meant for such calls. This runs no call; `supports` does."""
        return not call.contexts

    def run(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs, options: AttentionOptions) -> Tensor:
        """Computes causal attention, softmax(q k^T * scale + mask) v. If there is a cache, it already holds k
        and v.

        q: `[seq, batch, heads, head_dim]`; k, v: `[seq, batch, kv_heads, head_dim]`, or with `inputs.runs`
            `[keys, 1, kv_heads, head_dim]`. Returns the shape of q.
        """
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs, options: AttentionOptions) -> Tensor:
        """Calls `run`; pads queries and keys or values with zeros if the kernel needs equal widths.

        Arguments are those of `run`. Returns `[seq, batch, heads, width of values]`. `options.scale` must be
        set if widths differ.
        """
        keys, values = k.shape[-1], v.shape[-1]
        if keys == values or (self.mixes_widths and options.dropout_p == 0.0):
            return self.run(q, k, v, inputs, options)
        return self.run(*equal_widths(q, k, v), inputs, options)[..., :values]

    def supports(self, call: AttentionCall) -> str | None:
        """Runs a tiny call of this kind; returns None if it works, else the reason as text about "it".

        For calls of training it also runs the backward pass.
        """
        spec, training = call.spec, call.queries == call.keys
        if spec.softcap is not None and not self.caps_logits:
            return "it does not support attn_logit_softcapping"
        if spec.sinks and not self.has_sinks:
            return "it does not support attention_sinks"
        kv_heads = min(spec.kv_heads, 2)
        heads = kv_heads * spec.heads // spec.kv_heads
        shapes = (call.queries, 2, heads), (call.keys, 2, kv_heads), (call.keys, 2, kv_heads)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, device=call.device, dtype=call.dtype, requires_grad=training)

        mask = None
        if call.masked:
            mask = zeros(2, heads if spec.biased else 1, call.queries, call.keys)
            if training and spec.relative is None:  # masks over a cache are additive, see `cached_inputs`
                mask = mask.detach() if spec.biased else mask == 0
        widths = (spec.head_dim, spec.head_dim, spec.value_dim)
        q, k, v = (zeros(*shape, width) for shape, width in zip(shapes, widths, strict=True))
        inputs = AttentionInputs(mask=mask)
        if self.form == "blocks" and mask is None:
            ids = torch.zeros(2, call.queries, dtype=torch.int32, device=call.device)
            branches = {"branch_ids": ids, "context_ids": ids} if call.contexts else {}
            branches |= {"branch_ids": ids} if call.documents else {}
            inputs = AttentionInputs(blocks=block_mask(call.queries, call.device, spec.window, **branches))
        elif call.documents:
            starts = torch.arange(3, device=call.device, dtype=torch.int32) * call.queries
            longest, window = torch.empty(call.queries, 0), -1 if spec.window is None else spec.window
            inputs = AttentionInputs(cu_seqlens=starts, longest=longest, window=window)
        with warnings.catch_warnings(record=True) as caught_warnings, torch.set_grad_enabled(training):
            warnings.simplefilter("always")
            try:
                p = spec.dropout if call.dropping else 0.0
                sinks = zeros(heads) if spec.sinks else None
                options = AttentionOptions(None, p, seed_tensor(0), spec.scale, spec.softcap, sinks)
                out = self.attend(q, k, v, inputs, options)
                if training:
                    out.sum().backward()
                    if mask is not None and mask.requires_grad and mask.grad is None:
                        return "it computes no gradient of position biases"
                if call.device.type == "cuda":
                    torch.cuda.synchronize(call.device)
            except RuntimeError as problem:
                # torch gives its reasons as warnings, one per kernel. Warnings about kernels that were
                # switched off are left out.
                texts = [str(warning.message).split(" (Triggered")[0] for warning in caught_warnings]
                reasons = [text for text in texts if "not used because" not in text and "disabled" not in text]
                return " ".join(reasons).rstrip(".") or str(problem).splitlines()[0]
        return None


class Sdpa(AttentionBackend):
    """One kernel of torch's `scaled_dot_product_attention`. On CPUs it runs packed documents one after
    another."""

    takes_runs = True
    kernel: ClassVar[SDPBackend]

    def supports(self, call: AttentionCall) -> str | None:
        if call.documents and call.device.type == "cuda":
            return "without a mask, the GPU would wait while the host reads the document lengths"
        if call.documents and (call.compiled or call.spec.window is not None):
            return "without a mask, it has no windows, and compiled code would recompile for every document length"
        if call.documents and (call.spec.biased or call.spec.dropout > 0.0):
            return "with packed documents, it needs a mask for position biases and dropout"
        return super().supports(call)

    def run(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs, options: AttentionOptions) -> Tensor:
        sdpa: Callable[..., Tensor] = F.scaled_dot_product_attention
        if options.softcap is not None or options.sinks is not None:
            sdpa = partial(_attention_by_formula, softcap=options.softcap, sinks=options.sinks)
        sdpa = partial(sdpa, enable_gqa=k.shape[2] != q.shape[2], scale=options.scale)
        mask, p = inputs.mask, options.dropout_p
        if mask is not None and mask.is_floating_point():
            mask = mask.to(q.dtype)
        if p > 0.0 and options.seed is not None:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
            return seeded_attention(q, k, v, mask, options.seed, p, options.scale, self.kernel.name).transpose(0, 1)
        with sdpa_kernel(self.kernel):
            if inputs.cu_seqlens is not None and inputs.runs is not None:
                return _run_by_run(sdpa, q, k, v, inputs.cu_seqlens, inputs.runs)
            if inputs.cu_seqlens is not None:
                return _one_by_one(sdpa, q, k, v, inputs.cu_seqlens)
            q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
            if options.cache is not None and inputs.columns is not None:
                assert mask is not None, "attention over a cache needs a mask; without one all of the cache is visible"
                parts = options.cache.read()
                outs = [sdpa(q[rows], k, v, mask[rows, ..., : k.shape[2]]) for rows, k, v in parts]
                out = outs[0] if len(outs) == 1 else torch.cat(outs)
            else:
                out = sdpa(q, k, v, attn_mask=mask, is_causal=mask is None)
        return out.permute(2, 0, 1, 3)


class Cudnn(Sdpa):
    needs_gpu, plans_shapes, mixes_widths, kernel = True, True, True, SDPBackend.CUDNN_ATTENTION


class Flash(Sdpa):
    kernel = SDPBackend.FLASH_ATTENTION


class Efficient(Sdpa):
    needs_gpu, mixes_widths, kernel = True, True, SDPBackend.EFFICIENT_ATTENTION


class Math(Sdpa):
    mixes_widths, caps_logits, has_sinks, kernel = True, True, True, SDPBackend.MATH


class Varlen(AttentionBackend):
    """torch's flash attention over documents of different lengths (`varlen_attn`), without a mask; also with
    windows."""

    needs_gpu, takes_runs = True, True

    def handles(self, call: AttentionCall) -> bool:
        return call.documents

    def supports(self, call: AttentionCall) -> str | None:
        if call.spec.biased or call.spec.dropout > 0.0:
            return "it supports neither position biases nor dropout"
        return "it supports only 16-bit dtypes" if call.dtype == torch.float32 else super().supports(call)

    def run(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs, options: AttentionOptions) -> Tensor:
        shape, starts, longest, runs = q.transpose(0, 1).shape, inputs.cu_seqlens, inputs.longest, inputs.runs
        assert starts is not None and longest is not None
        key_starts, longest_keys = (starts, longest) if runs is None else (runs.starts, runs.longest)
        q, k, v = (rows_in_one(x) for x in (q, k, v))
        lengths, window = (longest.shape[0], longest_keys.shape[0]), (inputs.window, 0)
        out = varlen_attn(q, k, v, (starts, key_starts), lengths, window, options.scale)
        return out.view(shape).transpose(0, 1)


class EfficientVarlen(AttentionBackend):
    """torch's memory-efficient attention over documents of different lengths, without a mask; with windows,
    dropout and fp32.

    It is the kernel that `scaled_dot_product_attention` uses for jagged tensors.
    """

    needs_gpu = True

    def handles(self, call: AttentionCall) -> bool:
        return call.documents

    def supports(self, call: AttentionCall) -> str | None:
        return "it supports no position biases" if call.spec.biased else super().supports(call)

    def run(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs, options: AttentionOptions) -> Tensor:
        shape, starts, longest = q.transpose(0, 1).shape, inputs.cu_seqlens, inputs.longest
        assert starts is not None and longest is not None
        rows = [rows_in_one(x).unsqueeze(0) for x in (q, k, v)]
        q, k, v = (x.repeat_interleave(shape[2] // x.shape[2], dim=2) for x in rows)
        p, seed, max_seqlen = options.dropout_p, options.seed, longest.shape[0]
        if p > 0.0 and seed is not None:
            out = seeded_attention(q, k, v, None, seed, p, options.scale, VARLEN, starts, max_seqlen, inputs.window)
        else:
            out = efficient_varlen(q, k, v, starts, max_seqlen, inputs.window, 0.0, options.scale)
        return out.view(shape).transpose(0, 1)


def _attention_by_formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Computes attention like `scaled_dot_product_attention`, but also with softcap and sinks.

    It computes in fp32 from the logits on, and holds all logits in memory.

    softcap: c; logits x become c tanh(x / c); None: no cap.
    sinks: `[heads]`, an additional logit in each query's softmax; None: no sinks.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = (q @ k.transpose(-2, -1)).float() * (scale if softcap is None else scale / softcap)
    if softcap is not None:
        logits = softcap * torch.tanh(logits)
    if is_causal:
        attn_mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        logits = logits.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        logits = logits + attn_mask
    if sinks is None:
        return logits.softmax(-1).to(q.dtype) @ v
    logits = torch.cat([logits, sinks.float().view(-1, 1, 1).expand(*logits.shape[:-1], 1)], -1)
    return logits.softmax(-1)[..., :-1].to(q.dtype) @ v


def equal_widths(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries, keys and values `[.., width]` padded with zeros to the width of the widest."""
    width = max(k.shape[-1], v.shape[-1])
    q, k, v = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    return q, k, v


def rows_in_one(x: Tensor) -> Tensor:
    """Returns the tokens of all rows one after another: `[seq, batch, heads, head_dim]` to `[batch * seq,
    heads, head_dim]`."""
    return x.transpose(0, 1).flatten(0, 1)


def _run_by_run(
    sdpa: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, runs: KeyRuns
) -> Tensor:
    """Computes causal attention of each run of queries over its keys, in blocks of queries.

    A block's mask is the only tensor with a size for each query and key.

    cu_seqlens: `[n]` int32, starts of runs in the flattened batch, then its end.
    """
    queries, keys, values = (rows_in_one(x) for x in (q, k, v))
    outs = []
    for start, end, key_start, key_end in zip(
        *(edges[i : len(edges) - 1 + i] for edges in (cu_seqlens.tolist(), runs.starts.tolist()) for i in (0, 1)),
        strict=True,
    ):
        offset = key_end - key_start - (end - start)  # keys before the run
        for begin in range(start, end, _QUERIES_AT_ONCE):
            stop = min(begin + _QUERIES_AT_ONCE, end)
            count = stop - start + offset
            mask = torch.ones(stop - begin, count, dtype=torch.bool, device=q.device).tril(count - (stop - begin))
            parts = queries[begin:stop], keys[key_start : key_start + count], values[key_start : key_start + count]
            block = (part.transpose(0, 1).unsqueeze(0) for part in parts)
            outs.append(sdpa(*block, attn_mask=mask).squeeze(0).transpose(0, 1))
    return torch.cat(outs).unflatten(0, q.transpose(0, 1).shape[:2]).transpose(0, 1)


def _one_by_one(sdpa: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Computes causal attention within each document, by one call of `sdpa` per document.

    cu_seqlens: `[n]` int32, starts of documents in the flattened batch, then its end.
    """
    lengths = [length for length in cu_seqlens.diff().tolist() if length > 0]
    texts = ([document.transpose(0, 1).unsqueeze(0) for document in rows_in_one(x).split(lengths)] for x in (q, k, v))
    outs = [sdpa(*text, is_causal=True).squeeze(0).transpose(0, 1) for text in zip(*texts, strict=True)]
    return torch.cat(outs).unflatten(0, q.transpose(0, 1).shape[:2]).transpose(0, 1)
