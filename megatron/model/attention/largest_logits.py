"""Finds the largest attention logit of each head, which attention kernels do not tell."""

import math

import torch
from torch import Tensor, nn

from megatron.model.attention.inputs import AttentionInputs
from megatron.model.attention.masks import document_ids

_LOGITS_AT_ONCE = 1 << 24


class LogitWatch(nn.Module):
    """Keeps the largest attention logit of each head since `largest` was last set to None.

    Logits are scaled, and of the pairs of queries and keys that attention sees. They are computed again
    beside the kernel, for some queries at a time.

    scale: the factor of logits. largest: fp32 `[heads]`; None before the first micro-batch.
    """

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.largest: Tensor | None = None

    @torch.no_grad()
    def forward(self, q: Tensor, k: Tensor, inputs: AttentionInputs) -> None:
        """Takes the queries and keys of a micro-batch, `[seq, batch, heads or kv_heads, head_dim]`."""
        seq, rows, heads, _ = q.shape
        kv_heads = k.shape[2]
        queries = q.permute(1, 2, 0, 3).unflatten(1, (kv_heads, heads // kv_heads))
        keys = k.permute(1, 2, 3, 0).unsqueeze(2)
        for columns in torch.arange(seq, device=q.device).split(max(1, _LOGITS_AT_ONCE // (rows * heads * seq))):
            logits = (queries[:, :, :, columns] @ keys).float() * self.scale
            is_seen = _visible(inputs, rows, seq, columns)
            largest = logits.masked_fill(~is_seen.unsqueeze(2), -math.inf).amax((0, 3, 4)).flatten()
            self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)


def _visible(inputs: AttentionInputs, rows: int, seq: int, columns: Tensor) -> Tensor:
    """Returns which keys the queries at these columns see: boolean `[rows or 1, 1, columns, seq]`."""
    keys = torch.arange(seq, device=columns.device)
    if inputs.blocks is not None:
        row, zero = torch.arange(rows, device=columns.device).view(-1, 1, 1, 1), columns.new_zeros(1, 1, 1, 1)
        visible = inputs.blocks.mask_mod(row, zero, columns.view(1, 1, -1, 1), keys.view(1, 1, 1, -1))
        return visible & (keys <= columns.unsqueeze(1))
    if inputs.mask is not None:
        return inputs.mask[:, :, columns]
    causal = keys <= columns.unsqueeze(1)
    if inputs.cu_seqlens is None:
        return causal.view(1, 1, len(columns), seq)
    documents = document_ids(inputs.cu_seqlens, rows, seq)
    visible = causal & (documents[:, columns].unsqueeze(2) == documents.unsqueeze(1))
    if inputs.window >= 0:
        visible &= columns.unsqueeze(1) - keys <= inputs.window
    return visible.unsqueeze(1)
