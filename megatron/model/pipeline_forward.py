"""Runs forward passes through all pipeline stages, in any parallel layout, with or without a training
engine."""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.data import Batch
from megatron.data.context_parts import ContextLayout, part_of
from megatron.model.pipeline_partition import StagePlacement
from megatron.model.stage import HiddenStates
from megatron.mpu import HeadInput, ParallelGroups
from megatron.mpu.pending_sends import PendingSends
from megatron.neox_arguments import ModelArgs

Read = Callable[[HeadInput, Batch], Tensor]
Shape = Callable[[Batch], tuple[int, ...]]
StageForward = Callable[[HiddenStates | None, Batch, Callable[[HeadInput], Tensor], int], HiddenStates | Tensor]


def hidden_buffer(args: ModelArgs, groups: ParallelGroups, batch: Batch, dtype: torch.dtype) -> Tensor:
    """Returns an empty tensor of the shape in which stages exchange a micro-batch's hidden states.

    It is `[seq/T, batch, hidden]`, where seq is the number of columns that this context rank computes.
    """
    rows, seq = len(batch.tokens), batch.num_columns
    seq = seq // groups.size("tensor") if args.sequence_parallel else seq
    return torch.empty(seq, rows, args.hidden_size, dtype=dtype, device=groups.device)


def with_context(batch: Batch, args: ModelArgs, groups: ParallelGroups) -> Batch:
    """Returns the batch with the columns that this context rank computes; unchanged without context
    parallelism."""
    if groups.size("context") == 1:
        return batch
    return part_of(batch, ContextLayout.from_args(args), groups.rank("context"))


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

    stage: runs one of this rank's stages, as `Stage.forward`.
    read: called on the last stage with (final hidden states and output layer, batch); returns a tensor of
        `shape(batch)`.
    dtype: of the hidden states that stages exchange.
    Returns one fp32 tensor for each micro-batch, the same on every pipeline rank.

    With virtual stages, as many micro-batches as ranks run through one chunk before the next chunk.
    """
    rank, ranks, members = groups.rank("pipe"), groups.size("pipe"), groups.members["pipe"]
    placement = StagePlacement.configured(args, ranks)
    last_rank = placement.rank_of(placement.stages - 1)
    results, sends = [], PendingSends(2 * ranks)
    handed_on: dict[int, HiddenStates] = {}  # hidden states for this rank's next chunk, by place in `at_once`
    todo = iter(batches)
    while at_once := [batch.to(groups.device) for batch in islice(todo, ranks if placement.chunks > 1 else 1)]:
        for chunk, number in enumerate(placement.stages_of(rank)):
            source, to = placement.rank_of(number - 1), placement.rank_of(number + 1)
            for place, batch in enumerate(at_once):
                hidden = handed_on.pop(place, None)
                if number > 0 and hidden is None:
                    buffer = hidden_buffer(args, groups, batch, dtype)
                    dist.recv(buffer, src=members[source], group=_link(groups, placement, source, rank))
                    hidden = HiddenStates(buffer)
                out = stage(hidden, batch, partial(_read, read, batch), chunk)
                if not isinstance(out, HiddenStates):
                    results.append(out)
                elif to == rank:
                    handed_on[place] = out
                else:
                    sent = out.hidden_states.contiguous()
                    sends.add(dist.isend(sent, dst=members[to], group=_link(groups, placement, rank, to)), sent)
        if rank != last_rank:
            results += [torch.empty(shape(batch), dtype=torch.float32, device=groups.device) for batch in at_once]
    sends.wait()
    if ranks > 1:
        for result in results:
            dist.broadcast(result, src=members[last_rank], group=groups.group("pipe"))
    return results


def _link(groups: ParallelGroups, placement: StagePlacement, source: int, to: int) -> dist.ProcessGroup | None:
    """Returns the group for messages between two pipeline ranks.

    From the last rank round to the first it is another one, because NCCL runs the messages of two ranks in
    one group in the order in which they are posted.
    """
    return groups.group("pipe") if to > source or placement.is_v else groups.embedding
