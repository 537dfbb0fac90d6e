"""Keys and values that generation keeps, so that a new token need not run the text before it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class LayerCache(NamedTuple):
    """One block's keys (already rotated) and values, `[rows, kv_heads, length, head_dim]` of this rank.

    Columns are positions. Those behind a row's own position hold anything, and are masked.
    """

    keys: Tensor
    values: Tensor

    def put(self, k: Tensor, v: Tensor, columns: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keep `[rows, kv_heads, seq, head_dim]`, and give back what these tokens attend to.

        columns: `[rows, seq]`; then that is the whole cache. None: the first ones, which attend to themselves alone.
        """
        if columns is None:
            self.keys[:, :, : k.shape[2]], self.values[:, :, : v.shape[2]] = k, v
            return k, v
        rows = torch.arange(len(columns), device=columns.device).unsqueeze(1)
        self.keys[rows, :, columns], self.values[rows, :, columns] = k.transpose(1, 2), v.transpose(1, 2)
        return self.keys, self.values


@dataclass(frozen=True)
class KVCache:
    """The caches of a stage's blocks, by NeoX layer index. The tensors are written in place, views share them."""

    layers: Mapping[int, LayerCache]

    @staticmethod
    def empty(layers: list[int], shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> KVCache:
        """Of one shape `[rows, kv_heads, length, head_dim]`. Zeros: what is masked must still be a number."""
        made = {i: [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)] for i in layers}
        return KVCache({i: LayerCache(*pair) for i, pair in made.items()})

    @property
    def length(self) -> int:
        """Columns."""
        return next(iter(self.layers.values())).keys.shape[2]

    def first(self, length: int) -> KVCache:
        """A view of the first `length` columns."""
        return KVCache({i: LayerCache(c.keys[:, :, :length], c.values[:, :, :length]) for i, c in self.layers.items()})

    def keep(self, rows: Tensor) -> KVCache:
        """A copy of these rows alone: their numbers, or a boolean for each."""
        rows = rows.to(next(iter(self.layers.values())).keys.device)
        return KVCache({i: LayerCache(c.keys[rows], c.values[rows]) for i, c in self.layers.items()})
