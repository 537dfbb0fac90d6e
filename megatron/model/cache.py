"""The paged key-value cache of generation (arXiv 2309.06180).

Keys and values of past tokens are kept in a pool of blocks that texts take as they grow, so that a new token
does not run the text before it again; of Mamba's blocks a state for each text.
"""

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
    """Where the rows of one forward pass stand in the pool of blocks.

    slots: `[rows * seq]` int64, the slot of each token: block * block_size + offset in the block.
    table: `[rows, blocks]` int64, the blocks of each row's text in order, then any numbers.
    parts: (first row, end row, blocks of the longest) of the groups of rows that attend together: for a short
    text as much is read as for the longest of its group.
    room: buffers for the keys (0) and values (1) that are read, by which of them and shape. All layers and
    steps use them in turn.
    states: `[rows]` int64, where the states of Mamba's blocks stand for each row; None in models without.
    """

    slots: Tensor
    table: Tensor
    parts: Sequence[tuple[int, int, int]]
    room: dict[tuple[int, torch.Size], Tensor]
    states: Tensor | None = None


class LayerCache(NamedTuple):
    """The keys (already rotated) and values of one transformer block on this rank, both
    `[blocks, block_size, kv_heads, head_dim]`."""

    keys: Tensor
    values: Tensor
    rows: CacheRows

    def put(self, k: Tensor, v: Tensor) -> None:
        """Write keys and values `[rows, kv_heads, seq, head_dim]` of new tokens to their slots."""
        for pool, x in ((self.keys, k), (self.values, v)):
            pool.view(-1, *pool.shape[2:]).index_copy_(0, self.rows.slots, x.transpose(1, 2).flatten(0, 1))

    def read(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """For each part its rows, and the keys and values of their whole texts
        `[rows, kv_heads, columns, head_dim]`.

        The tensors are valid until the next part is asked for. Columns behind the end of a text hold anything
        and are to be masked.
        """
        for first, last, blocks in self.rows.parts:
            table = self.rows.table[first:last, :blocks].flatten()
            yield (
                slice(first, last),
                self._gather(self.keys, 0, table, blocks),
                self._gather(self.values, 1, table, blocks),
            )

    def _gather(self, pool: Tensor, which: int, table: Tensor, blocks: int) -> Tensor:
        shape = pool.shape[1:]
        buffer = self.rows.room.get((which, shape))
        if buffer is None or len(buffer) < len(table):
            buffer = pool.new_empty((len(table) + len(table) // 4, *shape))
            self.rows.room[which, shape] = buffer
        out = buffer[: len(table)]
        torch.index_select(pool, 0, table, out=out)
        return out.view(len(table) // blocks, -1, *pool.shape[2:]).transpose(1, 2)


class StateCache(NamedTuple):
    """What one of Mamba's blocks on this rank keeps of each text, however long: the last inputs of its
    convolution `[texts, k - 1, channels]`, and its state `[texts, ..]`."""

    last_inputs: Tensor
    states: Tensor
    rows: CacheRows

    def inputs(self) -> Tensor:
        """`[k - 1, rows, channels]`, those of the rows."""
        return self.last_inputs[self.rows.states].transpose(0, 1)

    def put_inputs(self, x: Tensor) -> None:
        """Keep others for the rows, in the shape of `inputs`."""
        self.last_inputs[self.rows.states] = x.transpose(0, 1).to(self.last_inputs.dtype)

    def state(self) -> Tensor:
        """`[rows, ..]`, those of the rows."""
        return self.states[self.rows.states]

    def put_state(self, state: Tensor) -> None:
        """Keep others for the rows."""
        self.states[self.rows.states] = state.to(self.states.dtype)


class StateShapes(NamedTuple):
    """The shapes of what a `StateCache` keeps of a text, and the dtype of its state."""

    last_inputs: tuple[int, ...]
    state: tuple[int, ...]
    state_dtype: torch.dtype


@dataclass(frozen=True)
class KVCache:
    """The caches of the blocks of a stage, by NeoX layer index, with the rows of one forward pass.

    The tensors are written in place, and all views share them. block_size: tokens of a block.
    """

    layers: Mapping[int, LayerCache | StateCache]
    rows: CacheRows
    block_size: int

    @staticmethod
    def empty(
        heads: Mapping[int, tuple[int, int]],
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        states: Mapping[int, StateShapes],
        texts: int,
    ) -> KVCache:
        """A cache without rows. heads: (key-value heads, head_dim) by layer; states: of layers that have
        them, for so many texts at once.

        It begins as zeros, since what is masked must still be a number.
        """
        nothing = torch.empty(0, 0, dtype=torch.long)
        rows = CacheRows(nothing.flatten(), nothing, (), {})
        layers: dict[int, LayerCache | StateCache] = {}
        for layer, shape in heads.items():
            keys, values = (_zeros((blocks, block_size, *shape), dtype, device) for _ in range(2))
            layers[layer] = LayerCache(keys, values, rows)
        for layer, of in states.items():
            last_inputs = _zeros((texts, *of.last_inputs), dtype, device)
            layers[layer] = StateCache(last_inputs, _zeros((texts, *of.state), of.state_dtype, device), rows)
        return KVCache(layers, rows, block_size)

    @property
    def length(self) -> int:
        """Number of columns of the rows: of slots for the longest text that `table` has room for."""
        return self.rows.table.shape[1] * self.block_size

    def of(
        self,
        slots: Tensor,
        table: Tensor,
        parts: Sequence[tuple[int, int, int]] | None = None,
        states: Tensor | None = None,
    ) -> KVCache:
        """A view of the same tensors for other rows, as `CacheRows` has them; parts: None for a single
        part."""
        parts = [(0, *table.shape)] if parts is None else parts
        rows = CacheRows(slots, table, parts, self.rows.room, states)
        return KVCache({i: cache._replace(rows=rows) for i, cache in self.layers.items()}, rows, self.block_size)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's take no memory before they are written to; torch writes at once.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
