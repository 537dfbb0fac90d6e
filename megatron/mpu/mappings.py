"""Collectives of tensor, sequence and expert parallelism with their gradients.

Each pairs a forward with the collective its gradient needs (Megatron-LM, arXiv 1909.08053; sequence
parallelism, arXiv 2205.05198). The sequence is dimension 0 of `[seq, batch, hidden]`. All are the identity
for a group of None. Collectives split into `start_..` and `finish` have no gradient: autograd functions of
`parallel_linear.py` compute between the two.

In compiled code collectives return new tensors: torch 2.11 silently loses in-place writes of a collective in
a compiled backward, and gradients are then those of one rank.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.mpu.torch_versions import all_gather_single, reduce_scatter_single

Group = dist.ProcessGroup | None
_functional = torch.ops._c10d_functional
_Collective = Callable[[Tensor, dist.ProcessGroup], Tensor]


class Started(NamedTuple):
    """A running collective and its result, which may be read after `finish`."""

    result: Tensor
    work: dist.Work | None  # None in compiled code, and where it was waited for
    unread: tuple[Tensor, ...] = ()  # further results of the same collective, which are not used


def start_all_reduce(x: Tensor, group: dist.ProcessGroup, wait: bool = False) -> Started:
    """Starts to sum x over ranks. Uncompiled code sums in place: pass an x that nothing else uses. wait: wait
    for the result at once."""
    x = x.contiguous()
    if torch.compiler.is_compiling():
        return Started(_functional.all_reduce(x, "sum", group.group_name), None)
    return Started(x, dist.all_reduce(x, group=group, async_op=not wait))


def start_all_gather(x: Tensor, group: dist.ProcessGroup, wait: bool = False) -> Started:
    """Starts to concatenate the first dimension over ranks."""
    x, size = x.contiguous(), group.size()
    if torch.compiler.is_compiling():
        return Started(_functional.all_gather_into_tensor(x, size, group.group_name), None)
    out = x.new_empty((x.shape[0] * size, *x.shape[1:]))
    return Started(out, all_gather_single(out, x, group=group, async_op=not wait))


def start_all_gather_in_backward(x: Tensor, grad: Tensor, group: dist.ProcessGroup) -> Started:
    """`start_all_gather` in backward of a tensor that forward has gathered too. grad: the gradient that
    backward starts from.

    A compiler would merge the two equal collectives and keep the result for backward. A collective that needs
    the gradient can only run in backward, so an element of the gradient is gathered along.
    """
    if not torch.compiler.is_compiling():
        return start_all_gather(x, group)
    grad_element = grad[(0,) * (grad.dim() - 1)][:1].to(x.dtype)
    tensors = [x.contiguous(), grad_element.contiguous()]
    result, *unread = _functional.all_gather_into_tensor_coalesced(tensors, group.size(), group.group_name)
    return Started(result, None, tuple(unread))


def start_reduce_scatter(x: Tensor, group: dist.ProcessGroup, wait: bool = False) -> Started:
    """Starts to sum x over ranks, for this rank's part of the first dimension."""
    x, size = x.contiguous(), group.size()
    if torch.compiler.is_compiling():
        return Started(_functional.reduce_scatter_tensor(x, "sum", size, group.group_name), None)
    out = x.new_empty((x.shape[0] // size, *x.shape[1:]))
    return Started(out, reduce_scatter_single(out, x, group=group, async_op=not wait))


def finish(started: Started) -> Tensor:
    """Returns the result; later computation waits for it."""
    if torch.compiler.is_compiling():
        for tensor in started.unread:
            _functional.wait_tensor(tensor)  # torch keeps a collective's tensors until each was waited for
        return _functional.wait_tensor(started.result)
    if started.work is not None:
        started.work.wait()
    return started.result


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    buffer = x if torch.compiler.is_compiling() else x.clone(memory_format=torch.contiguous_format)
    return finish(start_all_reduce(buffer, group, wait=True))


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x of all ranks, concatenated along the first dimension; no gradient."""
    return finish(start_all_gather(x, group, wait=True))


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return finish(start_reduce_scatter(x, group, wait=True))


def _own_chunk(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()  # of a view 2.11 makes a slice's gradient


def _identity(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.view_as(x)


def _pass(grad: Tensor, group: dist.ProcessGroup) -> Tensor:
    return grad


class _Mapping(torch.autograd.Function):
    """Runs one collective in the forward pass and another one on the gradient in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, forward_op: _Collective, backward_op: _Collective
    ) -> Tensor:
        ctx.group, ctx.backward_op = group, backward_op
        return forward_op(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return ctx.backward_op(grad, ctx.group), None, None, None


def copy_to_tensor(x: Tensor, group: Group) -> Tensor:
    """Returns x; the gradient is summed over tensor ranks.

    For the input of a column-parallel layer, or a replicated parameter that sees only this rank's part of the
    sequence.
    """
    return x if group is None else _Mapping.apply(x, group, _identity, _all_reduce)


def reduce_from_tensor(x: Tensor, group: Group) -> Tensor:
    """Returns the sum of x over tensor ranks; the gradient stays as it is. For the output of a row-parallel
    layer."""
    return x if group is None else _Mapping.apply(x, group, _all_reduce, _pass)


def gather_from_sequence(x: Tensor, group: Group) -> Tensor:
    """`[seq/T, ...]` to `[seq, ...]`; the gradient is reduce-scattered."""
    return x if group is None else _Mapping.apply(x, group, all_gather, _reduce_scatter)


def gather_from_sharers(x: Tensor, group: Group, sharers: int) -> Tensor:
    """Concatenates the last dimension over this rank's group of `sharers` neighbouring tensor ranks.

    Each of them uses the full result differently, so the gradient of a rank's part is summed over them. The
    identity for one sharer.
    """
    if sharers == 1 or group is None:
        return x
    parts = gather_from_sequence(x.unsqueeze(0), group)
    group_start = dist.get_rank(group) // sharers * sharers
    return torch.cat(parts[group_start : group_start + sharers].unbind(0), -1)


def scatter_to_sequence(x: Tensor, group: Group) -> Tensor:
    """Keeps this rank's part of a replicated `[seq, ...]`; the gradient is gathered, so it is full on every
    rank."""
    return x if group is None else _Mapping.apply(x, group, _own_chunk, all_gather)


def all_to_all(x: Tensor, group: dist.ProcessGroup, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Exchanges rows of `x` with each rank of the group; the gradient travels back.

    sent, received: numbers of rows for and from each rank, in rank order.
    """
    return _AllToAll.apply(x, group, sent, received)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return exchange(x, group, sent, received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return exchange(grad, ctx.group, ctx.received, ctx.sent), None, None, None


def exchange(x: Tensor, group: dist.ProcessGroup, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """`all_to_all` without a gradient."""
    out = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), list(received), list(sent), group=group)
    return out


def gather_from_tensor(x: Tensor, group: Group) -> Tensor:
    """Concatenate the last dimension over tensor ranks (logits for sampling); no gradient."""
    if group is None:
        return x
    return torch.cat(all_gather(x.detach().unsqueeze(0), group).unbind(0), dim=-1)
