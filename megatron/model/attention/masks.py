"""Masks of attention: within documents, within the branches of tree attention, and within windows."""

import torch
from torch import Tensor

from megatron.model.positions import distances


def document_mask(cu_seqlens: Tensor, rows: int, seq: int) -> Tensor:
    """The mask of causal attention within documents: boolean `[rows, 1, seq, seq]`, True where a query sees a
    key.

    cu_seqlens: as of `Batch`, for a micro-batch of `rows` rows.
    """
    places = torch.arange(rows * seq, dtype=torch.int32, device=cu_seqlens.device)
    return tree_attention_mask(torch.searchsorted(cu_seqlens, places, right=True).view(rows, seq))


def tree_attention_mask(branch_ids: Tensor) -> Tensor:
    """The mask of tree attention: a token sees what is before it in its own branch and in the context.

    branch_ids: `[batch, seq]`, 0 for the context, which sees itself alone. Returns boolean
    `[batch, 1, seq, seq]`.
    """
    steps = torch.arange(branch_ids.shape[1], device=branch_ids.device)
    query, key = branch_ids.unsqueeze(2), branch_ids.unsqueeze(1)
    return (((key == 0) | (key == query)) & (steps <= steps.unsqueeze(1))).unsqueeze(1)


def window_mask(seq: int, window: int | None, device: torch.device, queries: Tensor | None = None) -> Tensor:
    """The mask of causal attention within a window: boolean `[batch or 1, 1, queries, seq]`.

    A query sees the keys up to itself, at most `window` tokens before it (None: all of them).
    queries: the columns of the queries, `[batch, queries]`; None: all of seq.
    """
    distance = distances(seq, device, queries)
    causal = distance <= 0
    return causal if window is None else causal & (distance >= -window)
