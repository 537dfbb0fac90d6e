"""The way of tokens to experts and back: sorted by expert, and over the ranks that share experts out."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.mpu import all_to_all, exchange

Compute = Callable[[Tensor, Tensor], Tensor]
"""From rows sorted by expert and the ends `[experts]` int32 of each one's to their outputs."""


class Plan(NamedTuple):
    """Where rows go. order: `[rows]`, of the row that is sorted to each place, token * top_k + choice.
    inverse: the place of each row. counts: `[experts]` of rows; those behind their sum have no expert."""

    order: Tensor
    inverse: Tensor
    counts: Tensor


def sort_rows(experts: Tensor, number: int) -> Plan:
    """experts: `[tokens, top_k]`, the expert of each row, and `number` for rows without one, which come
    last."""
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return Plan(order, inverse, _counts(flat, number)[:number])


def _counts(flat: Tensor, number: int) -> Tensor:
    """`[number + 1]`, how often 0, 1, .. `number` stand in `flat`; no wait for the device."""
    return torch.zeros(number + 1, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))


def limit(experts: Tensor, weights: Tensor, number: int, factor: float) -> Tensor:
    """The experts `[tokens, top_k]` of rows that have room: an expert takes no more than ceil(`factor` * rows
    / `number`) of the rows that have an expert, those with the highest weights; `number` in the place of
    others."""
    flat, counts = experts.flatten(), _counts(experts.flatten(), number)
    capacity = (counts[:number].sum().double() * factor / number).ceil()
    by_weight = weights.detach().flatten().argsort(descending=True, stable=True)
    by_expert = by_weight[flat[by_weight].argsort(stable=True)]  # by expert, and by weight within each
    first = counts.cumsum(0) - counts
    place = torch.arange(len(flat), device=flat.device) - first[flat[by_expert]]
    kept = torch.empty_like(flat).scatter_(0, by_expert, torch.where(place < capacity, flat[by_expert], number))
    return kept.view(experts.shape)


def run_local(x: Tensor, experts: Tensor, number: int, compute: Compute, all_here: bool) -> tuple[Tensor, Plan]:
    """The outputs of all choices by experts of this rank, as the plan sorts them, `[tokens * top_k, hidden]`;
    0 where `experts` `[tokens, top_k]` is `number`, which is nowhere where `all_here`."""
    plan = sort_rows(experts, number)
    rows = _ToExperts.apply(x, plan.order, plan.inverse, experts.shape[1])
    ends = plan.counts.cumsum(0).int()
    if all_here:
        return compute(rows, ends), plan
    valid = (torch.arange(len(plan.order), device=x.device) < plan.counts.sum()).unsqueeze(-1)
    # What a product makes of rows without expert is undefined, and so are their gradients.
    return torch.where(valid, compute(torch.where(valid, rows, 0.0), ends), 0.0), plan


def run_on_ranks(
    x: Tensor, experts: Tensor, number: int, compute: Compute, group: dist.ProcessGroup
) -> tuple[Tensor, Plan]:
    """`run_local` with experts that are shared out over the ranks of `group`, each of which has as many, in
    turn. The host waits for the numbers of rows that travel, once."""
    size, top_k = dist.get_world_size(group), experts.shape[1]
    plan = sort_rows(experts, number)
    counts = plan.counts.view(size, -1)
    theirs = exchange(counts, group, [1] * size, [1] * size)  # by source and expert of this rank
    sent, received = read_sizes(counts, theirs)
    rows = _ToExperts.apply(x, plan.order, plan.inverse, top_k)
    arrived = all_to_all(rows[: sum(sent)], group, sent, received)
    own = torch.arange(number // size, device=x.device).repeat(size)
    expert_of = own.repeat_interleave(theirs.flatten(), output_size=sum(received))
    here = sort_rows(expert_of.unsqueeze(1), number // size)
    out = compute(_Permute.apply(arrived, here.order, here.inverse), here.counts.cumsum(0).int())
    out = all_to_all(_Permute.apply(out, here.inverse, here.order), group, received, sent)
    if len(out) < len(rows):
        out = torch.cat([out, out.new_zeros((len(rows) - len(out), out.shape[1]))])
    return out, plan


def read_sizes(counts: Tensor, theirs: Tensor) -> tuple[list[int], list[int]]:
    """Numbers of rows for each rank and from each, of counts `[ranks, experts]`."""
    sent, received = torch.stack([counts.sum(1), theirs.sum(1)]).tolist()
    return sent, received


class _ToExperts(torch.autograd.Function):
    """`x` `[tokens, hidden]`, each `top_k` times, sorted; the gradient of a token is a sum of `top_k` in one
    order, not of rows that are added as they come."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:
        ctx.top_k = top_k
        ctx.save_for_backward(inverse)
        return x[order // top_k]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        return _sums(grad, inverse.view(-1, ctx.top_k)), None, None, None


class _Permute(torch.autograd.Function):
    """The rows of `x` in another order; inverse: the place that each of them gets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        return grad[inverse], None, None


def combine(rows: Tensor, weights: Tensor, plan: Plan) -> Tensor:
    """The sum of each token's outputs times their weights `[tokens, top_k]`, `[tokens, hidden]`. rows: as of
    `run_local`; they are kept for the gradient as they lie, and not once more by token."""
    return _Combine.apply(rows, weights.to(rows.dtype), plan.order, plan.inverse)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, order, inverse)
        return _sums(rows, inverse.view_as(weights), weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        rows, weights, order, inverse = ctx.saved_tensors
        sorted_grad = grad[order // weights.shape[1]]
        of_weights = (rows * sorted_grad).sum(-1)[inverse].view_as(weights)
        return sorted_grad * weights.flatten()[order].unsqueeze(-1), of_weights, None, None


def _sums(rows: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    """Of each token the sum of the rows `[rows, hidden]` at `places` `[tokens, top_k]`, times their weights:
    `[tokens, hidden]`, in one pass over the rows."""
    return F.embedding_bag(places, rows.contiguous(), mode="sum", per_sample_weights=weights)
