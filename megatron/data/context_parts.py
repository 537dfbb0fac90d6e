"""Divides the rows of a batch over context-parallel ranks."""

from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from megatron.data.batch import (
    Batch,
    ContextPart,
    HeadsPart,
    KeyBlock,
    KeysPart,
    QueryRuns,
    num_starts,
    padded_starts,
    places_of_loss,
)
from megatron.data.context_columns import balanced_columns
from megatron.neox_arguments import ModelArgs
from megatron.neox_arguments.methods import declaration_of


@dataclass(frozen=True)
class ContextLayout:
    """The context-parallel ranks of a row, and what each gives the others for attention.

    size: number of ranks. ulysses: neighbouring ranks that exchange heads for columns; 1: none.
    is_ring: keys go round between ranks, instead of being gathered.
    multiple: each rank computes a multiple of so many columns.
    keeps_documents: whether ranks may compute other columns than two chunks, where that balances documents.
    """

    size: int
    ulysses: int = 1
    is_ring: bool = False
    multiple: int = 1
    keeps_documents: bool = True

    @classmethod
    def from_args(cls, args: ModelArgs) -> "ContextLayout":
        """Return the layout that a configuration asks for."""
        is_ring, multiple = args.context_parallel_type == "ring", args.tp if args.sequence_parallel else 1
        # States are handed from chunk to chunk; a second model of the run may have it.
        keeps_documents = not args.state_blocks and not declaration_of(args).has_second_model
        return cls(args.context_parallel_size, args.ulysses_size, is_ring, multiple, keeps_documents)

    def num_queries(self, seq: int) -> int:
        """Return the number of columns whose queries a rank has in attention, padding included."""
        return seq if self.ulysses == self.size else self.ulysses * len(self.columns(seq, 0))

    def columns_of_ranks(self, begins: np.ndarray) -> list[np.ndarray]:
        """Return the columns of rows that each rank computes, ascending, `[places]` int64.

        begins: `[batch, seq]`, True where documents begin. Columns >= seq are padding.
        """
        chunks = [self.columns(begins.shape[1], rank) for rank in range(self.size)]
        groups = self.groups(chunks)
        if not self.keeps_documents or len(groups) == 1 or not begins[:, 1:].any():
            return chunks
        divided = balanced_columns(begins, groups)
        return chunks if divided is groups else [part for group in divided for part in np.split(group, self.ulysses)]

    def groups(self, columns_of_ranks: list[np.ndarray]) -> list[np.ndarray]:
        """Return the columns of each group of ranks that exchange heads, laid end to end."""
        return [np.concatenate(columns_of_ranks[i : i + self.ulysses]) for i in range(0, self.size, self.ulysses)]

    def columns(self, seq: int, rank: int) -> np.ndarray:
        """Return the two chunks of rows of `seq` tokens that a rank computes, ascending, `[places]` int64.

        Rows have 2 * size chunks of equal length. Rank r has chunk r and chunk 2 * size - 1 - r, so that
        causal attention costs every rank the same (as in Megatron-LM). Columns >= seq are padding.
        """
        chunk = -(-seq // (2 * self.size))
        while 2 * chunk % self.multiple:
            chunk += 1
        head, tail = rank * chunk, (2 * self.size - 1 - rank) * chunk
        return np.concatenate([np.arange(head, head + chunk), np.arange(tail, tail + chunk)])


def part_of(batch: Batch, layout: ContextLayout, rank: int) -> Batch:
    """Return the batch with its `ContextPart` for a context-parallel rank; unchanged if it has one already.

    So are batches within `Batch.method`.
    """
    if layout.size == 1 or batch.context is not None:
        return batch
    if batch.method is not None:
        values = {field.name: getattr(batch.method, field.name) for field in fields(batch.method)}
        inner = {name: part_of(value, layout, rank) for name, value in values.items() if isinstance(value, Batch)}
        batch = replace(batch, method=replace(batch.method, **inner))
    seq = batch.tokens.shape[1]
    begins = _begins(batch)
    has_prefixes = batch.documents is not None and batch.documents.prefixes is not None
    layout = replace(layout, keeps_documents=False) if has_prefixes else layout  # an answer costs its prefix too
    everyone = layout.columns_of_ranks(begins)
    is_two_chunks = bool((everyone[rank] == layout.columns(seq, rank)).all())
    token_mask, columns = everyone[rank] < seq, everyone[rank].clip(max=seq - 1)
    loss_weights = batch.loss_weights.cpu().numpy()[:, columns] * token_mask
    groups, number = layout.groups(everyone), rank // layout.ulysses
    part = ContextPart(
        torch.from_numpy(columns), _order(everyone, seq), None if token_mask.all() else torch.from_numpy(token_mask),
        places_of_loss(loss_weights), _chunk_starts(begins, everyone[rank]), is_two_chunks,
        heads=_heads_part(groups[number], seq, len(groups) == 1) if layout.ulysses > 1 else None,
        keys=None if len(groups) == 1 else _keys_part(begins, groups, number, layout.is_ring),
    )  # fmt: skip
    device = batch.tokens.device
    return replace(batch, context=part if device.type == "cpu" else part.map(lambda tensor: tensor.to(device)))


def _order(columns_of_ranks: list[np.ndarray], seq: int) -> torch.Tensor:
    """Return the index of each of `seq` columns in the columns of all ranks, laid end to end."""
    return torch.from_numpy(np.argsort(np.concatenate(columns_of_ranks), kind="stable")[:seq])


def _heads_part(columns: np.ndarray, seq: int, full_rows: bool) -> HeadsPart:
    """Return how ranks whose columns, laid end to end, are `columns` put them in order, and back.

    full_rows: these are all columns, and padding is left out.
    """
    order = np.argsort(columns, kind="stable")
    places = np.argsort(order, kind="stable")
    if full_rows:
        order, places = order[:seq], places.clip(max=seq - 1)
    return HeadsPart(torch.from_numpy(order), torch.from_numpy(places))


def _keys_part(begins: np.ndarray, groups: list[np.ndarray], number: int, is_ring: bool) -> KeysPart:
    """Return the `KeysPart` of the group of ranks with this number. groups: the columns of each."""
    columns_of_groups = [np.sort(columns) for columns in groups]
    queries, (rows, seq) = columns_of_groups[number], begins.shape
    runs, places = _runs(begins, queries), rows * len(queries)
    blocks = [(number - step) % len(groups) for step in range(len(groups))] if is_ring else []
    return KeysPart(
        torch.from_numpy(queries.clip(max=seq - 1)), _order(columns_of_groups, seq), _query_runs(runs, places, seq),
        tuple(_key_block(runs, len(queries), seq, columns_of_groups[block]) for block in blocks),
    )  # fmt: skip


def _begins(batch: Batch) -> np.ndarray:
    """Return whether a document begins at each token, bool `[batch, seq]`."""
    begins = np.zeros(batch.tokens.shape, bool)
    begins[:, 0] = True
    if batch.documents is not None:
        starts = batch.documents.cu_seqlens.cpu().numpy()
        begins.ravel()[starts[starts < begins.size]] = True
    return begins


def _chunk_starts(begins: np.ndarray, columns: np.ndarray) -> torch.Tensor:
    """Return the starts of a rank's documents, each cut where a chunk begins, as `ContextPart.starts`."""
    rows, places = len(begins), len(columns)
    chunks = np.arange(rows).repeat(2) * places + np.tile([0, places // 2], rows)
    runs = _runs(begins, columns)
    starts = np.union1d(runs.row * places + runs.place, chunks)
    return padded_starts(starts, rows * places, num_starts(len(starts), rows * places))


@dataclass(frozen=True)
class _Runs:
    """Runs of neighbouring columns in one document. Arrays have one entry a run.

    row; place: of the first column in the rank's columns; length; column: the first; document: the column
    where the document begins.
    """

    row: np.ndarray
    place: np.ndarray
    length: np.ndarray
    column: np.ndarray
    document: np.ndarray


def _runs(begins: np.ndarray, columns: np.ndarray) -> _Runs:
    """Return the runs of a rank's columns, in the order of `[batch, columns]`. Padding forms one run in each
    row.

    begins: `[batch, seq]`, True where documents begin. columns: ascending, >= seq for padding.
    """
    seq = begins.shape[1]
    filled = int((columns < seq).sum())
    firsts = begins[:, columns.clip(max=seq - 1)]
    firsts[:, 1:] |= np.diff(columns) != 1
    firsts[:, filled:] = False
    firsts[:, [0, *([filled] if filled < len(columns) else [])]] = True
    starts = np.flatnonzero(firsts)
    row, place = np.divmod(starts, len(columns))
    documents = np.maximum.accumulate(np.where(begins, np.arange(seq), 0), axis=1)  # where each column's begins
    column = columns[place]
    document = documents[row, column.clip(max=seq - 1)]
    return _Runs(row, place, np.diff(np.append(starts, firsts.size)), column, document)


def _query_runs(runs: _Runs, queries: int, seq: int) -> QueryRuns:
    """Return the `QueryRuns` of a rank's `queries` queries, with the keys of full rows of `seq` tokens.

    The keys of padding are copies of the last column, so that attention there is finite.
    """
    is_padding = runs.column >= seq
    first_key = np.where(is_padding, seq - 1, runs.document)
    counts = np.where(is_padding, runs.length, runs.column + runs.length - first_key)
    return _as_tensors(queries, runs.length, runs.row * seq + first_key, counts, ~is_padding)


def _key_block(runs: _Runs, columns: int, seq: int, keys: np.ndarray) -> KeyBlock:
    """Return the runs of a rank's queries that see keys of a rank of the ring, whose columns are `keys`.

    columns: number of columns of the queries.
    """
    first_key = np.searchsorted(keys, runs.document)
    counts = np.where(runs.column < seq, np.searchsorted(keys, runs.column + runs.length) - first_key, 0)
    sees = counts > 0
    row, place, length, first_key, counts = (
        values[sees] for values in (runs.row, runs.place, runs.length, first_key, counts)
    )
    ends = np.cumsum(length)
    steps = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - length, length)
    query_places = np.repeat(row * columns + place, length) + steps
    every_key = np.ones(len(row), bool)
    key_runs = _as_tensors(len(query_places), length, row * len(keys) + first_key, counts, every_key)
    return KeyBlock(torch.from_numpy(query_places), key_runs)


def _as_tensors(
    queries: int, lengths: np.ndarray, first_keys: np.ndarray, counts: np.ndarray, advances: np.ndarray
) -> QueryRuns:
    """Return `QueryRuns` of `queries` queries.

    lengths, first_keys, counts: of each run, the number of queries, the place of the first key, and the
        number of keys. advances: whether its keys are neighbours; else they are copies of the first.
    """
    key_ends = np.cumsum(counts)
    num_keys = int(key_ends[-1]) if len(key_ends) else 0
    steps = np.arange(num_keys) - np.repeat(key_ends - counts, counts)
    # Not rounded up to few lengths: kernels leave the gradients of keys undefined that belong to no run.
    key_places = np.repeat(first_keys, counts) + steps * np.repeat(advances, counts)
    n = num_starts(len(lengths), queries)
    return QueryRuns(
        padded_starts(np.cumsum(lengths) - lengths, queries, n), torch.from_numpy(key_places),
        padded_starts(key_ends - counts, num_keys, n), int(lengths.max(initial=0)), int(counts.max(initial=0)),
    )  # fmt: skip
