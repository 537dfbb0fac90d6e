"""Dispatch of tokens to their experts and back: tokens are sorted by expert, and sent to the ranks that hold
the experts."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.mpu import all_to_all, exchange

Compute = Callable[[Tensor, Tensor], Tensor]
"""A function from rows sorted by expert, and the index `[experts]` int32 after each expert's last row, to
outputs."""


class Plan(NamedTuple):
    """The order that sorts rows by expert. A row is one choice of a token: number token * top_k + choice.

    order: `[rows]`, for each sorted position the number of its row.
    inverse: `[rows]`, the sorted position of each row.
    counts: `[experts]`, number of rows of each expert. Sorted rows past their sum have no expert.
    """

    order: Tensor
    inverse: Tensor
    counts: Tensor


def sort_rows(experts: Tensor, number: int) -> Plan:
    """Returns the plan that sorts rows (choices of tokens) by expert.

    experts: `[tokens, top_k]`, the expert of each row; `number` for rows without expert, which come last.
    number: number of experts.
    """
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return Plan(order, inverse, _counts(flat, number)[:number])


def _counts(flat: Tensor, number: int) -> Tensor:
    """Returns how often each of 0 to `number` is in `flat`, `[number + 1]`, without making the host wait."""
    return torch.zeros(number + 1, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))


def limit(experts: Tensor, weights: Tensor, number: int, factor: float) -> Tensor:
    """Limits how many rows each expert gets: returns `experts` `[tokens, top_k]` with `number` in place of
    dropped choices.

    An expert keeps at most ceil(`factor` * rows / `number`) rows, those with the highest weights. Here `rows`
    counts the rows that have an expert.

    weights: `[tokens, top_k]`. number: number of experts.
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
    """Returns the outputs of this rank's experts, `[tokens * top_k, hidden]`, sorted by expert, and the plan
    of their order.

    x: `[tokens, hidden]`. experts: `[tokens, top_k]`; choices whose expert is `number` have outputs of 0.
    compute: runs the experts on sorted rows. all_local: no choice has the expert `number`.
    """
    plan = sort_rows(experts, number)
    rows = _ToExperts.apply(x, plan.order, plan.inverse, experts.shape[1])
    ends = plan.counts.cumsum(0).int()
    if all_local:
        return compute(rows, ends), plan
    valid = (torch.arange(len(plan.order), device=x.device) < plan.counts.sum()).unsqueeze(-1)
    # A grouped product gives undefined outputs and gradients for rows without expert.
    return torch.where(valid, compute(torch.where(valid, rows, 0.0), ends), 0.0), plan


def run_on_ranks(
    x: Tensor, experts: Tensor, number: int, compute: Compute, group: dist.ProcessGroup
) -> tuple[Tensor, Plan]:
    """Does what `run_local` does, with the experts sharded over the ranks of `group`, each with equally many
    consecutive experts.

    The host waits once, for the numbers of rows to send and receive.
    """
    size, top_k = dist.get_world_size(group), experts.shape[1]
    plan = sort_rows(experts, number)
    counts = plan.counts.view(size, -1)
    received_counts = exchange(counts, group, [1] * size, [1] * size)  # [source rank, expert of this rank]
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
    """Returns the numbers of rows to send to each rank, and to receive from each rank, as lists on the host.

    counts, received_counts: `[ranks, experts of a rank]`, rows to send to, and to receive from, each rank.
    """
    sent, received = torch.stack([counts.sum(1), received_counts.sum(1)]).tolist()
    return sent, received


class _ToExperts(torch.autograd.Function):
    """Repeats the rows of `x` `[tokens, hidden]` `top_k` times, sorted by expert.

    The gradient of a token is the sum of its `top_k` rows in a fixed order, so it is deterministic.
    """

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
    """Returns the rows of `x` in the order `order`. inverse: the inverse permutation, for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        return grad[inverse], None, None


def combine(rows: Tensor, weights: Tensor, plan: Plan) -> Tensor:
    """Returns the weighted sum of the expert outputs of each token, `[tokens, hidden]`.

    rows: from `run_local`, sorted by expert. They are saved for the backward pass as they are, without a copy
        in token order.
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
    """Returns the sum of the rows of each token, times weights if given, `[tokens, hidden]`, in one pass.

    rows: `[rows, hidden]`. places: `[tokens, top_k]`, the indices of each token's rows. weights: `[tokens,
        top_k]`.
    """
    return F.embedding_bag(places, rows.contiguous(), mode="sum", per_sample_weights=weights)
