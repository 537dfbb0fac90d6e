"""The inputs of attention other than hidden states: rotary tables, masks and document boundaries.

They are computed once for all blocks that need the same ones. Each kind of batch has its function:
`text_inputs`: full texts, as in training;
`cached_inputs`: tokens that continue texts whose keys and values are in a cache;
`tree_inputs`: rows in which several continuations share a context.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megatron.data import Batch, DataError
from megatron.data.batch import KeysPart
from megatron.model.attention.masks import (
    block_mask,
    document_ids,
    document_mask,
    prefix_ids,
    tree_attention_mask,
    window_mask,
)
from megatron.model.attention.ring import RingBlock
from megatron.model.positions import Rope, rope_tables
from megatron.model.specs import AttentionSpec
from megatron.mpu import ContextRank

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_MOST_DOCUMENTS = 65_535  # CUDA's limit of the grid's second dimension, in which the kernels enumerate documents
BiasFunction = Callable[[int, Tensor | None, Tensor | None], Tensor | None]
"""A function of sequence length, `positions` and `distance` (see `positions.alibi_bias`). It returns the bias
that is added to attention logits, or None for no bias."""


class KeyRuns(NamedTuple):
    """How the keys of a context rank are divided over its runs of queries, see `data.batch.QueryRuns`.

    starts: `[n]` int32, starts of the runs' keys.
    longest: an empty tensor `[max_keys, 0]`, as `AttentionInputs.longest`.
    """

    starts: Tensor
    longest: Tensor


class HeadsOrder(NamedTuple):
    """How context ranks exchange heads for columns: `order` and `places` of `data.batch.HeadsPart`."""

    order: Tensor
    places: Tensor


class AttentionInputs(NamedTuple):
    """The inputs that blocks with equal `AttentionSpec.inputs` share, made once per stage and micro-batch.

    rope: cos and sin tables of rotary positions; None without rotary positions.
    mask: additive or boolean `[batch or 1, heads or 1, seq, keys]`; None: only causal.
    cu_seqlens: `[n]` int32, the starts of documents in the flattened batch, then its end; set if
        `AttentionBackends.form` returns cu_seqlens.
    longest: with cu_seqlens, an empty tensor `[max_seqlen, 0]`, whose first size is the length of the longest
        document. A size may be dynamic in compiled code; a number would be recompiled for each value.
    window: with cu_seqlens, the number of keys before its own that a query sees; -1: all.
    blocks: FlexAttention's mask from `masks.block_mask`; then mask and cu_seqlens are None.
    columns: `[batch, seq]`, the columns of these tokens in the cache; None in training and at a text's start.
    written_out, own_places: with cu_seqlens and documents that share prefixes, `SharedPrefixes.places` and
        `own_places`. cu_seqlens and longest then count each document with its prefix repeated.
    key_index: int64, for each key of this rank's queries its position in the (column, row) pairs of context
        ranks, laid end to end; None: keys are not gathered. `[seq, batch]` for keys of full rows; with
        cu_seqlens `[keys, 1]`, run after run. cu_seqlens and longest then describe runs of queries.
    runs: with cu_seqlens and key_index, how keys are divided over runs.
    ring: for keys that go round the context ranks, see `ring.ring_attention`.
    heads: how context ranks exchange heads for columns; None: they do not.
    filled: `[batch]` int64, positions of each row before its padding, for `LogitWatch`; None: no padding, or
        nothing is watched.
    """

    rope: Rope | None = None
    mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    longest: Tensor | None = None
    window: int = -1
    blocks: "BlockMask | None" = None
    columns: Tensor | None = None
    written_out: Tensor | None = None
    own_places: Tensor | None = None
    key_index: Tensor | None = None
    runs: KeyRuns | None = None
    ring: tuple[RingBlock, ...] = ()
    heads: HeadsOrder | None = None
    filled: Tensor | None = None


def text_inputs(
    spec: AttentionSpec,
    batch: Batch,
    positions: Tensor,
    lengths: Tensor | None,
    form: str | None,
    bias: BiasFunction,
    context: ContextRank | None = None,
) -> AttentionInputs:
    """Returns the attention inputs for full texts, as in training.

    positions: `[batch, seq]`, of the columns that this context rank computes.
    context: these columns; None: all.
    lengths: `[batch]`, the number of tokens of each row's text; None: texts fill their rows.
    form: the field that the backend reads: cu_seqlens or blocks; None: a mask.
    bias: computes position biases of the logits.
    """
    (rows, seq), device = batch.tokens.shape, batch.tokens.device
    window, documents = spec.window, batch.documents
    starts, prefixes = (None, None) if documents is None else (documents.cu_seqlens, documents.prefixes)
    if starts is not None and prefixes is not None and form != "cu_seqlens":
        branch_ids, context_ids = prefix_ids(starts, prefixes.cu_seqlens, rows, seq)
        full = positions if batch.positions is None else batch.positions
        keys = None if batch.context is None else batch.context.keys
        return tree_inputs(spec, full, branch_ids, context_ids, seq, form, bias, positions, keys)
    rope = _rope(spec, positions, _text_lengths(spec, starts, rows, seq, lengths, context))
    if batch.context is not None and batch.context.keys is not None:
        return _context_inputs(spec, batch, batch.context.keys, rope, form, bias)
    if form == "blocks":
        ids = None if starts is None else document_ids(starts, rows, seq)
        return AttentionInputs(rope, blocks=block_mask(seq, device, window, branch_ids=ids))
    if form == "cu_seqlens":
        if documents is None:
            cu_seqlens, max_seqlen = torch.arange(0, (rows + 1) * seq, seq, device=device, dtype=torch.int32), seq
        else:
            cu_seqlens, max_seqlen = documents.cu_seqlens, documents.max_seqlen
        if device.type == "cuda" and len(cu_seqlens) - 1 > _MOST_DOCUMENTS:
            raise DataError(
                f"a micro-batch has {len(cu_seqlens) - 1} documents, but the attention kernel supports at most "
                f"{_MOST_DOCUMENTS}; lower train_micro_batch_size_per_gpu, or set attention_backend: flex"
            )
        places, own_places = None, None
        if prefixes is not None:
            cu_seqlens, max_seqlen, places, own_places = (
                prefixes.cu_seqlens, prefixes.max_seqlen, prefixes.places, prefixes.own_places
            )  # fmt: skip
        longest = torch.empty(max_seqlen, 0, device=device)
        return AttentionInputs(
            rope, None, cu_seqlens, longest, -1 if window is None else window, written_out=places, own_places=own_places
        )  # fmt: skip
    mask = None if starts is None else document_mask(starts, rows, seq)
    if window is not None:
        in_window = window_mask(seq, window, device)
        mask = in_window if mask is None else mask & in_window
    return AttentionInputs(rope, _added(bias(seq, None, None), mask))


def _context_inputs(
    spec: AttentionSpec, batch: Batch, keys: KeysPart, rope: Rope | None, form: str | None, bias: BiasFunction
) -> AttentionInputs:
    """Returns the attention inputs for queries at the columns `keys.queries` of full texts. Other arguments
    are as in `text_inputs`."""
    (rows, seq), device, window, runs = batch.tokens.shape, batch.tokens.device, spec.window, keys.runs
    if keys.blocks and spec.fits_ring:
        blocks = ((block.query_places, block.runs) for block in keys.blocks)
        return AttentionInputs(rope, ring=tuple(
            RingBlock(places, r.key_places, r.cu_seqlens, r.key_starts, (r.max_seqlen, r.max_keys))
            for places, r in blocks
        ))  # fmt: skip
    if form == "cu_seqlens":
        longest, longest_keys = (torch.empty(size, 0, device=device) for size in (runs.max_seqlen, runs.max_keys))
        index = keys.order[runs.key_places % seq] * rows + runs.key_places // seq
        return AttentionInputs(
            rope, None, runs.cu_seqlens, longest, -1 if window is None else window,
            key_index=index.unsqueeze(1), runs=KeyRuns(runs.key_starts, longest_keys),
        )  # fmt: skip
    ids = None if batch.documents is None else document_ids(batch.documents.cu_seqlens, rows, seq)
    if form == "blocks":
        mask_blocks = block_mask(seq, device, window, branch_ids=ids, queries=keys.queries)
        return AttentionInputs(rope, blocks=mask_blocks, key_index=_row_index(keys.order, rows))
    columns = keys.queries.unsqueeze(0)
    mask = window_mask(seq, window, device, columns)
    if ids is not None:
        mask = mask & tree_attention_mask(ids, ids, keys.queries)
    return AttentionInputs(rope, _added(bias(seq, columns, None), mask), key_index=_row_index(keys.order, rows))


def _row_index(order: Tensor, rows: int) -> Tensor:
    """Returns `AttentionInputs.key_index` of full rows, `[seq, rows]`. order: `KeysPart.order`."""
    return order.unsqueeze(1) * rows + torch.arange(rows, device=order.device)


def cached_inputs(
    spec: AttentionSpec, positions: Tensor, lengths: Tensor | None, keys: int, dtype: torch.dtype, bias: BiasFunction
) -> AttentionInputs:
    """Returns the attention inputs for tokens that continue texts whose keys and values are in a cache.

    positions: `[batch, seq]`, also the tokens' columns in the cache.
    lengths: `[batch]`, the number of tokens of each row's full text; None: texts end with these tokens.
    keys: number of columns of the cache.
    dtype: of the weights.
    bias: computes position biases of the logits.
    """
    rope = _rope(spec, positions, positions.amax(1, keepdim=True) + 1 if lengths is None else lengths.unsqueeze(1))
    mask, added = window_mask(keys, spec.window, positions.device, positions), bias(keys, positions, None)
    if added is None:  # converts the mask once here, instead of in every block
        added = torch.zeros_like(mask, dtype=dtype)
    return AttentionInputs(rope, _added(added, mask), columns=positions)


def tree_inputs(
    spec: AttentionSpec,
    positions: Tensor,
    branch_ids: Tensor,
    context_ids: Tensor,
    length: int | Tensor,
    form: str | None,
    bias: BiasFunction,
    rope_positions: Tensor | None = None,
    keys: KeysPart | None = None,
) -> AttentionInputs:
    """Returns the attention inputs for rows in which several continuations (branches) share a context.

    positions: `[batch, seq]`; each branch continues the context's positions. A window counts positions.
    branch_ids, context_ids: `[batch, seq]`, the branch of each token, and the branch which that one
        continues.
    length: number of tokens of the texts, for rotary scalings that depend on it: a number or `[batch, 1]`.
    form: the field that the backend reads: blocks; None: a mask.
    bias: computes position biases of the logits.
    rope_positions: of the columns that this context rank computes; None: all.
    keys: the columns of the queries of this context rank; None: all.
    """
    columns, index = (None, None) if keys is None else (keys.queries, _row_index(keys.order, len(positions)))
    rope = _rope(spec, positions if rope_positions is None else rope_positions, length)
    seq, device, queries = positions.shape[1], positions.device, positions if columns is None else positions[:, columns]
    if form == "blocks":
        blocks = block_mask(seq, device, spec.window, positions, branch_ids, context_ids, columns)
        return AttentionInputs(rope, blocks=blocks, key_index=index)
    distance = (positions.unsqueeze(1) - queries.unsqueeze(2)).unsqueeze(1)
    mask = tree_attention_mask(branch_ids, context_ids, columns)
    if spec.window is not None:
        mask = mask & (distance >= -spec.window)
    return AttentionInputs(rope, _added(bias(seq, None, distance), mask), key_index=index)


def _text_lengths(
    spec: AttentionSpec,
    documents: Tensor | None,
    rows: int,
    seq: int,
    lengths: Tensor | None,
    context: ContextRank | None,
) -> int | Tensor:
    """Returns the text lengths for `rope_frequencies`: `[batch, 1]`, or a number if all texts fill their
    rows.

    With packed documents, and rotary scaling that depends on the length, it is `[batch, seq]`, the length of
    each token's document, of the columns that this context rank computes.
    """
    if lengths is not None:
        return lengths.unsqueeze(1)
    if documents is None or spec.rotary is None or not spec.rotary.length_dependent:
        return seq
    document_lengths = documents.diff()[document_ids(documents, rows, seq) - 1]
    return document_lengths if context is None else document_lengths[:, context.columns]


def _rope(spec: AttentionSpec, positions: Tensor, length: int | Tensor) -> Rope | None:
    return None if spec.rotary is None else rope_tables(spec.rotary, positions, length)


def _added(bias: Tensor | None, mask: Tensor | None) -> Tensor | None:
    if bias is None or mask is None:
        return mask if bias is None else bias
    return bias.masked_fill(~mask, float("-inf"))
