"""Assigns documents, or blocks of their joined tokens, to the rows of an epoch (`pack_impl`, `drop_last`).

Rows are laid out once, except GPT-NeoX's windows; epochs differ only in the order of rows. Every usable
document is in one row of every epoch, and more samples only continue the order.
"""

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

import numpy as np

from megatron.data.index_maps import UINT32_MAX, IndexMaps, Packing, build_packed, segment_generators
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.labels import has_label
from megatron.neox_arguments import NeoXArgs
from megatron.process import look_for_stop

_LOOKS = 1 << 14  # documents between two looks for a stop signal


def packing_from_args(args: NeoXArgs) -> Packing:
    """Return the configuration keys on packing as a `Packing`."""
    return Packing(
        args.pack_impl,
        args.allow_chopped,
        args.truncate_documents,
        args.drop_last,
        args.compat_group_texts_batch,
        args.compat_pack_impl,
    )


def build_maps(
    sizes: np.ndarray,
    start: int,
    stop: int,
    num_samples: int,
    seq_length: int,
    seed: int,
    packing: Packing,
    labels: IndexedDataset | None = None,
    earlier_ends: Sequence[int] = (),
) -> IndexMaps:
    """Build the index maps of sequences [start, stop), laid out in rows as `packing` says.

    They cover complete epochs with at least num_samples samples; there may be no row at all.
    sizes: [n] tokens of each sequence.
    labels: if rows hold full documents, documents whose labels are all masked are left out.
    earlier_ends: if `packing.joint`, the ends of the earlier segments of the order, in samples (see
      `build_packed`).
    """
    lengths, width = packing.lengths(sizes), packing.width(seq_length)
    if packing.windows:
        return build_packed(lengths, start, stop, num_samples, seq_length, seed, earlier_ends)
    if packing.compat:
        return _neox(lengths, stop - start, (*earlier_ends, num_samples), seq_length, seed, packing, labels)
    random = np.random.RandomState(seed)
    if packing.unsplit_documents:
        documents = _usable(lengths, start, stop, width, packing, labels)
        if packing.pack_impl == "pack_until_overflow":
            random.shuffle(documents)
            starts = next_fit(lengths[documents], width)
        elif packing.pack_impl == "best_fit":
            order, starts = best_fit(np.minimum(lengths[documents], width), width)
            documents = documents[order]
        else:
            starts = np.arange(len(documents) + 1)
        sample_idx = np.stack([starts, np.zeros_like(starts)], axis=1)
    else:
        documents = np.arange(start, stop)
        batch = packing.group_texts_batch or max(1, len(documents))
        sample_idx = _blocks(lengths[start:stop], width, batch, bool(packing.drop_last))
    return IndexMaps(documents, sample_idx, _epochs(len(sample_idx) - 1, num_samples, random))


def next_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Pack documents into rows in order; return the index of the first document of each row, [rows + 1].

    A row ends before the first document that does not fit. A document longer than `capacity` is truncated.
    """
    ends = np.cumsum(np.minimum(lengths, capacity), dtype=np.int64)
    begins = ends - np.minimum(lengths, capacity)
    following = memoryview(np.searchsorted(ends, begins + capacity, side="right"))
    starts = [0]
    while starts[-1] < len(lengths):
        starts.append(following[starts[-1]])
    return np.array(starts, dtype=np.int64)


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack documents with lengths from 1 to capacity into rows by best-fit decreasing.

    Returns (documents, row after row [n]; the index in them at which each row begins [rows + 1]).
    Best-fit decreasing ("Fewer Truncations Improve Language Modeling", arXiv 2404.10830) gives the same bins
    as TRL's `bfd`. The longest document comes first (of equal ones, the earlier) and goes into the row with
    the least sufficient room (of equal rows, the one that got that room first). For speed, documents of one
    length are placed together: the best row for one of them stays the best until no more fit.
    """
    order = np.argsort(-lengths.astype(np.int64), kind="stable")
    values, counts = np.unique(lengths, return_counts=True)
    row_of = np.empty(len(lengths), np.int64)
    waiting: dict[int, deque[np.ndarray]] = defaultdict(deque)  # room -> rows that have exactly this room left
    rooms: list[int] = []  # keys of `waiting` that have rows, ascending
    rows = done = 0

    def put(room: int, chunk: np.ndarray, front: bool = False) -> None:
        if room == 0 or not len(chunk):
            return
        if not waiting[room]:
            insort(rooms, room)
        (waiting[room].appendleft if front else waiting[room].append)(chunk)

    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        look_for_stop()
        while count:
            place = bisect_left(rooms, length)
            if place < len(rooms):
                room = rooms[place]
                chunk = waiting[room].popleft()
                if not waiting[room]:
                    del rooms[place]
            else:
                room = capacity
                chunk = np.arange(rows, rows - (-count // (room // length)))
                rows += len(chunk)
            fit = room // length
            num_filled = min(len(chunk), -(-count // fit))
            items = min(count, num_filled * fit)
            full, remainder = divmod(items, fit)
            row_of[done : done + items] = np.repeat(chunk[:num_filled], fit)[:items]
            put(room, chunk[num_filled:], front=True)
            put(room - fit * length, chunk[:full])
            put(room - remainder * length, chunk[full:num_filled])
            done, count = done + items, count - items
    starts = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=rows))])
    return order[np.argsort(row_of, kind="stable")], starts


def _usable(
    lengths: np.ndarray, start: int, stop: int, width: int, packing: Packing, labels: IndexedDataset | None
) -> np.ndarray:
    """Return the indices of the documents in [start, stop) that can be trained.

    They have a trained token and, if documents must not be truncated, fit into a row.
    """
    keep = lengths[start:stop] > 0
    if not packing.allow_chopped:
        keep &= lengths[start:stop] <= width
    if labels is not None:
        # No token precedes the first token, so its label is never predicted
        keep &= has_label(labels, start, stop, 1, min(width, packing.truncate_documents or width))
    return start + np.flatnonzero(keep)


def _blocks(lengths: np.ndarray, width: int, batch: int, drop_last: bool) -> np.ndarray:
    """Return `IndexMaps.sample_idx` of blocks of `width` tokens that do not overlap, as HuggingFace's
    run_clm.py makes (`group_texts`).

    Each group of `batch` documents is joined and split separately. If its last block is incomplete, it is
    dropped (drop_last) or stays shorter.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    group_ends = ends[np.minimum(np.arange(batch, len(lengths) + batch, batch), len(lengths)) - 1]
    group_begins = np.concatenate([[0], group_ends[:-1]]) if len(lengths) else group_ends
    tokens = group_ends - group_begins
    blocks = tokens // width if drop_last else -(-tokens // width)
    number = np.arange(blocks.sum()) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    begins = np.repeat(group_begins, blocks) + number * width
    place = np.searchsorted(ends, begins, side="right")
    rows = np.stack([place, begins - (ends - lengths)[place]], axis=1)
    return np.concatenate([rows, [[len(lengths), 0]]])


def _epochs(rows: int, num_samples: int, random: np.random.RandomState) -> np.ndarray:
    """Return the row indices in training order: full epochs with at least `num_samples` rows, each
    shuffled anew."""
    dtype = np.uint32 if rows < UINT32_MAX else np.int64
    shuffle_idx = np.tile(np.arange(rows, dtype=dtype), max(1, -(-num_samples // max(1, rows))))
    for epoch in range(0, len(shuffle_idx), max(1, rows)):
        random.shuffle(shuffle_idx[epoch : epoch + rows])
    return shuffle_idx


def _neox(
    lengths: np.ndarray,
    documents: int,
    ends: Sequence[int],
    seq_length: int,
    seed: int,
    packing: Packing,
    labels: IndexedDataset | None,
) -> IndexMaps:
    """Build the index maps of GPT-NeoX's layout of full documents (`compat_pack_impl`).

    As in GPT-NeoX, documents are counted from 0 wherever the split begins, and epochs are shuffled together.
    (If the last document of an epoch is left out, GPT-NeoX fails; here the next epoch begins.)
    ends: the ends of the segments of the order, in samples. A segment begins with the document after the last
      of the segment before, so the last row of that segment also has a token that follows it.
    """
    num_samples = ends[-1]
    shuffle_idx = np.arange(num_samples)
    generators = segment_generators(seed, len(ends))
    for generator, begin, end in zip(generators, (0, *ends), ends, strict=False):
        generator.shuffle(shuffle_idx[begin:end])
    random = generators[0]
    overflow, room = packing.pack_impl == "pack_until_overflow", seq_length + 1
    keep = np.ones(documents, bool) if packing.allow_chopped else lengths[:documents] <= room
    if labels is not None:
        keep &= has_label(labels, 0, documents, 0, room if overflow else seq_length)
    doc_idx: list[int] = []
    starts: list[int] = []
    if num_samples and keep.any():
        length = 0
        for document in _endless(np.arange(documents), random if overflow else None):
            if not keep[document]:
                continue
            if len(doc_idx) % _LOOKS == 0:
                look_for_stop()
            length += int(lengths[document])
            if not starts or not overflow or length > room or len(starts) in ends:
                starts.append(len(doc_idx))
                length = int(lengths[document])
            doc_idx.append(document)
            if len(starts) == num_samples + (not overflow):
                break
    # The document after the last row is only there for its first token
    starts = starts if not overflow else [*starts, len(doc_idx)]
    sample_idx = np.zeros((len(starts), 2), np.int64)
    sample_idx[:, 0] = starts
    return IndexMaps(np.array(doc_idx, np.int64), sample_idx, shuffle_idx[: max(0, len(starts) - 1)])


def _endless(documents: np.ndarray, random: np.random.RandomState | None) -> Iterator[int]:
    """Yield documents without end, epoch after epoch; with a generator each epoch is shuffled."""
    while True:
        if random is not None:
            random.shuffle(documents)
        yield from documents.tolist()
