"""Which keys a query sees: documents, branches and windows."""

import torch
from torch import Tensor

from megatron.model.positions import distances


def document_mask(cu_seqlens: Tensor, seq: int) -> Tensor:
    """Causal attention within documents, boolean `[batch, 1, seq, seq]`, from `[batch, seq + 1]` starts."""
    steps = torch.arange(seq, dtype=torch.int32, device=cu_seqlens.device).expand(len(cu_seqlens), -1)
    return branch_mask(torch.searchsorted(cu_seqlens, steps.contiguous(), right=True))


def branch_mask(branches: Tensor) -> Tensor:
    """What is before a token in its own branch and in the context, boolean `[batch, 1, seq, seq]`.

    branches: `[batch, seq]`, 0 for the context, which sees itself alone.
    """
    steps = torch.arange(branches.shape[1], device=branches.device)
    query, key = branches.unsqueeze(2), branches.unsqueeze(1)
    return (((key == 0) | (key == query)) & (steps <= steps.unsqueeze(1))).unsqueeze(1)


def window_mask(seq: int, window: int | None, device: torch.device, queries: Tensor | None = None) -> Tensor:
    """Keys no later than their query and at most `window` before it, boolean `[batch or 1, 1, queries, seq]`.

    queries: their places `[batch, queries]`; None: all of seq.
    """
    distance = distances(seq, device, queries)
    causal = distance <= 0
    return causal if window is None else causal & (distance >= -window)
