"""Dispatch of tokens to experts and back: sorted by expert, and over the ranks that share the experts."""

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
    """The order that sorts rows (choices of a token) by expert.

    order: `[rows]`, for each sorted position the index of its row: token * top_k + choice.
    inverse: `[rows]`, the sorted position of each row.
    counts: `[experts]`, number of rows of each expert. Sorted rows past their sum have no expert.
    """

    order: Tensor
    inverse: Tensor
    counts: Tensor


def sort_rows(experts: Tensor, number: int) -> Plan:
    """Returns the plan that sorts rows by expert.

    experts: `[tokens, top_k]`, the expert of each row; `number` for rows without one, which come last.
    """
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return Plan(order, inverse, _counts(flat, number)[:number])


def _counts(flat: Tensor, number: int) -> Tensor:
    """Returns how often each of 0 to `number` is in `flat`: `[number + 1]`. The host does not wait."""
    return torch.zeros(number + 1, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))


def limit(experts: Tensor, weights: Tensor, number: int, factor: float) -> Tensor:
    """Applies the experts' capacity: returns `experts` `[tokens, top_k]` with `number` for dropped rows.

    An expert keeps at most ceil(`factor` * rows / `number`) rows, those with the highest weights. Here `rows`
    counts the rows that have an expert.
    """
    flat, counts = experts.flatten(), _counts(experts.flatten(), number)
    capacity = (counts[:number].sum().double() * factor / number).ceil()
    weight_order = weights.detach().flatten().argsort(descending=True, stable=True)
    expert_order = weight_order[flat[weight_order].argsort(stable=True)]  # by expert, and by weight within each
    starts = counts.cumsum(0) - counts
    place = torch.arange(len(flat), device=flat.device) - starts[flat[expert_order]]
    retained = torch.empty_like(flat).scatter_(
        0, expert_order, torch.where(place < capacity, flat[expert_order], number)
    )
    return retained.view(experts.shape)


def run_local(x: Tensor, experts: Tensor, number: int, compute: Compute, all_local: bool) -> tuple[Tensor, Plan]:
    """Returns the outputs of this rank's experts, `[tokens * top_k, hidden]`, sorted by expert, and the plan.

    Rows whose expert is `number` have outputs of 0. all_local: there are no such rows.
    """
    plan = sort_rows(experts, number)
    rows = _ToExperts.apply(x, plan.order, plan.inverse, experts.shape[1])
    ends = plan.counts.cumsum(0).int()
    if all_local:
        return compute(rows, ends), plan
    valid = (torch.arange(len(plan.order), device=x.device) < plan.counts.sum()).unsqueeze(-1)
    # What a product makes of rows without expert is undefined, and so are their gradients.
    return torch.where(valid, compute(torch.where(valid, rows, 0.0), ends), 0.0), plan


def run_on_ranks(
    x: Tensor, experts: Tensor, number: int, compute: Compute, group: dist.ProcessGroup
) -> tuple[Tensor, Plan]:
    """`run_local` with experts sharded over the ranks of `group`: equally many consecutive experts on each.

    The host waits once, for the numbers of rows to send and receive.
    """
    size, top_k = dist.get_world_size(group), experts.shape[1]
    plan = sort_rows(experts, number)
    counts = plan.counts.view(size, -1)
    received_counts = exchange(counts, group, [1] * size, [1] * size)  # by source and expert of this rank
    sent, received = read_sizes(counts, received_counts)
    rows = _ToExperts.apply(x, plan.order, plan.inverse, top_k)
    arrived = all_to_all(rows[: sum(sent)], group, sent, received)
    local_experts = torch.arange(number // size, device=x.device).repeat(size)
    expert_of = local_experts.repeat_interleave(received_counts.flatten(), output_size=sum(received))
    local_plan = sort_rows(expert_of.unsqueeze(1), number // size)
    out = compute(_Permute.apply(arrived, local_plan.order, local_plan.inverse), local_plan.counts.cumsum(0).int())
    out = all_to_all(_Permute.apply(out, local_plan.inverse, local_plan.order), group, received, sent)
    if len(out) < len(rows):
        out = torch.cat([out, out.new_zeros((len(rows) - len(out), out.shape[1]))])
    return out, plan


def read_sizes(counts: Tensor, received_counts: Tensor) -> tuple[list[int], list[int]]:
    """Returns the numbers of rows to send to each rank, and to receive from each, as lists on the host.

    counts, received_counts: `[ranks, experts of a rank]`.
    """
    sent, received = torch.stack([counts.sum(1), received_counts.sum(1)]).tolist()
    return sent, received


class _ToExperts(torch.autograd.Function):
    """Repeats the rows of `x` `[tokens, hidden]` `top_k` times, sorted by expert.

    A token's gradient is a sum of `top_k` rows in a fixed order, so it is deterministic."""

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
    """Permutes the rows of `x` by `order`. inverse: the inverse permutation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        return grad[inverse], None, None


def combine(rows: Tensor, weights: Tensor, plan: Plan) -> Tensor:
    """Returns the weighted sum of each token's outputs, `[tokens, hidden]`.

    rows: from `run_local`, sorted by expert; kept for the backward pass without a copy in token order.
    weights: `[tokens, top_k]`.
    """
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
        grad_weights = (rows * sorted_grad).sum(-1)[inverse].view_as(weights)
        return sorted_grad * weights.flatten()[order].unsqueeze(-1), grad_weights, None, None


def _sums(rows: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    """Returns the sum of each token's rows, times weights if given: `[tokens, hidden]`, in one pass.

    rows: `[rows, hidden]`. places: `[tokens, top_k]`, the indices of each token's rows.
    """
    return F.embedding_bag(places, rows.contiguous(), mode="sum", per_sample_weights=weights)
