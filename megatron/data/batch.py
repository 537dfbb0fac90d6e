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


def collate(samples: np.ndarray, *, eod: int | None = None, eod_mask_loss: bool = False, seed: int = 0) -> Batch:
    """Next-token batch of windows [batch, seq + 1] int64.

    eod_mask_loss leaves out the positions whose input token is `eod` (NeoX): what follows a document's end is chance.
    """
    windows = torch.from_numpy(samples)
    tokens, labels = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
    loss_weights = torch.ones_like(tokens)
    if eod_mask_loss:
        if eod is None:
            raise ValueError("eod_mask_loss needs the tokenizer's end-of-document token")
        loss_weights = (tokens != eod).long()
        labels = labels * loss_weights
    return Batch(tokens, labels, loss_weights, seed=seed)
