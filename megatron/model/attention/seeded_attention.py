"""Attention whose dropout mask depends only on a given seed. In compiled code it is one custom operator."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.mpu import fork_seed

VARLEN = "EFFICIENT_VARLEN"
_CAUSAL = 1  # the kernel's code for a causal mask


def seeded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    seed: Tensor,
    p: float,
    scale: float | None,
    kernel: str,
    starts: Tensor | None = None,
    longest: int = 0,
    window: int = -1,
) -> Tensor:
    """Computes causal attention with dropout `p` of its probabilities, drawn from `seed` (from
    `seed_tensor`).

    q, k, v: `[batch, seq, heads, head_dim]`; k and v may have fewer heads. Returns the shape of q.

    mask: as in `scaled_dot_product_attention`; None: causal.
    kernel: the name of an `SDPBackend`, or `VARLEN`: torch's memory-efficient kernel for documents, for which
        batch is 1, and k and v have as many heads as q.
    starts: with `VARLEN`, `[n]` int32, the starts of documents, then the number of tokens.
    longest: with `VARLEN`, the number of tokens of the longest document.
    window: with `VARLEN`, the number of keys before its own that a query sees; -1: all.
    """
    if torch.compiler.is_compiling():
        return _operator(q, k, v, mask, seed, p, scale, kernel, starts, longest, window)
    with fork_seed(int(seed), q.device):
        return _attend(q, k, v, mask, p, scale, kernel, starts, longest, window)


def efficient_varlen(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, window: int, p: float, scale: float | None
) -> Tensor:
    """Runs torch's memory-efficient attention kernel for documents of different lengths, with dropout `p`.

    q, k, v: `[1, tokens, heads, head_dim]`.
    starts: `[n]` int32, the starts of documents, then the number of tokens.
    longest: number of tokens of the longest document.
    window: number of keys before its own that a query sees; -1: all.
    """
    if window >= 0:
        windowed: Tensor = _WindowedVarlen.apply(q, k, v, starts, longest, window + 1, p, scale)[0]  # type: ignore[no-untyped-call]
        return windowed
    out: Tensor = torch.ops.aten._efficient_attention_forward(
        q, k, v, None, starts, starts, longest, longest, p, _CAUSAL, True, scale=scale
    )[0]
    return out


class _WindowedVarlen(torch.autograd.Function):
    """Runs the memory-efficient kernel within windows of `width` keys, including the query's own key.

    torch's own gradient does not pass the window to the backward kernel, and is silently wrong (seen in
    2.11).
    """

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, width: int, p: float, scale: float | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        out, logsumexp, seed, offset, *_ = torch.ops.aten._efficient_attention_forward(
            q, k, v, None, starts, starts, longest, longest, p, _CAUSAL, True, scale=scale, window_size=width
        )
        return out, logsumexp, seed, offset

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        q, k, v, starts, *ctx.options = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(q, k, v, starts, *output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        return (*_windowed_varlen_backward(gradient, *ctx.saved_tensors, *ctx.options), *[None] * 5)


# A custom operator, because torch's compiler does not support the kernel's argument `window_size` (torch
# 2.13).
@torch.library.custom_op("megatron::windowed_varlen_backward", mutates_args=())
def _windowed_varlen_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    seed: Tensor,
    offset: Tensor,
    longest: int,
    width: int,
    p: float,
    scale: float | None,
) -> list[Tensor]:
    """Returns the gradients of q, k and v, given `gradient`, that of the attention output."""
    parts = torch.ops.aten._efficient_attention_backward(
        gradient, q, k, v, None, out, starts, starts, longest, longest, logsumexp, p, seed, offset, _CAUSAL, False,
        scale=scale, window_size=width,
    )  # fmt: skip
    return [part.contiguous() for part in parts[:3]]


@_windowed_varlen_backward.register_fake
def _(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (q, k, v)]


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    p: float,
    scale: float | None,
    kernel: str,
    starts: Tensor | None,
    longest: int,
    window: int,
) -> Tensor:
    if kernel == VARLEN:
        assert starts is not None
        return efficient_varlen(q, k, v, starts, longest, window, p, scale)
    shared = k.shape[2] != q.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.__members__[kernel]):
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=p, is_causal=mask is None, scale=scale, enable_gqa=shared
        )
    return out.transpose(1, 2)


# The compiler sees only the shapes of these custom operators, so it cannot change the random numbers, and the
# graph does not break. The gradient runs the attention again with the same seed. Used in compiled code only,
# because eager dispatch takes 0.2 ms.
@torch.library.custom_op("megatron::seeded_attention", mutates_args=())
def _operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    seed: Tensor,
    p: float,
    scale: float | None,
    kernel: str,
    starts: Tensor | None,
    longest: int,
    window: int,
) -> Tensor:
    with fork_seed(int(seed), q.device):
        return _attend(q, k, v, mask, p, scale, kernel, starts, longest, window).contiguous()


@_operator.register_fake
def _(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape)


@torch.library.custom_op("megatron::seeded_attention_backward", mutates_args=())
def _backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    seed: Tensor,
    p: float,
    scale: float | None,
    kernel: str,
    starts: Tensor | None,
    longest: int,
    window: int,
    mask_is_trained: bool,
) -> list[Tensor]:
    """Returns the gradients of q, k and v, and of the mask if it is trained, given that of the attention
    output."""
    inputs = [q, k, v]
    if mask is not None and mask_is_trained:
        inputs.append(mask)

    def attend(q: Tensor, k: Tensor, v: Tensor, trained_mask: Tensor | None = mask) -> Tensor:
        return _attend(q, k, v, trained_mask, p, scale, kernel, starts, longest, window)

    with fork_seed(int(seed), q.device):
        pull_back = torch.func.vjp(attend, *inputs)[1]
    return [part.contiguous() for part in pull_back(gradient)]


@_backward.register_fake
def _(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *options: Any) -> list[Tensor]:
    trained = [q, k, v, mask] if options[-1] else [q, k, v]
    return [x.new_empty(x.shape) for x in trained if x is not None]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, v, mask, seed, p, scale, kernel, starts, longest, window = inputs
    ctx.save_for_backward(q, k, v, mask, seed, starts)
    ctx.options = p, scale, kernel, longest, window


def _gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, mask, seed, starts = ctx.saved_tensors
    p, scale, kernel, longest, window = ctx.options
    trained = mask is not None and ctx.needs_input_grad[3]
    parts = _backward(gradient, q, k, v, mask, seed, p, scale, kernel, starts, longest, window, trained)
    return (*parts[:3], parts[3] if trained else None, *[None] * 7)


_operator.register_autograd(_gradient, setup_context=_keep)
