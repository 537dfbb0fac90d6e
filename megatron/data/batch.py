"""The one Batch type that data hands to the model, and its making from token windows."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """One micro-batch: integer tensors of fixed sizes."""

    tokens: Tensor  # [batch, seq] int64
    labels: Tensor  # [batch, seq] int64, already shifted; 0 where masked
    loss_weights: Tensor  # [batch, seq] int64, 0 or 1
    positions: Tensor | None = None  # [batch, seq] int64; None: 0..seq-1 in every row
    cu_seqlens: Tensor | None = None  # [batch, seq + 1] int32, document starts, then seq; None: one document a row
    seed: int = 0  # of this micro-batch's dropout

    def map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """The same batch with `function` applied to every tensor."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        changed: dict[str, Any] = {name: function(value) for name, value in values if isinstance(value, Tensor)}
        return replace(self, **changed)

    def to(self, device: torch.device | str, non_blocking: bool = True) -> "Batch":
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        return self.map(Tensor.pin_memory)


def collate(
    samples: np.ndarray,
    *,
    eod: int | None = None,
    eod_mask_loss: bool = False,
    reset_attention_mask: bool = False,
    reset_position_ids: bool = False,
    seed: int = 0,
) -> Batch:
    """Next-token batch of windows [batch, seq + 1] int64.

    eod_mask_loss leaves out the positions whose input token is `eod` (NeoX): what follows a document's end is chance.
    reset_attention_mask, reset_position_ids (Megatron): documents begin after each `eod` and at the window's
    beginning; attention stays in them, positions count from 0 in each.
    """
    if eod is None and (eod_mask_loss or reset_attention_mask or reset_position_ids):
        raise ValueError("eod_mask_loss and the resets need the tokenizer's end-of-document token")
    windows = torch.from_numpy(samples)
    tokens, labels = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
    loss_weights = torch.ones_like(tokens)
    if eod_mask_loss:
        assert eod is not None
        loss_weights = (tokens != eod).long()
        labels = labels * loss_weights
    starts = _document_starts(samples[:, :-1] == eod) if reset_attention_mask or reset_position_ids else None
    positions = torch.from_numpy(_positions(starts)) if starts is not None and reset_position_ids else None
    cu_seqlens = torch.from_numpy(starts) if starts is not None and reset_attention_mask else None
    return Batch(tokens, labels, loss_weights, positions, cu_seqlens, seed)


def _document_starts(ends: np.ndarray) -> np.ndarray:
    """`Batch.cu_seqlens` from where documents end, boolean [batch, seq]."""
    rows, seq = ends.shape
    starts = np.full((rows, seq + 1), seq, dtype=np.int32)
    for row, last in enumerate(ends):
        found = np.flatnonzero(last[:-1]) + 1
        starts[row, 0], starts[row, 1 : len(found) + 1] = 0, found
    return starts


def _positions(starts: np.ndarray) -> np.ndarray:
    """Distance of every token from its document's start, [batch, seq] int64."""
    rows, seq = starts.shape[0], starts.shape[1] - 1
    begun = np.zeros((rows, seq + 1), dtype=np.int64)
    np.put_along_axis(begun, starts.astype(np.int64), starts, axis=1)
    return np.arange(seq) - np.maximum.accumulate(begun[:, :seq], axis=1)
