"""Collectives of tensor and sequence parallelism with their gradients.

Each pairs a forward with the collective its gradient needs (Megatron-LM, arXiv 1909.08053; sequence
parallelism, arXiv 2205.05198). The sequence is dimension 0 of `[seq, batch, hidden]`. All are the identity
for a group of None.

In compiled code collectives return new tensors: torch 2.11 loses what one writes in place in a compiled
backward, and the gradients are those of one rank, without a word.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from megatron.mpu.torch_versions import all_gather_single, reduce_scatter_single

Group = dist.ProcessGroup | None
_Collective = Callable[[Tensor, dist.ProcessGroup], Tensor]


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    if torch.compiler.is_compiling():
        return functional.all_reduce(x.contiguous(), "sum", group)
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    if torch.compiler.is_compiling():
        return functional.all_gather_tensor(x.contiguous(), 0, group)
    size = dist.get_world_size(group)
    out = x.new_empty((x.shape[0] * size, *x.shape[1:]))
    all_gather_single(out, x.contiguous(), group=group)
    return out


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    if torch.compiler.is_compiling():
        return functional.reduce_scatter_tensor(x.contiguous(), "sum", 0, group)
    size = dist.get_world_size(group)
    out = x.new_empty((x.shape[0] // size, *x.shape[1:]))
    reduce_scatter_single(out, x.contiguous(), group=group)
    return out


def _own_chunk(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()  # of a view 2.11 makes a slice's gradient


def _same(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.view_as(x)


def _pass(grad: Tensor, group: dist.ProcessGroup) -> Tensor:
    return grad


class _Mapping(torch.autograd.Function):
    """One collective forwards, another one backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, there: _Collective, back: _Collective) -> Tensor:
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return ctx.back(grad, ctx.group), None, None, None


def copy_to_tensor(x: Tensor, group: Group) -> Tensor:
    """Identity; the gradient is summed over tensor ranks. Input of a column-parallel layer, or a replicated
    parameter that only sees this rank's part of the sequence."""
    return x if group is None else _Mapping.apply(x, group, _same, _all_reduce)


def reduce_from_tensor(x: Tensor, group: Group) -> Tensor:
    """Sum over tensor ranks; the gradient passes through. Output of a row-parallel layer."""
    return x if group is None else _Mapping.apply(x, group, _all_reduce, _pass)


def gather_from_sequence(x: Tensor, group: Group) -> Tensor:
    """`[seq/T, ...]` to `[seq, ...]`; the gradient is reduce-scattered."""
    return x if group is None else _Mapping.apply(x, group, _all_gather, _reduce_scatter)


def reduce_scatter_to_sequence(x: Tensor, group: Group) -> Tensor:
    """Sum `[seq, ...]` over tensor ranks, keep this rank's `[seq/T, ...]`; the gradient is gathered."""
    return x if group is None else _Mapping.apply(x, group, _reduce_scatter, _all_gather)


def scatter_to_sequence(x: Tensor, group: Group) -> Tensor:
    """Keep this rank's part of a replicated `[seq, ...]`; the gradient is gathered (whole on every rank)."""
    return x if group is None else _Mapping.apply(x, group, _own_chunk, _all_gather)


def gather_from_tensor(x: Tensor, group: Group) -> Tensor:
    """Concatenate the last dimension over tensor ranks (logits for sampling); no gradient."""
    if group is None:
        return x
    return torch.cat(_all_gather(x.detach().unsqueeze(0), group).unbind(0), dim=-1)
