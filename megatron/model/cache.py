"""The paged key-value cache of generation (arXiv 2309.06180).

Keys and values of past tokens stay in a pool of fixed-size blocks of tokens, so a new token does not
recompute the text before it. A text takes more blocks of the pool as it grows. Mamba layers keep one state
for each text instead.
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
    """Says which slots of the pool the rows of one forward pass read and write.

    slots: `[rows * seq]` int64, the slot of each token: block * block_size + offset in the block.
    table: `[rows, blocks]` int64, the blocks of each row's text in order; unused columns hold any number.
    parts: (first row, end row, number of blocks) of each group of rows that attend together. Every row of a
        group reads as many blocks as its longest text has.
    room: buffers that keys and values are gathered into, by (0 for keys or 1 for values, shape). All layers
        and steps reuse them.
    states: `[rows]` int64, the index of each row's state in Mamba layers; None in models without them.
    """

    slots: Tensor
    table: Tensor
    parts: Sequence[tuple[int, int, int]]
    room: dict[tuple[int, torch.Size], Tensor]
    states: Tensor | None = None


class LayerCache(NamedTuple):
    """The cached keys (already rotated) and values of one attention layer on this rank.

    keys, values: `[blocks, block_size, kv_heads, head_dim]`; the same tensor if keys are also the values, as
        in latent attention. rows: the slots that `put` writes and `read`
        reads.
    """

    keys: Tensor
    values: Tensor
    rows: CacheRows

    def put(self, k: Tensor, v: Tensor) -> None:
        """Writes the keys and values `[rows, kv_heads, seq, head_dim]` of new tokens to their slots."""
        pools = ((self.keys, k), (self.values, v))
        for pool, x in pools[:1] if self.values is self.keys else pools:
            pool.view(-1, *pool.shape[2:]).index_copy_(0, self.rows.slots, x.transpose(1, 2).flatten(0, 1))

    def read(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yields (rows, keys, values) for each group of rows in `CacheRows.parts`: the keys and values of
        their full texts.

        keys, values: `[rows, kv_heads, columns, head_dim]`, valid until the next group is requested. Columns
            past the end of a text hold any values; mask them.
        """
        for start, end, blocks in self.rows.parts:
            table = self.rows.table[start:end, :blocks].flatten()
            keys = self._gather(self.keys, 0, table, blocks)
            values = keys if self.values is self.keys else self._gather(self.values, 1, table, blocks)
            yield slice(start, end), keys, values

    def _gather(self, pool: Tensor, buffer_id: int, table: Tensor, blocks: int) -> Tensor:
        shape = pool.shape[1:]
        buffer = self.rows.room.get((buffer_id, shape))
        if buffer is None or len(buffer) < len(table):
            buffer = pool.new_empty((len(table) + len(table) // 4, *shape))
            self.rows.room[buffer_id, shape] = buffer
        out = buffer[: len(table)]
        torch.index_select(pool, 0, table, out=out)
        return out.view(len(table) // blocks, -1, *pool.shape[2:]).transpose(1, 2)


class StateCache(NamedTuple):
    """The cache of one Mamba layer on this rank. It has a constant size per text.

    last_inputs: the last inputs of the convolution, `[texts, k - 1, channels]`.
    states: the states of the scan, `[texts, ..]`.
    rows: the texts that the methods read and write.
    """

    last_inputs: Tensor
    states: Tensor
    rows: CacheRows

    def inputs(self) -> Tensor:
        """Returns the last inputs of the convolution for the current rows, `[k - 1, rows, channels]`."""
        return self.last_inputs[self.rows.states].transpose(0, 1)

    def put_inputs(self, x: Tensor) -> None:
        """Replaces the last inputs of the convolution for the current rows by x, `[k - 1, rows,
        channels]`."""
        self.last_inputs[self.rows.states] = x.transpose(0, 1).to(self.last_inputs.dtype)

    def state(self) -> Tensor:
        """Returns the states of the scan for the current rows, `[rows, ..]`."""
        return self.states[self.rows.states]

    def put_state(self, state: Tensor) -> None:
        """Replaces the states of the scan for the current rows by `state`, `[rows, ..]`."""
        self.states[self.rows.states] = state.to(self.states.dtype)


class StateShapes(NamedTuple):
    """The shapes that a `StateCache` needs for one text: last inputs of the convolution, and state of the
    scan with its dtype."""

    last_inputs: tuple[int, ...]
    state: tuple[int, ...]
    state_dtype: torch.dtype


@dataclass(frozen=True)
class KVCache:
    """The caches of a stage's layers, by NeoX layer index, for the rows of one forward pass.

    All views (`with_rows`) share the tensors, which are written in place. block_size: number of tokens in a
    block of the pool.
    """

    layers: Mapping[int, LayerCache | StateCache]
    rows: CacheRows
    block_size: int

    @staticmethod
    def empty(
        shapes: Mapping[int, Sequence[tuple[int, int]]],
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        states: Mapping[int, StateShapes],
        texts: int,
    ) -> KVCache:
        """Returns a cache without rows, filled with zeros, because even masked values must be finite numbers.

        shapes: (heads, head_dim) of a token's keys and of its values, by NeoX layer index; only one if keys
            are also the values.
        blocks: number of blocks in the pool of each of these layers.
        states: the shapes of each layer with states, by NeoX layer index.
        texts: number of texts for which these layers have states.
        """
        no_rows = torch.empty(0, 0, dtype=torch.long)
        rows = CacheRows(no_rows.flatten(), no_rows, (), {})
        layers: dict[int, LayerCache | StateCache] = {}
        for layer, token_shapes in shapes.items():
            pools = [_zeros((blocks, block_size, *shape), dtype, device) for shape in token_shapes]
            layers[layer] = LayerCache(pools[0], pools[-1], rows)
        for layer, sizes in states.items():
            last_inputs = _zeros((texts, *sizes.last_inputs), dtype, device)
            layers[layer] = StateCache(last_inputs, _zeros((texts, *sizes.state), sizes.state_dtype, device), rows)
        return KVCache(layers, rows, block_size)

    @property
    def length(self) -> int:
        """The most tokens that a text can have: the number of slots per row of `table`."""
        return self.rows.table.shape[1] * self.block_size

    def with_rows(
        self,
        slots: Tensor,
        table: Tensor,
        parts: Sequence[tuple[int, int, int]] | None = None,
        states: Tensor | None = None,
        room: dict[tuple[int, torch.Size], Tensor] | None = None,
    ) -> KVCache:
        """Returns a view of the same tensors for other rows. Arguments are the fields of `CacheRows`.

        parts: None: one group of all rows. room: None: the buffers that all views share.
        """
        parts = [(0, *table.shape)] if parts is None else parts
        rows = CacheRows(slots, table, parts, self.rows.room if room is None else room, states)
        return KVCache({i: cache._replace(rows=rows) for i, cache in self.layers.items()}, rows, self.block_size)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's zeros take no memory until they are written to; torch writes its zeros at once.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
