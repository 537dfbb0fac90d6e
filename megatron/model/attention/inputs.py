"""The inputs of attention beside hidden states: rotary tables, masks and document boundaries.

They are made once for all blocks whose specs agree. There is a function for each of three kinds of batches:
texts from their beginning, as in training; tokens that continue a key-value cache; and trees, in which
several continuations share the context before them.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megatron.data import Batch, DataError
from megatron.model.attention.masks import (
    block_mask,
    document_ids,
    document_mask,
    prefix_ids,
    tree_attention_mask,
    window_mask,
)
from megatron.model.positions import Rope, rope_tables
from megatron.model.specs import AttentionSpec

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_MOST_DOCUMENTS = 65_535  # the kernels start blocks for each in the second dimension of their grid
BiasFunction = Callable[[int, Tensor | None, Tensor | None], Tensor | None]
"""From the length of a sequence, `columns` and `distance` (see `positions.alibi_bias`) to the bias that is
added to attention logits; None for no bias."""


class AttentionInputs(NamedTuple):
    """The inputs that blocks with equal `AttentionSpec.inputs` share for one micro-batch, made once in each
    stage.

    rope: tables of `positions.rope_tables`, None without rotary positions.
    mask: additive or boolean `[batch or 1, heads or 1, seq, keys]`; None means plainly causal.
    cu_seqlens: `[n]` int32, document starts over the flattened batch and its end, as of `Batch`, where
    `AttentionBackends.form` is cu_seqlens. longest: with cu_seqlens, `[max_seqlen, 0]`, whose size is the
    number of tokens of the longest document: compiled code takes a size for any, a number for one. window:
    with cu_seqlens, how many keys before itself a query sees; -1: all.
    blocks: what `masks.block_mask` shows, instead of the mask and the documents, where the backend's `form`
    is blocks.
    columns: `[batch, seq]`, where in a cache these tokens go; None in training and for a text's beginning.
    written_out, own: with cu_seqlens, where documents share prefixes, `SharedPrefixes.places` and `own`;
    cu_seqlens and longest then are those of documents written out.
    """

    rope: Rope | None = None
    mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    longest: Tensor | None = None
    window: int = -1
    blocks: "BlockMask | None" = None
    columns: Tensor | None = None
    written_out: Tensor | None = None
    own: Tensor | None = None


def text_inputs(
    spec: AttentionSpec,
    batch: Batch,
    positions: Tensor,
    lengths: Tensor | None,
    form: str | None,
    bias: BiasFunction,
) -> AttentionInputs:
    """The inputs for texts from their beginning.

    lengths: `[batch]`, tokens of the text of each row; None: rows are as long as their texts.
    form: as of `AttentionBackends.form`.
    """
    (rows, seq), device = batch.tokens.shape, batch.tokens.device
    window, documents, prefixes = spec.window, batch.cu_seqlens, batch.prefixes
    if documents is not None and prefixes is not None and form != "cu_seqlens":
        branch_ids, context_ids = prefix_ids(documents, prefixes.cu_seqlens, rows, seq)
        return tree_inputs(spec, positions, branch_ids, context_ids, seq, form, bias)
    rope = _rope(spec, positions, _text_lengths(spec, documents, rows, seq, lengths))
    if form == "blocks":
        ids = None if documents is None else document_ids(documents, rows, seq)
        return AttentionInputs(rope, blocks=block_mask(seq, device, window, branch_ids=ids))
    if form == "cu_seqlens":
        cu_seqlens, max_seqlen = documents, batch.max_seqlen
        if cu_seqlens is None:
            cu_seqlens, max_seqlen = torch.arange(0, (rows + 1) * seq, seq, device=device, dtype=torch.int32), seq
        if device.type == "cuda" and len(cu_seqlens) - 1 > _MOST_DOCUMENTS:
            raise DataError(
                f"a micro-batch of {len(cu_seqlens) - 1} documents: this kernel takes {_MOST_DOCUMENTS}; "
                "lower train_micro_batch_size_per_gpu, or set attention_backend: flex"
            )
        places, own = None, None
        if prefixes is not None:
            cu_seqlens, max_seqlen, places, own = (
                prefixes.cu_seqlens, prefixes.max_seqlen, prefixes.places, prefixes.own
            )  # fmt: skip
        longest = torch.empty(max_seqlen, 0, device=device)
        return AttentionInputs(
            rope, None, cu_seqlens, longest, -1 if window is None else window, written_out=places, own=own
        )  # fmt: skip
    mask = None if documents is None else document_mask(documents, rows, seq)
    if window is not None:
        near = window_mask(seq, window, device)
        mask = near if mask is None else mask & near
    return AttentionInputs(rope, _added(bias(seq, None, None), mask))


def cached_inputs(
    spec: AttentionSpec,
    positions: Tensor,
    lengths: Tensor | None,
    keys: int,
    dtype: torch.dtype,
    bias: BiasFunction,
) -> AttentionInputs:
    """The inputs for tokens that continue texts in a key-value cache.

    keys: number of columns of the cache. lengths: as of `text_inputs`; None: texts end with these tokens.
    dtype: of the weights.
    """
    rope = _rope(spec, positions, positions.amax(1, keepdim=True) + 1 if lengths is None else lengths.unsqueeze(1))
    mask, added = window_mask(keys, spec.window, positions.device, positions), bias(keys, positions, None)
    if added is None:  # else every block would make its own of it
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
) -> AttentionInputs:
    """The inputs for rows in which several continuations share a context.

    branch_ids, context_ids: `[batch, seq]`, as of `tree_attention_mask`; positions count on from the context
    in every branch, and a window counts by them. length: of the texts, for rotary positions that stretch with
    it, one number or `[batch, 1]`. form: as of `AttentionBackends.form`.
    """
    rope, seq, device = _rope(spec, positions, length), positions.shape[1], positions.device
    if form == "blocks":
        return AttentionInputs(
            rope, blocks=block_mask(seq, device, spec.window, positions, branch_ids, context_ids)
        )  # fmt: skip
    distance = (positions.unsqueeze(1) - positions.unsqueeze(2)).unsqueeze(1)
    mask = tree_attention_mask(branch_ids, context_ids)
    if spec.window is not None:
        mask = mask & (distance >= -spec.window)
    return AttentionInputs(rope, _added(bias(seq, None, distance), mask))


def _text_lengths(
    spec: AttentionSpec, documents: Tensor | None, rows: int, seq: int, lengths: Tensor | None
) -> int | Tensor:
    """The lengths of the texts, as of `rope_frequencies`: those of documents where rows hold several."""
    if lengths is not None:
        return lengths.unsqueeze(1)
    if documents is None or spec.rotary is None or not spec.rotary.by_length:
        return seq
    return documents.diff()[document_ids(documents, rows, seq) - 1]


def _rope(spec: AttentionSpec, positions: Tensor, length: int | Tensor) -> Rope | None:
    if spec.rotary is None:
        return None
    return rope_tables(spec.rotary, positions, length)


def _added(bias: Tensor | None, mask: Tensor | None) -> Tensor | None:
    if bias is None or mask is None:
        return mask if bias is None else bias
    return bias.masked_fill(~mask, float("-inf"))
