"""Rows that context ranks share, in mixers with states: the tails of convolutions, and the states of Mamba 2,
are handed from chunk to chunk.

A rank computes two chunks of each row, at its head and its tail. Each chunk is scanned from a state of
zeros. Then ranks gather the state that each chunk adds, and its decay. From these a rank computes the state
before each of its chunks, and what that state adds to the outputs (the prefix scan of arXiv 2405.21060,
section 6, over ranks).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.data import Batch, DataError
from megatron.model.attention.masks import document_ids
from megatron.model.mamba.chunk_scan import prefix_sums
from megatron.mpu import gather_keys


class RowChunks(NamedTuple):
    """The chunks of rows that context ranks share; this rank has two of them. Numbers of documents are
    those of full rows.

    order: `[chunks]` int64, index of each chunk in the ranks' pairs of chunks, laid end to end.
    numbers: `[2]` int64, of this rank's chunks.
    documents: `[places, batch]` int32, the number of the document of each token of this rank.
    tails: `[2, tokens, batch]` int32, of the tokens before this rank's chunks, the document; as many as the
        longest convolution needs.
    begin, end: `[chunks, batch]` int32, the document of the first and the last token of each chunk.
    """

    order: Tensor
    numbers: Tensor
    documents: Tensor
    tails: Tensor
    begin: Tensor
    end: Tensor

    @property
    def scanned_documents(self) -> Tensor:
        """`documents`, with other numbers in each chunk, so that chunks are scanned separately."""
        return torch.cat([2 * part + i for i, part in enumerate(self.documents.chunk(2))])


def row_chunks(batch: Batch, ranks: int, rank: int, tail: int) -> RowChunks:
    """Returns the chunks of a batch's rows. tail: tokens before a chunk that convolutions need.

    Raises DataError if a chunk is shorter than that.
    """
    assert batch.context is not None and batch.context.is_two_chunks, "states go from chunk to chunk"
    (rows, seq), device, columns = batch.tokens.shape, batch.tokens.device, batch.context.columns
    starts = None if batch.documents is None else batch.documents.cu_seqlens
    full = torch.ones(seq, rows, dtype=torch.int32, device=device)
    if starts is not None:
        full = document_ids(starts, rows, seq).t()
    length = len(columns) // 2
    if length < tail:
        raise DataError(
            f"a row of {seq} tokens gives each of {ranks} context ranks two chunks of {length}, but a convolution "
            f"before states needs {tail}; use longer rows, or a lower context_parallel_size"
        )
    index = torch.arange(2 * ranks, device=device)
    order = torch.where(index < ranks, 2 * index, 2 * (2 * ranks - 1 - index) + 1)
    numbers = rank + (2 * ranks - 1 - 2 * rank) * torch.arange(2, device=device)
    earlier = numbers.unsqueeze(1) * length + torch.arange(-tail, 0, device=device)
    begins = index * length
    return RowChunks(
        order, numbers, full[columns], full[earlier.clamp(0, seq - 1)],
        full[begins.clamp(max=seq - 1)], full[(begins + length - 1).clamp(max=seq - 1)],
    )  # fmt: skip


def with_tails(x: Tensor, width: int, chunks: RowChunks, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Returns each chunk after the last `width` inputs of the chunk before it, and the documents of these
    tokens.

    x: `[places, batch, channels]`. Returns `[2 * width + places, batch, channels]`; zeros before the first
        chunk. The documents have other numbers in each chunk.
    """
    parts = x.chunk(2)
    tails = gather_keys(torch.stack([part[len(part) - width :] for part in parts]), group, chunks.order)
    histories = tails[(chunks.numbers - 1).clamp(min=0)]
    histories = histories * (chunks.numbers > 0).view(2, 1, 1, 1).to(x.dtype)
    documents = chunks.documents.chunk(2)
    tail_documents = chunks.tails[:, chunks.tails.shape[1] - width :]
    longer = [piece for pair in zip(histories, parts, strict=True) for piece in pair]
    numbers = [2 * piece + i for i in (0, 1) for piece in (tail_documents[i], documents[i])]
    return torch.cat(longer), torch.cat(numbers)


def without_tails(x: Tensor, width: int) -> Tensor:
    """Returns x `[2 * width + places, ..]` of `with_tails` without the tokens before each chunk."""
    return torch.cat([part[width:] for part in x.chunk(2)])


def from_earlier_chunks(
    x: Tensor,
    steps: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    chunks: RowChunks,
    group: dist.ProcessGroup,
    recomputed: Callable[..., Any],
) -> Tensor:
    """Returns what the state before each of this rank's chunks adds to its outputs, `[places, batch, heads,
    head_dim]` fp32.

    x: shaped as the result. steps: time steps, `[places, batch, heads]` fp32. a: A, `[heads]` fp32. b, c: B
        and C, `[places, batch, groups, state]`. recomputed: runs a function without saving its intermediate
        values.
    """
    added, log_decay = recomputed(_added_states, x, steps, a, b, chunks)
    shape = added.shape[1:]
    gathered = gather_keys(torch.cat([added.flatten(1), log_decay.flatten(1)], 1), group, chunks.order)
    states, log_decays = gathered.split([added[0].numel(), log_decay[0].numel()], 1)
    states, log_decays = states.view(-1, *shape), log_decays.view(-1, *log_decay.shape[1:])
    start_states = _states_before(states, log_decays, chunks)
    y: Tensor = recomputed(_outputs, steps, a, c, start_states, chunks)
    return y


def _decays(steps: Tensor, a: Tensor) -> Tensor:
    """Returns the logarithm of the decay since the chunk began, `[2, places / 2, batch, heads]` fp64."""
    return prefix_sums((steps * a).double().unflatten(0, (2, -1)).transpose(0, 1)).transpose(0, 1)


def _added_states(x: Tensor, steps: Tensor, a: Tensor, b: Tensor, chunks: RowChunks) -> tuple[Tensor, Tensor]:
    """Returns the state that each chunk's tokens of its last document add up to, `[2, batch, heads,
    head_dim, state]` fp32, and the logarithm of the chunk's decay, `[2, batch, heads]` fp32."""
    log_decay = _decays(steps, a)
    documents = chunks.documents.unflatten(0, (2, -1))
    counts = (documents == chunks.end[chunks.numbers].unsqueeze(1)).unsqueeze(3)
    to_end = (log_decay[:, -1:] - log_decay).exp().float() * counts
    scaled = x.float().unflatten(0, (2, -1)) * (steps.unflatten(0, (2, -1)) * to_end).unsqueeze(4)
    scaled, keys = scaled.unflatten(3, (b.shape[2], -1)), b.float().unflatten(0, (2, -1))
    return torch.einsum("isbgn,isbgrp->ibgrpn", keys, scaled).flatten(2, 3), log_decay[:, -1].float()


def _states_before(states: Tensor, log_decays: Tensor, chunks: RowChunks) -> Tensor:
    """Returns the state before each of this rank's chunks, `[2, batch, heads, head_dim, state]` fp32.

    states, log_decays: of all chunks, as in `_added_states`.
    """
    totals = prefix_sums(torch.cat([log_decays.new_zeros(1, *log_decays.shape[1:]), log_decays]).double())
    spans = totals[chunks.numbers].unsqueeze(1) - totals[1:]  # [2, chunks, batch, heads], from each chunk's end
    index = torch.arange(len(states), device=states.device)
    goes_on = chunks.begin[chunks.numbers].unsqueeze(1) == chunks.end
    goes_on = goes_on & (index < chunks.numbers.unsqueeze(1)).unsqueeze(2)
    decay = spans.masked_fill(~goes_on.unsqueeze(3), -torch.inf).exp().float()
    return torch.einsum("ijbh,jbhpn->ibhpn", decay, states)


def _outputs(steps: Tensor, a: Tensor, c: Tensor, start_states: Tensor, chunks: RowChunks) -> Tensor:
    """Returns what the states before the chunks add to outputs."""
    begin = chunks.begin[chunks.numbers].unsqueeze(1)
    counts = (chunks.documents.unflatten(0, (2, -1)) == begin).unsqueeze(3)
    decay = _decays(steps, a).exp().float() * counts
    queries, states = c.float().unflatten(0, (2, -1)), start_states.unflatten(2, (c.shape[2], -1))
    y = torch.einsum("isbgn,ibgrpn->isbgrp", queries, states).flatten(3, 4) * decay.unsqueeze(4)
    return y.flatten(0, 1)
