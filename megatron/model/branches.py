"""Rows that are trees: one context, and texts after it that do not see each other."""

from __future__ import annotations

import torch
from torch import Tensor


def visible(branches: Tensor) -> Tensor:
    """`[batch, 1, queries, keys]` boolean. branches: as of `Reading`."""
    steps = torch.arange(branches.shape[1], device=branches.device)
    query, key = branches.unsqueeze(2), branches.unsqueeze(1)
    return (((key == 0) | (key == query)) & (steps <= steps.unsqueeze(1))).unsqueeze(1)


def branch_distances(positions: Tensor) -> Tensor:
    """key - query, `[batch, 1, queries, keys]`, as `positions.distances`."""
    return (positions.unsqueeze(1) - positions.unsqueeze(2)).unsqueeze(1)
