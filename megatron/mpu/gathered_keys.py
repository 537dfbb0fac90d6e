"""Attention over keys and values of full rows, gathered from context ranks in parts, each of some heads.

All gathers start at once, so attention over one part runs while the next arrives. Backward gathers each part
again instead of keeping it, as Megatron-LM does, so a rank keeps only the keys of its own columns. Gradients
are summed over ranks while backward computes those of other parts.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron.mpu.context import gather_keys
from megatron.mpu.mappings import Started, finish, start_all_gather, start_reduce_scatter

Attend = Callable[[int, Tensor, Tensor], Tensor]
"""A function of the number of a part, its keys and its values, `[.., kv_heads / parts, head_dim]`. It returns
`[places, batch, heads / parts, head_dim]`."""


def attend_in_parts(
    attend: Attend, kv: Tensor, group: dist.ProcessGroup, index: Tensor, parts: int, keeps_keys: bool
) -> Tensor:
    """Returns attention `[places, batch, heads, head_dim]` of all parts.

    kv: `[places, batch, 2, kv_heads, head_dim]`, keys and values of this rank's columns.
    index: int64, position of each key in the ranks' (column, row) pairs, laid end to end. `attend` gets keys
        `[*index, kv_heads / parts, head_dim]`.
    keeps_keys: whether gathered keys are kept for backward.
    """
    tokens = kv.flatten(0, 1)
    if torch.compiler.is_compiling():  # the compiler decides what is kept
        keys, values = gather_keys(tokens, group, index.flatten()).unflatten(0, index.shape).unbind(-3)
        return attend(0, keys, values)
    gathered = _PartGathers(group, index, keeps_keys or not tokens.requires_grad)
    divided = gathered.start(tokens, parts)
    return torch.cat([gathered.attend(attend, number, divided) for number in range(parts)], 2)


class _PartGathers:
    """The gathers of one call of attention, forward and backward, and the sums of gradients.

    No attribute has a graph: autograd's functions hold this object, and a cycle would keep all memory.
    """

    def __init__(self, group: dist.ProcessGroup, index: Tensor, keeps_keys: bool) -> None:
        self.group, self.index, self.keeps_keys = group, index, keeps_keys
        self.num_local = 0  # this rank's tokens
        self.gathers: dict[int, Started] = {}
        self.rows: dict[int, Tensor] = {}  # parts that backward has gathered
        self.sums: dict[int, Started] = {}

    def start(self, tokens: Tensor, parts: int) -> tuple[Tensor, ...]:
        """Divides `[tokens, 2, kv_heads, head_dim]` into parts of heads, and starts to gather them."""
        divided: tuple[Tensor, ...] = _Divided.apply(tokens, self, parts)
        self.num_local = len(tokens)
        for number, part in enumerate(divided):
            self.start_gather(number, part)
        return divided

    def attend(self, attend: Attend, number: int, divided: Sequence[Tensor]) -> Tensor:
        rows = _GatheredRows.apply(divided[number], self, number)
        keys, values = rows.unflatten(0, self.index.shape).unbind(-3)
        if self.keeps_keys:
            return attend(number, keys, values)
        with self._regathered(number, rows):
            out = attend(number, keys, values)
        return _Regather.apply(out, self, number, *(part.detach() for part in divided[max(number - 1, 0) : number + 1]))

    def start_gather(self, number: int, local: Tensor) -> None:
        if number not in self.gathers:
            self.gathers[number] = start_all_gather(local.detach(), self.group)

    def finish_gather(self, number: int) -> Tensor:
        return finish(self.gathers.pop(number)).index_select(0, self.index.flatten())

    def _regathered(self, number: int, rows: Tensor) -> saved_tensors_hooks:
        """Makes autograd save no view of `rows`; backward makes the same views of the rows it gathers."""
        storage = rows.untyped_storage()._cdata

        def pack(tensor: Tensor) -> Any:
            if tensor.untyped_storage()._cdata != storage:
                return tensor
            return tensor.shape, tensor.stride(), tensor.storage_offset()

        def unpack(saved: Any) -> Tensor:
            if isinstance(saved, Tensor):
                return saved
            if number not in self.rows:
                self.rows[number] = self.finish_gather(number)
            return self.rows[number].as_strided(*saved)

        return saved_tensors_hooks(pack, unpack)


class _Divided(torch.autograd.Function):
    """Divides keys and values into parts of heads. Backward waits for the gradients that `_GatheredRows` is
    summing."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, gathered: _PartGathers, parts: int) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.gathered = gathered
        return tuple(part.clone(memory_format=torch.contiguous_format) for part in tokens.chunk(parts, 2))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        sums = ctx.gathered.sums
        return torch.cat([finish(sums.pop(number)) for number in range(len(grads))], 2), None, None


class _GatheredRows(torch.autograd.Function):
    """Returns the keys and values of a part that were gathered. Backward starts to sum their gradients over
    ranks; the gradient it returns is complete when `_Divided` has waited."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, gathered: _PartGathers, number: int) -> Tensor:  # type: ignore[override]
        ctx.gathered, ctx.number = gathered, number
        return gathered.finish_gather(number)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        gathered, number = ctx.gathered, ctx.number
        if gathered.rows.pop(number, None) is None and number in gathered.gathers:  # nothing had to be gathered
            finish(gathered.gathers.pop(number))
        total = grad.new_zeros(gathered.group.size() * gathered.num_local, *grad.shape[1:])
        total.index_add_(0, gathered.index.flatten(), grad)
        gathered.sums[number] = start_reduce_scatter(total, gathered.group)
        return gathered.sums[number].result, None, None


class _Regather(torch.autograd.Function):
    """Returns the attention of a part. Backward starts to gather its keys again, and those of the part that
    backward computes next.

    local: this rank's columns of both, that of the part last.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, gathered: _PartGathers, number: int, *local: Tensor) -> Tensor:  # type: ignore[override]
        ctx.gathered, ctx.number = gathered, number
        ctx.save_for_backward(*local)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        for step, local in enumerate(reversed(ctx.saved_tensors)):
            ctx.gathered.start_gather(ctx.number - step, local)
        return grad, None, None, *(None for _ in ctx.saved_tensors)
