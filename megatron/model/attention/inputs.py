"""The inputs of attention beside hidden states: rotary tables, masks and document boundaries.

They are made once for all blocks whose specs agree. There is a function for each of three kinds of batches:
texts from their beginning, as in training; tokens that continue a key-value cache; and tree attention, in
which several continuations share the context before them.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.data import Batch, DataError
from megatron.model.attention.masks import document_mask, tree_attention_mask, window_mask
from megatron.model.positions import Rope, rope_frequencies, rope_tables
from megatron.model.specs import AttentionSpec

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
    `AttentionBackends.supports_varlen`. longest: with cu_seqlens, `[max_seqlen, 0]`, whose size is the number
    of tokens of the longest document: compiled code takes a size for any, a number for one. window: with
    cu_seqlens, how many keys before itself a query sees; -1: all.
    columns: `[batch, seq]`, where in a cache these tokens go; None in training and for a text's beginning.
    """

    rope: Rope | None = None
    mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    longest: Tensor | None = None
    window: int = -1
    columns: Tensor | None = None


def text_inputs(
    spec: AttentionSpec,
    batch: Batch,
    positions: Tensor,
    last: Tensor | None,
    unmasked: bool,
    bias: BiasFunction,
) -> AttentionInputs:
    """The inputs for texts from their beginning.

    last: `[batch]`, the index of the last token of each row where rows are padded; None: they are not.
    unmasked: whether documents and windows run without a mask.
    """
    (rows, seq), device, window, documents = (
        batch.tokens.shape,
        batch.tokens.device,
        spec.window,
        batch.cu_seqlens,
    )
    rope = _rope(spec, positions, seq if last is None else (last + 1).unsqueeze(1))
    if unmasked and (documents is not None or window is not None):
        cu_seqlens, max_seqlen = documents, batch.max_seqlen
        if cu_seqlens is None:
            cu_seqlens, max_seqlen = torch.arange(0, (rows + 1) * seq, seq, device=device, dtype=torch.int32), seq
        if device.type == "cuda" and len(cu_seqlens) - 1 > _MOST_DOCUMENTS:
            raise DataError(
                f"a micro-batch of {len(cu_seqlens) - 1} documents: attention on a GPU takes {_MOST_DOCUMENTS}; "
                "lower train_micro_batch_size_per_gpu"
            )
        longest = torch.empty(max_seqlen, 0, device=device)
        return AttentionInputs(rope, None, cu_seqlens, longest, -1 if window is None else window)
    mask = None if documents is None else document_mask(documents, rows, seq)
    if window is not None:
        near = window_mask(seq, window, device)
        mask = near if mask is None else mask & near
    return AttentionInputs(rope, _added(bias(seq, None, None), mask))


def cached_inputs(
    spec: AttentionSpec,
    positions: Tensor,
    last: Tensor | None,
    keys: int,
    dtype: torch.dtype,
    bias: BiasFunction,
) -> AttentionInputs:
    """The inputs for tokens that continue texts in a key-value cache.

    keys: number of columns of the cache. last: as of `text_inputs`. dtype: of the weights.
    """
    rope = _rope(spec, positions, positions.shape[1] if last is None else (last + 1).unsqueeze(1))
    mask, added = window_mask(keys, spec.window, positions.device, positions), bias(keys, positions, None)
    if added is None:  # else every block would make its own of it
        added = torch.zeros_like(mask, dtype=dtype)
    return AttentionInputs(rope, _added(added, mask), columns=positions)


def tree_attention_inputs(
    spec: AttentionSpec, positions: Tensor, branch_ids: Tensor, bias: BiasFunction
) -> AttentionInputs:
    """The inputs for rows in which several continuations share a context.

    branch_ids: `[batch, seq]`, as of `InferenceContext`; positions count on from the context in every branch.
    """
    rope = _rope(spec, positions, positions.amax(1, keepdim=True) + 1)
    distance, mask = (
        (positions.unsqueeze(1) - positions.unsqueeze(2)).unsqueeze(1),
        tree_attention_mask(branch_ids),
    )
    if spec.window is not None:
        mask = mask & (distance >= -spec.window)
    return AttentionInputs(rope, _added(bias(positions.shape[1], None, distance), mask))


def _rope(spec: AttentionSpec, positions: Tensor, length: int | Tensor) -> Rope | None:
    if spec.rotary is None:
        return None
    return rope_tables(positions, *rope_frequencies(spec.rotary, length, positions.device))


def _added(bias: Tensor | None, mask: Tensor | None) -> Tensor | None:
    if bias is None or mask is None:
        return mask if bias is None else bias
    return bias.masked_fill(~mask, float("-inf"))
