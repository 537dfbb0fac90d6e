"""Ring attention (arXiv 2310.01889): keys and values go round the context ranks, while each rank's queries
attend to those it holds.

The results of blocks of keys are merged by their log-sum-exp. On CPUs, and for fp32, torch operations
compute a block; on GPUs torch's FlashAttention 2 does.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

_QUERIES_AT_ONCE = 512  # of a block that torch operations compute


class RingBlock(NamedTuple):
    """The runs of this rank's queries that see keys of one rank, see `data.batch.KeyBlock`.

    query_places: `[queries]` int64, row * columns + column. key_places: `[keys]` int64, the same of the keys.
    starts, key_starts: `[n]` int32, starts of the runs' queries and keys. longest: numbers of queries and
        of keys of the longest runs.
    """

    query_places: Tensor
    key_places: Tensor
    starts: Tensor
    key_starts: Tensor
    longest: tuple[int, int]


class Runs(NamedTuple):
    """The tokens of a block's runs, `[queries or keys, heads, head_dim]`, and how they attend.

    is_causal: attention is causal, aligned at the end of each run; else queries see all keys of their run.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    block: RingBlock
    is_causal: bool
    scale: float


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[RingBlock], group: dist.ProcessGroup, scale: float | None
) -> Tensor:
    """Computes causal attention over the keys of all ranks of the group.

    q: `[columns, batch, heads, head_dim]`; k, v: `[columns, batch, kv_heads, head_dim]`, of this rank.
        Returns the shape of q; zeros for padding.

    blocks: for the keys of this rank, of the rank before it, and so on.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _Ring.apply(q, k, v, tuple(blocks), group, scale)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: tuple[RingBlock, ...], group: dist.ProcessGroup, scale: float
    ) -> Tensor:
        queries = _tokens(q)
        out = torch.zeros(queries.shape, dtype=torch.float32, device=q.device)
        sums = torch.full(queries.shape[:2], float("-inf"), device=q.device)  # log-sum-exp of each query's logits
        for block, keys, is_own in _rounds(torch.stack([k, v]), blocks, group):
            if len(block.query_places):
                runs = _runs_of(queries, keys, block, is_own, scale)
                _merge(out, sums, block.query_places, *_attend(runs))
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.blocks, ctx.group, ctx.scale = blocks, group, scale
        return _rows(out, q)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, sums = ctx.saved_tensors
        blocks, group = ctx.blocks, ctx.group
        queries, grads = _tokens(q), _tokens(grad)
        q_grad = torch.zeros(queries.shape, dtype=torch.float32, device=q.device)
        kv = torch.stack([k, v])
        # The gradients of keys go round behind the keys, and come home after the last step.
        kv_grad = torch.zeros(2, *_tokens(k).shape, dtype=torch.float32, device=q.device)
        for block, keys, is_own in _rounds(kv, blocks, group):
            received, places = kv_grad if is_own else torch.empty_like(kv_grad), block.query_places
            works = [] if is_own else _start_passing(kv_grad, received, group)  # while the block is computed
            parts: tuple[Tensor, ...] = ()
            if len(places):
                runs = _runs_of(queries, keys, block, is_own, ctx.scale)
                parts = _attend_backward(runs, *(values.index_select(0, places) for values in (grads, out, sums)))
                q_grad.index_add_(0, places, parts[0].float())
            _finish(works)
            kv_grad = received
            for total, part in zip(kv_grad, parts[1:], strict=False):
                total.index_add_(0, block.key_places, part.float())
        received = torch.empty_like(kv_grad)
        _finish(_start_passing(kv_grad, received, group))
        kv_grad = received
        k_grad, v_grad = (_rows(values.to(k.dtype), k) for values in kv_grad)
        return _rows(q_grad.to(q.dtype), q), k_grad, v_grad, None, None, None


def _tokens(x: Tensor) -> Tensor:
    """Returns `[columns, batch, heads, head_dim]` as `[batch * columns, heads, head_dim]`."""
    return x.transpose(0, 1).flatten(0, 1)


def _rows(tokens: Tensor, template: Tensor) -> Tensor:
    """Returns the inverse of `_tokens`, in the shape of `template`."""
    return tokens.unflatten(0, (template.shape[1], template.shape[0])).transpose(0, 1).contiguous()


def _rounds(
    kv: Tensor, blocks: Sequence[RingBlock], group: dist.ProcessGroup
) -> Iterator[tuple[RingBlock, Tensor, bool]]:
    """Yields each block, the keys and values of its rank `[2, batch * columns, kv_heads, head_dim]`, and
    whether that is this rank.

    While a block is computed, the next one is received.
    """
    for step, block in enumerate(blocks):
        is_last, received = step == len(blocks) - 1, torch.empty_like(kv)
        works = [] if is_last else _start_passing(kv, received, group)
        yield block, torch.stack([_tokens(x) for x in kv]), step == 0
        _finish(works)
        kv = received


def _start_passing(x: Tensor, received: Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
    """Starts to send x to the next rank of the ring, and to receive the previous rank's."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    to, source = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
    send, receive = dist.P2POp(dist.isend, x, to, group), dist.P2POp(dist.irecv, received, source, group)
    return dist.batch_isend_irecv([send, receive])


def _finish(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


def _runs_of(queries: Tensor, keys: Tensor, block: RingBlock, is_own: bool, scale: float) -> Runs:
    q = queries.index_select(0, block.query_places)
    k, v = (x.index_select(0, block.key_places) for x in keys)
    return Runs(q, k, v, block, is_own, scale)


def _merge(out: Tensor, sums: Tensor, places: Tensor, part: Tensor, part_sums: Tensor) -> None:
    """Merges attention over some more keys into `out` and `sums`, in place.

    places: of the queries. part, part_sums: their attention over these keys, and its log-sum-exp.
    """
    earlier = sums.index_select(0, places)
    total = torch.logaddexp(earlier, part_sums)
    merged = out.index_select(0, places) * (earlier - total).exp().unsqueeze(-1)
    merged += part.float() * (part_sums - total).exp().unsqueeze(-1)
    out.index_copy_(0, places, merged)
    sums.index_copy_(0, places, total)


def _runs_torch_operations(q: Tensor) -> bool:
    """Returns whether FlashAttention 2 does not support these queries.

    It needs a GPU of compute capability 8.0, 16-bit values, and a head_dim of at most 256 that 8 divides.
    """
    if q.device.type != "cuda" or q.dtype == torch.float32 or q.shape[-1] % 8 or q.shape[-1] > 256:
        return True
    return torch.cuda.get_device_capability(q.device) < (8, 0)


def _attend(runs: Runs) -> tuple[Tensor, Tensor]:
    """Returns attention `[queries, heads, head_dim]`, and the log-sum-exp of its logits, fp32 `[queries,
    heads]`."""
    block = runs.block
    if not _runs_torch_operations(runs.q):
        k, v = _repeated(runs)
        out, sums, *_ = torch.ops.aten._flash_attention_forward(
            runs.q, k, v, block.starts, block.key_starts, *block.longest, 0.0, runs.is_causal, False,
            scale=runs.scale,
        )  # fmt: skip
        return out, sums.t()
    outs, all_sums = [], []
    for queries, keys in _pieces(runs):
        logits = _logits(runs, queries, keys)
        sums = logits.logsumexp(-1)
        weights = (logits - sums.unsqueeze(-1)).exp()
        outs.append(_tokens_first(weights @ _heads_first(runs.v[keys], runs.q)))
        all_sums.append(sums.t())
    return torch.cat(outs).to(runs.q.dtype), torch.cat(all_sums)


def _attend_backward(runs: Runs, grad: Tensor, out: Tensor, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of the runs' queries, keys and values.

    grad, out, sums: of these queries: the gradient of attention over all keys, its result, and its
        log-sum-exp.
    """
    block, kv_heads = runs.block, runs.k.shape[1]
    if not _runs_torch_operations(runs.q):
        seed, (k, v) = torch.zeros(2, dtype=torch.int64, device=runs.q.device), _repeated(runs)  # there is no dropout
        grads = torch.ops.aten._flash_attention_backward(
            grad.contiguous(), runs.q, k, v, out, sums.t().contiguous(), block.starts, block.key_starts,
            *block.longest, 0.0, runs.is_causal, seed, seed, scale=runs.scale,
        )  # fmt: skip
        k_grad, v_grad = (x.unflatten(1, (kv_heads, -1)).sum(2, dtype=torch.float32) for x in grads[1:])
        return grads[0], k_grad, v_grad
    q_grad = torch.empty_like(runs.q, dtype=torch.float32)
    k_grad, v_grad = (torch.zeros_like(x, dtype=torch.float32) for x in (runs.k, runs.v))
    for queries, keys in _pieces(runs):
        q, k, v = runs.q[queries], _heads_first(runs.k[keys], runs.q), _heads_first(runs.v[keys], runs.q)
        grads, outs = (_heads_first(x[queries], runs.q) for x in (grad, out))
        weights = (_logits(runs, queries, keys) - sums[queries].t().unsqueeze(-1)).exp()
        slopes = weights * (grads @ v.transpose(1, 2) - (grads * outs).sum(-1, keepdim=True)) * runs.scale
        q_grad[queries] = _tokens_first(slopes @ k)
        k_grad[keys] += _summed_over_sharers(slopes.transpose(1, 2) @ _heads_first(q, runs.q), kv_heads)
        v_grad[keys] += _summed_over_sharers(weights.transpose(1, 2) @ grads, kv_heads)
    return q_grad, k_grad, v_grad


def _repeated(runs: Runs) -> Iterator[Tensor]:
    """Returns keys and values with as many heads as queries."""
    return (x.repeat_interleave(runs.q.shape[1] // x.shape[1], dim=1) for x in (runs.k, runs.v))


def _pieces(runs: Runs) -> Iterator[tuple[slice, slice]]:
    """Yields slices of queries, and of the keys that they see, of which causality may hide the last."""
    starts, key_starts = runs.block.starts.tolist(), runs.block.key_starts.tolist()
    for start, end, key_start, key_end in zip(starts, starts[1:], key_starts, key_starts[1:], strict=False):
        for begin in range(start, end, _QUERIES_AT_ONCE):
            stop = min(begin + _QUERIES_AT_ONCE, end)
            yield slice(begin, stop), slice(key_start, key_end - (end - stop if runs.is_causal else 0))


def _logits(runs: Runs, queries: slice, keys: slice) -> Tensor:
    """Returns the logits `[heads, queries, keys]` of a piece in fp32, -inf for later keys."""
    logits = _heads_first(runs.q[queries], runs.q) @ _heads_first(runs.k[keys], runs.q).transpose(1, 2) * runs.scale
    if runs.is_causal:
        hidden = torch.ones(logits.shape[1:], dtype=torch.bool, device=logits.device)
        logits = logits.masked_fill(hidden.triu(1 + logits.shape[2] - logits.shape[1]), float("-inf"))
    return logits


def _heads_first(x: Tensor, queries: Tensor) -> Tensor:
    """Returns `[tokens, kv_heads, head_dim]` as fp32 `[heads, tokens, head_dim]`, with as many heads as
    queries."""
    return x.float().repeat_interleave(queries.shape[1] // x.shape[1], dim=1).transpose(0, 1)


def _tokens_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1)


def _summed_over_sharers(grad: Tensor, kv_heads: int) -> Tensor:
    """Returns gradients `[heads, tokens, head_dim]` as `[tokens, kv_heads, head_dim]`, summed over the
    heads of queries that share keys."""
    return grad.unflatten(0, (kv_heads, -1)).sum(1).transpose(0, 1)
