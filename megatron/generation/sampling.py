"""Choosing the next token from logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """temperature divides the logits, 0 takes the most likely token; top_k 0 and top_p 0 leave all tokens."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0


def filter_logits(logits: Tensor, top_k: int = 0, top_p: float = 0.0) -> Tensor:
    """`[rows, vocab]` with -inf where a token cannot be chosen: first top-k, then top-p of what is left (GPT-NeoX).

    top_k keeps the k largest logits, and those equal to the k-th. top_p keeps the fewest tokens, most likely first,
    whose probabilities reach it (nucleus sampling, arXiv 1904.09751).
    """
    if top_k > 0:
        smallest = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    if 0.0 < top_p < 1.0:
        ordered, order = logits.sort(descending=True, stable=True)
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        drop = torch.empty_like(before, dtype=torch.bool).scatter_(-1, order, before > top_p)
        logits = logits.masked_fill(drop, float("-inf"))
    return logits


def next_tokens(logits: Tensor, sampling: Sampling, uniforms: Tensor) -> Tensor:
    """One token id a row, `[rows]` int64.

    logits: `[rows, vocab]`, only tokens that exist. uniforms: `[rows]` float64 in [0, 1), a draw a row; the choice is a
    function of them and the logits alone, so that every rank makes the same one.
    """
    if sampling.temperature == 0.0:
        return logits.argmax(-1)
    # float64: the sums on two GPUs may differ in the last bit, and ranks must not part there.
    kept = filter_logits(logits.double() / sampling.temperature, sampling.top_k, sampling.top_p)
    total = kept.softmax(-1).cumsum(-1)
    return torch.searchsorted(total, uniforms.unsqueeze(-1) * total[:, -1:], right=True).squeeze(-1)
