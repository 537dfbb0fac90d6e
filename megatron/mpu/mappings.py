"""Collectives of tensor, sequence and expert parallelism, with gradients.

Each mapping runs one collective in the forward pass, and in the backward pass the collective that the
gradient needs (Megatron-LM, arXiv 1909.08053; sequence parallelism, arXiv 2205.05198). The sequence is
dimension 0 of `[seq, batch, hidden]`. A group of None has one rank: the mapping then returns its input.
Collectives that are split into `start_..` and `finish` have no gradient; autograd functions in
`parallel_linear.py` compute between the two calls.

In compiled code collectives return new tensors: in a compiled backward, torch 2.11 silently loses in-place
writes of a collective, and gradients would be those of one rank.
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
    """A collective that may still be running. Call `finish` before you read `result`."""

    result: Tensor
    work: dist.Work | None  # None in compiled code, or if the collective has already finished
    unread: tuple[Tensor, ...] = ()  # other results of the same collective, which nothing uses


def start_all_reduce(x: Tensor, group: dist.ProcessGroup, wait: bool = False) -> Started:
    """Starts to sum x over the ranks of the group.

    Uncompiled code sums in place, so pass an x that nothing else uses. wait: also wait for the result here.
    """
    x = x.contiguous()
    if torch.compiler.is_compiling():
        return Started(_functional.all_reduce(x, "sum", group.group_name), None)
    return Started(x, dist.all_reduce(x, group=group, async_op=not wait))


def start_all_gather(x: Tensor, group: dist.ProcessGroup, wait: bool = False) -> Started:
    """Starts to concatenate the ranks' x along the first dimension. wait: also wait for the result here."""
    x, size = x.contiguous(), group.size()
    if torch.compiler.is_compiling():
        return Started(_functional.all_gather_into_tensor(x, size, group.group_name), None)
    out = x.new_empty((x.shape[0] * size, *x.shape[1:]))
    return Started(out, all_gather_single(out, x, group=group, async_op=not wait))


def start_all_gather_in_backward(x: Tensor, grad: Tensor, group: dist.ProcessGroup) -> Started:
    """Does what `start_all_gather` does, for use in backward after forward has gathered the same tensor.

    The compiler would merge two equal collectives and keep the gathered tensor from forward to backward. So
    one element of `grad` is gathered with x: such a collective can only run in backward.

    grad: the gradient that this backward function received.
    """
    if not torch.compiler.is_compiling():
        return start_all_gather(x, group)
    grad_element = grad[(0,) * (grad.dim() - 1)][:1].to(x.dtype)
    tensors = [x.contiguous(), grad_element.contiguous()]
    result, *unread = _functional.all_gather_into_tensor_coalesced(tensors, group.size(), group.group_name)
    return Started(result, None, tuple(unread))


def start_reduce_scatter(x: Tensor, group: dist.ProcessGroup, wait: bool = False) -> Started:
    """Starts to sum x over the ranks; each rank gets its part of the sum along the first dimension.

    wait: also wait for the result here.
    """
    x, size = x.contiguous(), group.size()
    if torch.compiler.is_compiling():
        return Started(_functional.reduce_scatter_tensor(x, "sum", size, group.group_name), None)
    out = x.new_empty((x.shape[0] // size, *x.shape[1:]))
    return Started(out, reduce_scatter_single(out, x, group=group, async_op=not wait))


def finish(started: Started) -> Tensor:
    """Returns the result of a collective. Computation that uses it waits until the collective is done."""
    if torch.compiler.is_compiling():
        for tensor in started.unread:
            _functional.wait_tensor(tensor)  # torch frees a collective's tensors only after a wait for each of them
        return _functional.wait_tensor(started.result)
    if started.work is not None:
        started.work.wait()
    return started.result


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    buffer = x if torch.compiler.is_compiling() else x.clone(memory_format=torch.contiguous_format)
    return finish(start_all_reduce(buffer, group, wait=True))


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the x of all ranks, concatenated along the first dimension; without gradient."""
    return finish(start_all_gather(x, group, wait=True))


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns this rank's part, along the first dimension, of the sum of x over ranks; without gradient."""
    return finish(start_reduce_scatter(x, group, wait=True))


def _own_chunk(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    # A copy: torch 2.11 would treat the gradient of a view as the gradient of a slice.
    return x.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()


def _identity(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.view_as(x)


def _pass(grad: Tensor, group: dist.ProcessGroup) -> Tensor:
    return grad


class _Mapping(torch.autograd.Function):
    """Runs one collective on x in the forward pass, and another on the gradient in the backward pass."""

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
    """Returns x unchanged; in the backward pass its gradient is summed over the tensor ranks.

    Use it for the input of a column-parallel layer, or for a replicated parameter if each rank sees only its
    part of the sequence.
    """
    return x if group is None else _Mapping.apply(x, group, _identity, _all_reduce)


def reduce_from_tensor(x: Tensor, group: Group) -> Tensor:
    """Returns the sum of x over the tensor ranks, as for the output of a row-parallel layer. The gradient is
    passed on unchanged."""
    return x if group is None else _Mapping.apply(x, group, _all_reduce, _pass)


def gather_from_sequence(x: Tensor, group: Group) -> Tensor:
    """Gathers the sequence from the tensor ranks: `[seq/T, ...]` to `[seq, ...]`. The gradient is
    reduce-scattered."""
    return x if group is None else _Mapping.apply(x, group, all_gather, reduce_scatter)


def gather_from_sharers(x: Tensor, group: Group, sharers: int) -> Tensor:
    """Concatenates x along its last dimension over the `sharers` consecutive tensor ranks to which this rank
    belongs.

    Each of these ranks uses the result in its own way, so the gradient of a rank's part is summed over them.
    With one sharer, returns x.
    """
    if sharers == 1 or group is None:
        return x
    parts = gather_from_sequence(x.unsqueeze(0), group)
    group_start = dist.get_rank(group) // sharers * sharers
    return torch.cat(parts[group_start : group_start + sharers].unbind(0), -1)


def scatter_to_sequence(x: Tensor, group: Group) -> Tensor:
    """Returns this rank's part of the sequence: `[seq, ...]`, equal on all tensor ranks, to `[seq/T, ...]`.

    The gradient is gathered, so that every rank has it in full.
    """
    return x if group is None else _Mapping.apply(x, group, _own_chunk, all_gather)


def all_to_all(x: Tensor, group: dist.ProcessGroup, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Sends rows of `x` to each rank of the group and returns the rows received from them. Gradients are sent
    back the same way.

    sent, received: number of rows for each rank, and from each rank, in rank order.
    """
    return _AllToAll.apply(x, group, sent, received)


def exchange_parts(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sends `x[i]` to rank i of the group, and returns what this rank received, in rank order.

    Gradients are sent back the same way. The result has the shape of x.
    """
    return _Mapping.apply(x, group, _exchange_parts, _exchange_parts)


def _exchange_parts(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    if torch.compiler.is_compiling():
        sizes = [1] * group.size()
        return _functional.wait_tensor(_functional.all_to_all_single(x, sizes, sizes, group.group_name))
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return exchange(x, group, sent, received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return exchange(grad, ctx.group, ctx.received, ctx.sent), None, None, None


def exchange(x: Tensor, group: dist.ProcessGroup, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Does what `all_to_all` does, without gradient."""
    out = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), list(received), list(sent), group=group)
    return out


def gather_from_tensor(x: Tensor, group: Group) -> Tensor:
    """Concatenates x along its last dimension over the tensor ranks, such as logits for sampling; without
    gradient."""
    if group is None:
        return x
    return torch.cat(all_gather(x.detach().unsqueeze(0), group).unbind(0), dim=-1)
