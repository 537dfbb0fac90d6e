"""Runs forward passes through all pipeline stages, in any parallel layout, with or without a training
engine."""

from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.data import Batch
from megatron.model.stage import HiddenStates
from megatron.mpu import HeadInput, ParallelGroups
from megatron.mpu.pending_sends import PendingSends
from megatron.neox_arguments import ModelArgs

Read = Callable[[HeadInput, Batch], Tensor]
Shape = Callable[[Batch], tuple[int, ...]]
StageForward = Callable[[HiddenStates | None, Batch, Callable[[HeadInput], Tensor]], HiddenStates | Tensor]


def hidden_buffer(args: ModelArgs, groups: ParallelGroups, batch: Batch, dtype: torch.dtype) -> Tensor:
    """Returns an empty tensor of the shape in which stages exchange a micro-batch's hidden states, `[seq/T,
    batch, hidden]`."""
    rows, seq = batch.tokens.shape
    seq = seq // groups.size("tensor") if args.sequence_parallel else seq
    return torch.empty(seq, rows, args.hidden_size, dtype=dtype, device=groups.device)


def _read(read: Read, batch: Batch, head: HeadInput) -> Tensor:
    return read(head, batch).float().contiguous()


@torch.no_grad()
def forward_only(
    stage: StageForward,
    batches: Iterable[Batch],
    args: ModelArgs,
    groups: ParallelGroups,
    read: Read,
    *,
    dtype: torch.dtype,
    shape: Shape,
) -> list[Tensor]:
    """Runs micro-batches through all pipeline stages without gradients; returns what `read` computes from
    each.

    stage: runs this rank's stage.
    read: called on the last stage with (final hidden states and output layer, batch); returns a tensor of
        `shape(batch)`.
    dtype: of the hidden states that stages exchange.
    Returns one fp32 tensor for each micro-batch, the same on every pipeline rank.
    """
    pipe, members = groups.group("pipe"), groups.members["pipe"]
    position = groups.rank("pipe")
    results, sends = [], PendingSends(2 * groups.size("pipe"))
    for batch in batches:
        batch = batch.to(groups.device)
        hidden = None
        if not groups.is_first_stage:
            buffer = hidden_buffer(args, groups, batch, dtype)
            dist.recv(buffer, src=members[position - 1], group=pipe)
            hidden = HiddenStates(buffer)
        out = stage(hidden, batch, partial(_read, read, batch))
        if isinstance(out, HiddenStates):
            sent = out.hidden_states.contiguous()
            sends.add(dist.isend(sent, dst=members[position + 1], group=pipe), sent)
            results.append(torch.empty(shape(batch), dtype=torch.float32, device=groups.device))
        else:
            results.append(out)
    sends.wait()
    return [groups.from_last_stage(result) for result in results]
