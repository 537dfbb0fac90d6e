"""Attention masks for documents, branches of trees, and windows: as dense tensors, and as block masks for
FlexAttention."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron.model.positions import distances

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # FlexAttention's mask has blocks of this many queries times this many keys


def document_ids(cu_seqlens: Tensor, rows: int, seq: int) -> Tensor:
    """Returns the number of each token's document, counted from 1 over the micro-batch: `[rows, seq]` int32.

    cu_seqlens: `[n]` int32, starts of documents in the flattened `[rows * seq]` batch, then its end
        (`Documents`).
    """
    places = torch.arange(rows * seq, dtype=torch.int32, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens, places, right=True, out_int32=True).view(rows, seq)


def document_mask(cu_seqlens: Tensor, rows: int, seq: int) -> Tensor:
    """Returns the mask of causal attention within documents, boolean `[rows, 1, seq, seq]`; True: the query
    sees the key.

    cu_seqlens: `[n]` int32, starts of documents in the flattened `[rows * seq]` batch, then its end
        (`Documents`).
    """
    documents = document_ids(cu_seqlens, rows, seq)
    return tree_attention_mask(documents, documents)


def prefix_ids(cu_seqlens: Tensor, written_out: Tensor, rows: int, seq: int) -> tuple[Tensor, Tensor]:
    """Returns the branch and context ids `[rows, seq]` of documents that share prefixes, for
    `tree_attention_mask`.

    A document may share its first tokens with the document before it, which alone stores them. The shared
    tokens form a branch of their own, and are the context of all other tokens of both documents.

    cu_seqlens: `[n]` int32, starts of documents in the flattened batch, then its end.
    written_out: `SharedPrefixes.cu_seqlens`, the same starts as if each document stored its prefix.
    """
    document = document_ids(cu_seqlens, rows, seq) - 1
    prefix = written_out.diff() - cu_seqlens.diff()
    shared_next = torch.cat([prefix[1:], prefix.new_zeros(1)])  # the length that the next document shares with this one
    places = torch.arange(rows * seq, dtype=torch.int32, device=cu_seqlens.device).view(rows, seq)
    branch = 2 * document + (places - cu_seqlens[document] >= shared_next[document])
    context = 2 * (document - (prefix[document] > 0).int())
    return branch, context


def tree_attention_mask(branch_ids: Tensor, context_ids: Tensor, queries: Tensor | None = None) -> Tensor:
    """Returns the mask of tree attention, boolean `[batch, 1, queries, seq]`; True: the query sees the key.

    A token sees itself and the earlier tokens of its own branch and of its context branch.

    branch_ids: `[batch, seq]`, the branch of every token; numbers are unique within a row.
    context_ids: `[batch, seq]`, the branch that the token's branch continues; its own branch if it continues
        none.
    queries: `[queries]`, the columns of the queries; None: all columns.
    """
    steps = torch.arange(branch_ids.shape[1], device=branch_ids.device)
    columns, branch, context = steps, branch_ids, context_ids
    if queries is not None:
        columns, branch, context = queries, branch_ids[:, queries], context_ids[:, queries]
    branch, context, key = branch.unsqueeze(2), context.unsqueeze(2), branch_ids.unsqueeze(1)
    return (((key == branch) | (key == context)) & (steps <= columns.unsqueeze(1))).unsqueeze(1)


def window_mask(seq: int, window: int | None, device: torch.device, queries: Tensor | None = None) -> Tensor:
    """Returns the mask of causal attention within a window, boolean `[batch or 1, 1, queries, seq]`; True:
    visible.

    A query sees its own key and at most `window` keys before it (None: all before it).

    queries: the columns of the queries, `[batch, queries]`; None: all columns of seq.
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
    queries: Tensor | None = None,
) -> "BlockMask":
    """Returns FlexAttention's block mask for causal attention within a window and within the branches of
    trees.

    It lists the blocks of queries and keys to compute, and has a function that decides each (query, key) in
    partly masked blocks.

    window: number of keys before its own that a query sees; None: all.
    positions: `[batch, seq]`, the positions that `window` counts; None: columns of the row.
    branch_ids, context_ids: `[batch, seq]`, as in `tree_attention_mask`; branch_ids None: one branch per row;
        context_ids None: no branch continues another.
    queries: `[queries]`, the columns of the queries; None: all columns of seq.

    Memory grows with the square of the number of blocks; torch's `create_block_mask` needs the square of the
    number of tokens. Whether a block is visible is decided by the lowest and highest id in it, so unsorted
    ids cost time but do not change results. The host does not wait for the device, and new values in these
    tensors cause no recompilation.
    """
    from torch.nn.attention.flex_attention import BlockMask

    # The last block may be short: its last token is repeated to fill it.
    length = seq if queries is None else len(queries)
    index = torch.arange(-(-length // BLOCK) * BLOCK, device=device).clamp(max=length - 1)
    places = torch.arange(-(-seq // BLOCK) * BLOCK, device=device).clamp(max=seq - 1)
    columns = index if queries is None else queries[index]

    def range_of(values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the lowest and highest value in each block of queries, then in each block of keys."""
        blocks, key_blocks = (values[:, i].unflatten(1, (-1, BLOCK)) for i in (columns, places))
        low, high, key_low, key_high = blocks.amin(2), blocks.amax(2), key_blocks.amin(2), key_blocks.amax(2)
        return low.unsqueeze(2), high.unsqueeze(2), key_low.unsqueeze(1), key_high.unsqueeze(1)

    low, high, key_low, key_high = range_of(places[:seq].unsqueeze(0))
    visible, full = key_low <= high, key_high < low
    is_long = torch.arange(visible.shape[1], device=device) < length // BLOCK  # a short block is never fully visible
    full = full & is_long.unsqueeze(1)
    if branch_ids is not None:
        low, high, key_low, key_high = range_of(branch_ids)
        in_sight = (key_low <= high) & (low <= key_high)
        one_branch = (low == high) & (low == key_low)
        if context_ids is not None:
            low, high, _, _ = range_of(context_ids)
            in_sight |= (key_low <= high) & (low <= key_high)
            one_branch |= (low == high) & (low == key_low)
        visible, full = visible & in_sight, full & one_branch & (key_low == key_high)
    if window is not None:
        low, high, key_low, key_high = range_of(places[:seq].unsqueeze(0) if positions is None else positions)
        visible, full = visible & (low - key_high <= window), full & (high - key_low <= window)

    def is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        query = query if queries is None else queries[query]
        visible_key = key <= query
        if branch_ids is not None:
            branch = branch_ids[batch, key]
            same_branch = branch == branch_ids[batch, query]
            visible_key = visible_key & (
                same_branch if context_ids is None else same_branch | (branch == context_ids[batch, query])
            )
        if window is not None and positions is None:
            visible_key = visible_key & (query - key <= window)
        elif window is not None and positions is not None:
            visible_key = visible_key & (positions[batch, query] - positions[batch, key] <= window)
        return visible_key

    return BlockMask.from_kv_blocks(
        *_ordered(visible & ~full), *_ordered(full), BLOCK_SIZE=BLOCK, mask_mod=is_visible, seq_lengths=(length, seq)
    )


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns, for each block of queries, the number of True key blocks, and the indices of all key blocks,
    True ones first.

    blocks: boolean `[batch, blocks, blocks]`. Returns int32 `[batch, 1, blocks]` and `[batch, 1, blocks,
        blocks]`.
    """
    chosen = blocks.unsqueeze(1).to(torch.int32)
    order = chosen.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return chosen.sum(-1, dtype=torch.int32), order
