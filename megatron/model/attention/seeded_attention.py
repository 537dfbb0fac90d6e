"""Attention with dropout whose mask is a function of a seed alone, in compiled code one operator."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.mpu import fork_seed

VARLEN = "EFFICIENT_VARLEN"


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
    """Causal attention of `[batch, seq, heads, head_dim]` (k and v may have fewer heads), to the shape of q,
    with dropout p of its probabilities drawn from `seed`, one of `seed_tensor`.

    mask: of `scaled_dot_product_attention`; None: causal. kernel: the name of an `SDPBackend`, or `VARLEN`:
    torch's memory-efficient kernel for one row (batch 1, as many heads in k and v) of documents, where
    `starts` `[n]` int32 are their bounds, `longest` their largest length and `window` the number of keys
    before itself that a query sees, -1: all.
    """
    if torch.compiler.is_compiling():
        return _operator(q, k, v, mask, seed, p, scale, kernel, starts, longest, window)
    with fork_seed(int(seed), q.device):
        return _attend(q, k, v, mask, p, scale, kernel, starts, longest, window)


def efficient_varlen(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, window: int, p: float, scale: float | None
) -> Tensor:
    """torch's memory-efficient kernel for jagged tensors; arguments as of `seeded_attention`, `[1, tokens,
    heads, head_dim]`."""
    causal, width = 1, None if window < 0 else window + 1  # the kernel's counts the query itself
    out: Tensor = torch.ops.aten._efficient_attention_forward(
        q, k, v, None, starts, starts, longest, longest, p, causal, True, scale=scale, window_size=width
    )[0]
    return out


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


# Of these the compiler sees no more than shapes: it can neither draw other numbers nor break its graph. The
# gradient runs the attention again with the same seed. Only for compiled code: eager dispatch takes 0.2 ms.
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
    """The gradients of q, k and v, and of a trained mask."""
    inputs = [q, k, v]
    if mask is not None and mask_is_trained:
        inputs.append(mask)

    def attend(q: Tensor, k: Tensor, v: Tensor, trained_mask: Tensor | None = mask) -> Tensor:
        return _attend(q, k, v, trained_mask, p, scale, kernel, starts, longest, window)

    with fork_seed(int(seed), q.device):
        pull_back = torch.func.vjp(attend, *inputs)[1]
    return [part.contiguous() for part in pull_back(gradient)]


@_backward.register_fake
def _(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *others: Any) -> list[Tensor]:
    trained = [q, k, v, mask] if others[-1] else [q, k, v]
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
