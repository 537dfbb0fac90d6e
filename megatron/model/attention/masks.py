"""Which keys a query sees: documents and windows."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.model.positions import distances


def document_mask(cu_seqlens: Tensor, seq: int) -> Tensor:
    """Causal attention within documents, boolean `[batch, 1, seq, seq]`, from `[batch, seq + 1]` starts."""
    steps = torch.arange(seq, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens, steps.int().expand(cu_seqlens.shape[0], -1).contiguous(), right=True)
    same = document.unsqueeze(2) == document.unsqueeze(1)
    return (same & (steps.unsqueeze(0) <= steps.unsqueeze(1))).unsqueeze(1)


def window_mask(seq: int, window: int | None, device: torch.device, queries: Tensor | None = None) -> Tensor:
    """Keys no later than their query and at most `window` before it, boolean `[batch or 1, 1, queries, seq]`.

    queries: their places `[batch, queries]`; None: all of seq.
    """
    distance = distances(seq, device, queries)
    causal = distance <= 0
    return causal if window is None else causal & (distance >= -window)
