"""Masks of attention: within documents, within the branches of trees, and within windows; dense, and in
blocks for FlexAttention."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron.model.positions import distances

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # tokens of a block of FlexAttention, on either side


def document_ids(cu_seqlens: Tensor, rows: int, seq: int) -> Tensor:
    """The number of the document of every token, counted over the micro-batch: `[rows, seq]` int32.

    cu_seqlens: as of `Batch`, for a micro-batch of `rows` rows.
    """
    places = torch.arange(rows * seq, dtype=torch.int32, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens, places, right=True, out_int32=True).view(rows, seq)


def document_mask(cu_seqlens: Tensor, rows: int, seq: int) -> Tensor:
    """The mask of causal attention within documents: boolean `[rows, 1, seq, seq]`, True where a query sees a
    key.

    cu_seqlens: as of `document_ids`.
    """
    documents = document_ids(cu_seqlens, rows, seq)
    return tree_attention_mask(documents, documents)


def prefix_ids(cu_seqlens: Tensor, written_out: Tensor, rows: int, seq: int) -> tuple[Tensor, Tensor]:
    """Branches and contexts of documents that may continue the first tokens of the document before, as of
    `tree_attention_mask`: these tokens are a branch, which is the context of the other tokens of either.

    cu_seqlens: as of `document_ids`. written_out: `SharedPrefixes.cu_seqlens`.
    """
    document = document_ids(cu_seqlens, rows, seq) - 1
    prefix = written_out.diff() - cu_seqlens.diff()
    lent = torch.cat([prefix[1:], prefix.new_zeros(1)])  # to the document behind
    places = torch.arange(rows * seq, dtype=torch.int32, device=cu_seqlens.device).view(rows, seq)
    branch = 2 * document + (places - cu_seqlens[document] >= lent[document])
    context = 2 * (document - (prefix[document] > 0).int())
    return branch, context


def tree_attention_mask(branch_ids: Tensor, context_ids: Tensor) -> Tensor:
    """The mask of tree attention: a token sees what is before it in its row, in its own branch and in the
    branch that is its context.

    branch_ids, context_ids: `[batch, seq]`, the branch of every token, and the branch that is its context,
    its own where it continues none; numbers are unique within a row. Returns boolean `[batch, 1, seq, seq]`.
    """
    steps = torch.arange(branch_ids.shape[1], device=branch_ids.device)
    branch, context, key = branch_ids.unsqueeze(2), context_ids.unsqueeze(2), branch_ids.unsqueeze(1)
    return (((key == branch) | (key == context)) & (steps <= steps.unsqueeze(1))).unsqueeze(1)


def window_mask(seq: int, window: int | None, device: torch.device, queries: Tensor | None = None) -> Tensor:
    """The mask of causal attention within a window: boolean `[batch or 1, 1, queries, seq]`.

    A query sees the keys up to itself, at most `window` tokens before it (None: all of them).
    queries: the columns of the queries, `[batch, queries]`; None: all of seq.
    """
    distance = distances(seq, device, queries)
    causal = distance <= 0
    return causal if window is None else causal & (distance >= -window)


def block_mask(
    seq: int,
    device: torch.device,
    window: int | None = None,
    positions: Tensor | None = None,
    branch_ids: Tensor | None = None,
    context_ids: Tensor | None = None,
) -> "BlockMask":
    """The mask of causal attention, within a window and within the branches of trees, for FlexAttention:
    which blocks of queries and keys are looked at, and a function for the single places of those that are
    hidden in part.

    positions: `[batch, seq]`, by which `window` counts; None: places in the row. branch_ids, context_ids:
    `[batch, seq]`, as of `tree_attention_mask`; context_ids None: every branch is its own.
    What is kept grows with the square of the number of blocks, not of tokens, as it does while torch's
    `create_block_mask` runs. A block is judged by the lowest and highest number in it, so numbers in no order
    cost time and change no result. Nothing waits for the device, and other values of the tensors compile
    nothing anew.
    """
    from torch.nn.attention.flex_attention import BlockMask

    count = -(-seq // BLOCK)
    # The last block may be short: its last token stands for the rest.
    places = torch.arange(count * BLOCK, device=device).clamp(max=seq - 1)

    def range_of(values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Lowest and highest value in the blocks of queries, then in those of keys."""
        blocks = values[:, places].unflatten(1, (count, BLOCK))
        low, high = blocks.amin(2), blocks.amax(2)
        return low.unsqueeze(2), high.unsqueeze(2), low.unsqueeze(1), high.unsqueeze(1)

    index = torch.arange(count, device=device)
    seen = index <= index.unsqueeze(1)
    whole = (index < index.unsqueeze(1)) & (index < seq // BLOCK).unsqueeze(1)  # a short block is whole to nobody
    seen, whole = seen.unsqueeze(0), whole.unsqueeze(0)
    if branch_ids is not None:
        low, high, key_low, key_high = range_of(branch_ids)
        in_sight = (key_low <= high) & (low <= key_high)
        one_branch = (low == high) & (low == key_low)
        if context_ids is not None:
            low, high, _, _ = range_of(context_ids)
            in_sight |= (key_low <= high) & (low <= key_high)
            one_branch |= (low == high) & (low == key_low)
        seen, whole = seen & in_sight, whole & one_branch & (key_low == key_high)
    if window is not None:
        low, high, key_low, key_high = range_of(places[:seq].unsqueeze(0) if positions is None else positions)
        seen, whole = seen & (low - key_high <= window), whole & (high - key_low <= window)

    def shows(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        shown = key <= query
        if branch_ids is not None:
            branch = branch_ids[batch, key]
            same = branch == branch_ids[batch, query]
            shown = shown & (same if context_ids is None else same | (branch == context_ids[batch, query]))
        if window is not None and positions is None:
            shown = shown & (query - key <= window)
        elif window is not None and positions is not None:
            shown = shown & (positions[batch, query] - positions[batch, key] <= window)
        return shown

    return BlockMask.from_kv_blocks(
        *_ordered(seen & ~whole), *_ordered(whole), BLOCK_SIZE=BLOCK, mask_mod=shows, seq_lengths=(seq, seq)
    )


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys are true for each of queries, and their numbers first: `[batch, 1, blocks]` and
    `[batch, 1, blocks, blocks]` int32 of boolean `[batch, blocks, blocks]`."""
    chosen = blocks.unsqueeze(1).to(torch.int32)
    order = chosen.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return chosen.sum(-1, dtype=torch.int32), order
