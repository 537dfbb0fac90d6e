"""Which documents, or blocks of their joined tokens, make the rows of an epoch (`pack_impl`, `drop_last`).

All but GPT-NeoX's windows are laid out once and are the same in every epoch, in another order each time:
every usable document is in one row of every epoch, and more samples only continue the order.
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

_LOOKS = 1 << 14  # documents, after which it looks for a stop signal


def packing_from_args(args: NeoXArgs) -> Packing:
    """The `Packing` that the configuration asks for."""
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
    first: int,
    last: int,
    num_samples: int,
    seq_length: int,
    seed: int,
    packing: Packing,
    labels: IndexedDataset | None = None,
    before: Sequence[int] = (),
) -> IndexMaps:
    """Maps over sequences [first, last) whose lengths in tokens are sizes [n].

    They are of whole epochs with at least num_samples samples; there may be no row at all. labels: documents
    without any are left out of samples of whole documents. before: where the earlier segments of an order
    that is `packing.joint` end, in samples (see `build_packed`).
    """
    lengths, width = packing.lengths(sizes), packing.width(seq_length)
    if packing.windows:
        return build_packed(lengths, first, last, num_samples, seq_length, seed, before)
    if packing.compat:
        return _neox(lengths, last - first, (*before, num_samples), seq_length, seed, packing, labels)
    random = np.random.RandomState(seed)
    if packing.whole_documents:
        documents = _usable(lengths, first, last, width, packing, labels)
        if packing.pack_impl == "pack_until_overflow":
            random.shuffle(documents)
            starts = until_overflow(lengths[documents], width)
        elif packing.pack_impl == "best_fit":
            order, starts = best_fit(np.minimum(lengths[documents], width), width)
            documents = documents[order]
        else:
            starts = np.arange(len(documents) + 1)
        sample_idx = np.stack([starts, np.zeros_like(starts)], axis=1)
    else:
        documents = np.arange(first, last)
        batch = packing.group_texts_batch or max(1, len(documents))
        sample_idx = _blocks(lengths[first:last], width, batch, bool(packing.drop_last))
    return IndexMaps(documents, sample_idx, _epochs(len(sample_idx) - 1, num_samples, random))


def until_overflow(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Where rows begin [rows + 1] in documents laid out in order: a row ends before the document that does
    not fit. A document longer than `capacity` is cut to it."""
    ends = np.cumsum(np.minimum(lengths, capacity), dtype=np.int64)
    begins = ends - np.minimum(lengths, capacity)
    following = memoryview(np.searchsorted(ends, begins + capacity, side="right"))
    starts = [0]
    while starts[-1] < len(lengths):
        starts.append(following[starts[-1]])
    return np.array(starts, dtype=np.int64)


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """(documents in order of rows [n], where rows begin in it [rows + 1]) for lengths from 1 to capacity.

    Best-fit decreasing ("Fewer Truncations Improve Language Modeling", arXiv 2404.10830), the same bins as
    TRL's `bfd`: the longest document first, the first of equal ones, into the row with the least room that is
    enough, of equal ones that which came to it first. Documents of one length go into the rows of one room
    together: a row that is the best for one of them remains so until no other fits.
    """
    order = np.argsort(-lengths.astype(np.int64), kind="stable")
    values, counts = np.unique(lengths, return_counts=True)
    row_of = np.empty(len(lengths), np.int64)
    waiting: dict[int, deque[np.ndarray]] = defaultdict(deque)  # room -> rows with it
    rooms: list[int] = []  # those of the dict that hold any, ascending
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
            used = min(len(chunk), -(-count // fit))
            items = min(count, used * fit)
            full, rest = divmod(items, fit)
            row_of[done : done + items] = np.repeat(chunk[:used], fit)[:items]
            put(room, chunk[used:], front=True)
            put(room - fit * length, chunk[:full])
            put(room - rest * length, chunk[full:used])
            done, count = done + items, count - items
    starts = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=rows))])
    return order[np.argsort(row_of, kind="stable")], starts


def _usable(
    lengths: np.ndarray, first: int, last: int, width: int, packing: Packing, labels: IndexedDataset | None
) -> np.ndarray:
    """Documents of [first, last) with something to learn, and short enough if they must not be cut."""
    keep = lengths[first:last] > 0
    if not packing.allow_chopped:
        keep &= lengths[first:last] <= width
    if labels is not None:
        # Nothing precedes the first token: its label is never predicted
        keep &= has_label(labels, first, last, 1, min(width, packing.truncate_documents or width))
    return first + np.flatnonzero(keep)


def _blocks(lengths: np.ndarray, width: int, batch: int, drop_last: bool) -> np.ndarray:
    """sample_idx of blocks of `width` tokens that do not overlap, of every `batch` documents by themselves;
    their last block, when it is not full, is left out or short. As `group_texts` of HuggingFace's
    run_clm.py."""
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
    """Rows in order of training: shuffled anew in every epoch."""
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
    """GPT-NeoX's order of whole documents: it counts them from 0 wherever the split begins, and mixes the
    epochs.

    (Where a left-out document is the last of an epoch it fails; here the next epoch begins.) ends: of the
    segments, in samples; the documents of a further one go on from those of the one before, whose last row
    then has the token that follows it, as every other row.
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
    # The document after the last row's is only there for its first token
    starts = starts if not overflow else [*starts, len(doc_idx)]
    sample_idx = np.zeros((len(starts), 2), np.int64)
    sample_idx[:, 0] = starts
    return IndexMaps(np.array(doc_idx, np.int64), sample_idx, shuffle_idx[: max(0, len(starts) - 1)])


def _endless(documents: np.ndarray, random: np.random.RandomState | None) -> Iterator[int]:
    """Epoch after epoch, each shuffled when there is a generator."""
    while True:
        if random is not None:
            random.shuffle(documents)
        yield from documents.tolist()
