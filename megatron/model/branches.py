"""Rows that are trees: one context, and texts after it that do not see each other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.data import Batch


@dataclass(frozen=True, eq=False)
class BranchBatch(Batch):
    """A batch to read from, its rows padded on the right.

    branches: `[batch, seq]` int64, 0 for a row's context, 1, 2, .. for the texts after it; a token sees what is before
    it in the context and in its own branch. `positions` count on from the context in every branch. None: rows are
    texts, without `positions`, or branches with them.
    wanted: `[n]` int64, row * seq + column of the tokens whose logits are needed, which come as `[n, 1, vocab/T]`.
    """

    branches: Tensor | None = None
    wanted: Tensor | None = None


def visible(branches: Tensor) -> Tensor:
    """`[batch, 1, queries, keys]` boolean."""
    steps = torch.arange(branches.shape[1], device=branches.device)
    query, key = branches.unsqueeze(2), branches.unsqueeze(1)
    return (((key == 0) | (key == query)) & (steps <= steps.unsqueeze(1))).unsqueeze(1)


def branch_distances(positions: Tensor) -> Tensor:
    """key - query, `[batch, 1, queries, keys]`, as `positions.distances`."""
    return (positions.unsqueeze(1) - positions.unsqueeze(2)).unsqueeze(1)
