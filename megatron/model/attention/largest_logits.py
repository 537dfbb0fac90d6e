"""Finds the largest attention logit of each head, which attention kernels do not tell."""

import math

import torch
from torch import Tensor, nn

from megatron.model.attention.inputs import AttentionInputs
from megatron.model.attention.masks import document_ids

_LOGITS_AT_ONCE = 1 << 24


class LogitWatch(nn.Module):
    """Keeps the largest attention logit of each head since `largest` was last set to None.

    Logits are scaled, and of the pairs of queries and keys that attention sees. Queries of padding are left
    out; its keys follow every other query. Logits are computed again beside the kernel, for some queries at a
    time.

    scale: the factor of logits. largest: fp32 `[heads]`, -inf if all is padding; None before
        the first micro-batch.
    """

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.largest: Tensor | None = None

    @torch.no_grad()
    def forward(self, q: Tensor, k: Tensor, inputs: AttentionInputs) -> None:
        """Takes the queries and keys of a micro-batch, `[seq, batch, heads or kv_heads, head_dim]`."""
        seq, rows, heads, _ = q.shape
        share = heads // k.shape[2]
        # Scaled before the product, which could overflow in fp16. Heads that share keys are rows of one
        # product.
        queries = (q * self.scale).permute(1, 2, 0, 3).unflatten(1, (-1, share))
        keys = k.permute(1, 2, 3, 0)
        documents = None if inputs.cu_seqlens is None else document_ids(inputs.cu_seqlens, rows, seq)
        at_once = max(1, _LOGITS_AT_ONCE // (rows * heads * seq))
        for start in range(0, seq, at_once):
            end = min(start + at_once, seq)
            logits = queries[:, :, :, start:end].flatten(2, 3) @ keys[..., :end]
            hidden = ~_visible(inputs, documents, rows, start, end, q.device)
            if inputs.filled is not None:
                columns = torch.arange(start, end, device=q.device)
                hidden = hidden | (columns >= inputs.filled.unsqueeze(1)).view(rows, 1, -1, 1)
            logits = logits.unflatten(2, (share, end - start)).float().masked_fill(hidden.unsqueeze(2), -math.inf)
            largest = logits.amax((0, 3, 4)).flatten()
            self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)


def _visible(
    inputs: AttentionInputs, documents: Tensor | None, rows: int, start: int, end: int, device: torch.device
) -> Tensor:
    """Returns which keys the queries from `start` to `end` see, of the keys before `end`.

    Returns boolean `[rows or 1, 1, queries, keys]`. documents: `[rows, seq]`, the number of each token's
    document, with `inputs.cu_seqlens`.
    """
    keys = torch.arange(end, device=device)
    columns = keys[start:]
    if inputs.blocks is not None:
        row, zero = torch.arange(rows, device=columns.device).view(-1, 1, 1, 1), columns.new_zeros(1, 1, 1, 1)
        visible = inputs.blocks.mask_mod(row, zero, columns.view(1, 1, -1, 1), keys.view(1, 1, 1, -1))
        return visible & (keys <= columns.unsqueeze(1))
    if inputs.mask is not None:
        return inputs.mask[:, :, start:end, :end]
    causal = keys <= columns.unsqueeze(1)
    if documents is None:
        return causal.view(1, 1, end - start, end)
    visible = causal & (documents[:, start:end].unsqueeze(2) == documents[:, :end].unsqueeze(1))
    if inputs.window >= 0:
        visible &= columns.unsqueeze(1) - keys <= inputs.window
    return visible.unsqueeze(1)
