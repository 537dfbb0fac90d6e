"""Chooses the columns of packed rows that each context rank computes, so that attention costs ranks about the
same.

Chunks at the head and the tail of a row balance causal attention over a whole row. With documents, ranks
that hold a long one have more to compute. Then short documents are kept whole, each on one rank, and long
ones are divided over all ranks, head and tail.
"""

from collections.abc import Iterator

import numpy as np

_EVEN = 1.02  # a rank's attention, relative to the mean, that needs no better division
_SHARES = 256  # of a rank's columns: shorter documents may be joined to their neighbours, to save time
_MOST_HALVINGS = 5  # of the longest document that is kept whole


def balanced_columns(begins: np.ndarray, chunks: list[np.ndarray]) -> list[np.ndarray]:
    """Return the columns of each rank, ascending: `chunks` itself, unless another division balances attention
    better.

    Attention costs the pairs of queries and keys of all rows, windows aside. Every rank keeps its number of
    columns.

    begins: `[batch, seq]`, True where documents begin. chunks: columns of each rank, equally many; those >=
        seq are padding.
    """
    seq, ranks, places = begins.shape[1], len(chunks), len(chunks[0])
    columns = np.arange(seq)
    documents = np.maximum.accumulate(np.where(begins, columns, 0), axis=1)
    costs = (columns - documents + 1).sum(0)
    owners = np.empty(ranks * places, np.int64)
    owners[np.concatenate(chunks)] = np.arange(ranks).repeat(places)
    best, lowest, even = None, _heaviest(owners[:seq], costs, ranks), _EVEN * costs.sum() / ranks
    starts = _long_documents(np.flatnonzero(begins.any(0)), seq, places // _SHARES)
    for divided in _divisions(costs, starts, ranks, places):
        if lowest <= even:
            break
        heaviest = _heaviest(divided, costs, ranks)
        if heaviest < lowest:
            best, lowest = divided, heaviest
    if best is None:
        return chunks
    padding = np.arange(ranks).repeat(places - np.bincount(best, minlength=ranks))
    owners = np.concatenate([best, padding])
    return [np.flatnonzero(owners == rank) for rank in range(ranks)]


def _heaviest(owners: np.ndarray, costs: np.ndarray, ranks: int) -> float:
    return float(np.bincount(owners, costs, ranks).max())


def _long_documents(starts: np.ndarray, seq: int, shortest: int) -> np.ndarray:
    """Return the starts without most of those between two documents shorter than `shortest` columns."""
    if shortest < 2:
        return starts
    is_long = np.diff(np.append(starts, seq)) >= shortest
    begins_segment = is_long | (np.diff(starts // shortest, prepend=-1) != 0)
    begins_segment[1:] |= is_long[:-1]
    return starts[begins_segment]


def _divisions(costs: np.ndarray, starts: np.ndarray, ranks: int, places: int) -> Iterator[np.ndarray]:
    """Yield the rank of each column, `[seq]`; each division keeps fewer documents whole than the one before.

    starts: first columns of documents, of any row.
    """
    ends = np.append(starts[1:], len(costs))
    longest_first = np.argsort(starts - ends, kind="stable")
    totals = np.concatenate([[0], costs.cumsum()])
    pieces = np.minimum(np.arange(2 * ranks), np.arange(2 * ranks)[::-1])  # the rank of each piece of a long document
    for halvings in range(_MOST_HALVINGS):
        owners, room, loads = np.empty(len(costs), np.int64), np.full(ranks, places), np.zeros(ranks, np.int64)
        for start, end in zip(starts[longest_first], ends[longest_first], strict=True):
            length = end - start
            if length > places >> halvings:
                cuts = start + np.arange(2 * ranks + 1) * length // (2 * ranks)
                owners[start:end] = pieces.repeat(np.diff(cuts))
                np.subtract.at(room, pieces, np.diff(cuts))
                np.add.at(loads, pieces, np.diff(totals[cuts]))
                continue
            with_room = np.flatnonzero(room >= length)
            rank = with_room[loads[with_room].argmin()] if len(with_room) else room.argmax()
            owners[start:end] = rank
            room[rank] -= length
            loads[rank] += totals[end] - totals[start]
        _move_surplus(owners, room)
        yield owners


def _move_surplus(owners: np.ndarray, room: np.ndarray) -> None:
    """Give the last columns of ranks that have too many to ranks that have room, in place."""
    for rank in np.flatnonzero(room < 0):
        while room[rank] < 0:
            receiver = room.argmax()
            count = min(-room[rank], room[receiver])
            owners[np.flatnonzero(owners == rank)[-count:]] = receiver
            room[rank] += count
            room[receiver] -= count
