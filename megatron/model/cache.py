"""Keys and values that generation keeps, so that a new token need not run the text before it again: a pool of blocks
that texts take as they grow (arXiv 2309.06180)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class CacheRows:
    """The rows of one forward. slots: `[rows * seq]`, where each token goes, block * block_size + place in the block;
    table: `[rows, blocks]`, the blocks of each row's text in order, then any. Both int64. parts: (first row, row behind
    the last one, blocks of the longest) of rows that attend together: what is read for a short text is as much as for
    the longest of its part."""

    slots: Tensor
    table: Tensor
    parts: Sequence[tuple[int, int, int]]
    # For keys and values that are read, by which and shape, used by all layers and steps in turn.
    room: dict[tuple[int, torch.Size], Tensor]


class LayerCache(NamedTuple):
    """One block's keys (already rotated) and values, `[blocks, block_size, kv_heads, head_dim]` of this rank."""

    keys: Tensor
    values: Tensor
    rows: CacheRows

    def put(self, k: Tensor, v: Tensor) -> None:
        """Keep `[rows, kv_heads, seq, head_dim]`."""
        for pool, x in ((self.keys, k), (self.values, v)):
            pool.view(-1, *pool.shape[2:]).index_copy_(0, self.rows.slots, x.transpose(1, 2).flatten(0, 1))

    def read(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Of each part its rows and all of their texts, `[rows, kv_heads, columns, head_dim]`, column for column; good
        until the next part. What is behind the end of a text is anything, and to be masked."""
        for first, last, blocks in self.rows.parts:
            table = self.rows.table[first:last, :blocks].flatten()
            yield (
                slice(first, last),
                self._gather(self.keys, 0, table, blocks),
                self._gather(self.values, 1, table, blocks),
            )

    def _gather(self, pool: Tensor, which: int, table: Tensor, blocks: int) -> Tensor:
        shape = pool.shape[1:]
        found = self.rows.room.get((which, shape))
        if found is None or len(found) < len(table):
            found = pool.new_empty((len(table) + len(table) // 4, *shape))
            self.rows.room[which, shape] = found
        out = found[: len(table)]
        torch.index_select(pool, 0, table, out=out)
        return out.view(len(table) // blocks, -1, *pool.shape[2:]).transpose(1, 2)


@dataclass(frozen=True)
class KVCache:
    """The caches of a stage's blocks, by NeoX layer index, and the rows that one forward has there. The tensors are
    written in place, all views share them."""

    layers: Mapping[int, LayerCache]
    rows: CacheRows

    @staticmethod
    def empty(shapes: Mapping[int, tuple[int, int, int, int]], dtype: torch.dtype, device: torch.device) -> KVCache:
        """By layer `[blocks, block_size, kv_heads, head_dim]`, without rows. Zeros: what is masked must still be a
        number."""
        nothing = torch.empty(0, 0, dtype=torch.long)
        rows = CacheRows(nothing.flatten(), nothing, (), {})
        made = {i: [_zeros(shape, dtype, device) for _ in range(2)] for i, shape in shapes.items()}
        return KVCache({i: LayerCache(keys, values, rows) for i, (keys, values) in made.items()}, rows)

    @property
    def length(self) -> int:
        """Columns of the rows."""
        return self.rows.table.shape[1] * next(iter(self.layers.values())).keys.shape[1]

    def of(self, slots: Tensor, table: Tensor, parts: Sequence[tuple[int, int, int]] | None = None) -> KVCache:
        """A view for other rows; None: they are one part."""
        parts = [(0, *table.shape)] if parts is None else parts
        rows = CacheRows(slots, table, parts, self.rows.room)
        return KVCache({i: LayerCache(cache.keys, cache.values, rows) for i, cache in self.layers.items()}, rows)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's take no memory before they are written to; torch writes at once.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
