"""Context parallelism: ranks compute different columns of the same rows, and exchange what crosses columns.

The sequence is dimension 0, `[seq, batch, ..]`. A rank computes `places` columns, some of which may be
padding.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.mpu.mappings import all_gather, exchange_parts, reduce_from_tensor, reduce_scatter


class ContextRank(NamedTuple):
    """The columns of rows that this context rank computes, and its connection to the others.

    Losses are computed from full rows of values, equal on every rank (`full`, `total`). So each rank's
    gradient is that of its own columns, and gradients of weights are summed over ranks.

    columns: `[places]` int64, with padding that repeats the last column of the row.
    order: `[seq]` int64, index of each column in the ranks' columns, laid end to end.
    token_mask: `[places]` boolean, False for padding; None: no padding.
    loss_places: `[n]` int64, row-major positions in `[places, batch]` where this rank computes losses; None:
        all.
    """

    group: dist.ProcessGroup
    columns: Tensor
    order: Tensor
    token_mask: Tensor | None
    loss_places: Tensor | None

    def local(self, values: Tensor) -> Tensor:
        """Returns this rank's columns of full rows of values: `[seq, ..]` to `[places, ..]`."""
        return values.index_select(0, self.columns)

    def local_weights(self, weights: Tensor) -> Tensor:
        """Returns this rank's columns of loss weights `[seq, batch]`; 0 at padding."""
        local = self.local(weights)
        return local if self.token_mask is None else local * self.token_mask.unsqueeze(1)

    def local_places(self, places: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Returns where this rank computes some positions of full rows, and whether it does (1 or 0), `[n]`
        int64 each.

        places: `[n]` int64, row-major positions in `[seq, rows]`. Where another rank computes them, the first
            result is any position of this rank.
        """
        start = dist.get_rank(self.group) * len(self.columns)
        local = self.order[places // rows] - start
        is_own = (local >= 0) & (local < len(self.columns))
        return torch.where(is_own, local * rows + places % rows, 0), is_own.long()

    def full(self, values: Tensor) -> Tensor:
        """Returns full rows, `[seq, ..]`, of which each rank computed its columns `[places, ..]`.

        The gradient is passed to each rank for its own columns: all ranks use the result in the same way.
        """
        return _Rows.apply(values, self.group, self.order, False)

    def total(self, x: Tensor) -> Tensor:
        """Returns the sum of `x` over ranks, which all use it in the same way. The gradient is passed on
        unchanged."""
        return reduce_from_tensor(x, self.group)


def exchange_heads(x: Tensor, group: dist.ProcessGroup, order: Tensor) -> Tensor:
    """Returns the columns of all ranks of some heads, of which each rank gave its columns of all heads
    (Ulysses, arXiv 2309.14509).

    x: `[ranks, places, batch, n, head_dim]`, the n heads for each rank. order: `[columns]` int64, the index
        of each column in the ranks' columns, laid end to end. Returns `[columns, batch, n, head_dim]`.
    """
    return exchange_parts(x, group).flatten(0, 1).index_select(0, order)


def exchange_columns(x: Tensor, group: dist.ProcessGroup, places: Tensor) -> Tensor:
    """Returns this rank's columns of all heads: the inverse of `exchange_heads`.

    x: `[columns, batch, n, head_dim]`. places: `[ranks * places]` int64, for each of the ranks' columns,
        laid end to end, its index in x. Returns `[places, batch, ranks * n, head_dim]`.
    """
    ranks = dist.get_world_size(group)
    parts = exchange_parts(x.index_select(0, places).unflatten(0, (ranks, -1)), group)
    return parts.movedim(0, 2).flatten(2, 3)


def gather_keys(x: Tensor, group: dist.ProcessGroup, index: Tensor) -> Tensor:
    """Returns `[n, ..]` of what context ranks computed, `[places, ..]` each, such as keys and values.

    Each rank uses them in its own way, so the gradient is reduce-scattered.

    index: `[n]` int64, positions in the ranks' values, laid end to end; one may come more than once.
    """
    return _Rows.apply(x, group, index, True)


class _Rows(torch.autograd.Function):
    """Gathers the columns of all ranks and puts them in the order of the rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, order: Tensor, is_summed: bool) -> Tensor:
        ctx.group, ctx.is_summed, ctx.places = group, is_summed, x.shape[0]
        ctx.save_for_backward(order)
        return all_gather(x, group).index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (order,), group, places = ctx.saved_tensors, ctx.group, ctx.places
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        parts = grad.new_zeros(size * places, *grad.shape[1:]).index_add(0, order, grad)
        local = reduce_scatter(parts, group) if ctx.is_summed else parts[rank * places :][:places].clone()
        return local, None, None, None
