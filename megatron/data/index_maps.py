"""Builds the document, sample and shuffle order of packed pre-training data, equal to NeoX's for the same
seed.

The documents of a split are shuffled (all epochs together), laid end to end, and split into windows of
seq_length + 1 tokens that overlap by one; the same generator then shuffles the windows. Documents cross
window borders.

So the order depends on how many epochs are shuffled together. If a run is extended, its first epochs keep
their order; the additional epochs form another segment of the order, which is shuffled by itself and
appended.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron.data.index_cache import CacheKey
from megatron.process import look_for_stop

INT32_MAX = np.iinfo(np.int32).max
UINT32_MAX = np.iinfo(np.uint32).max
CHUNK = 1 << 20  # documents processed at once, which limits memory


@dataclass(frozen=True)
class IndexMaps:
    """Maps from samples to tokens, as in GPT-NeoX.

    doc_idx [epochs * documents]: sequence numbers, in the order in which their tokens are laid end to end.
    sample_idx [samples + 1, 2]: where each window begins: (index into doc_idx, token in that sequence).
    shuffle_idx [samples]: the indices of the windows in training order.
    """

    doc_idx: np.ndarray
    sample_idx: np.ndarray
    shuffle_idx: np.ndarray


@dataclass(frozen=True)
class Packing:
    """The configuration keys that decide how documents become samples. compat: the key `compat_pack_impl`.

    The field names are part of the names of cached files.
    """

    pack_impl: str = "packed"
    allow_chopped: bool = True
    truncate_documents: int | None = None
    drop_last: bool | None = None
    group_texts_batch: int | None = None
    compat: bool = False

    @property
    def windows(self) -> bool:
        """True if samples are GPT-NeoX's windows of seq_length + 1 tokens, which overlap by one."""
        return self.pack_impl == "packed" and self.drop_last is None

    @property
    def joint(self) -> bool:
        """True if the total number of samples changes the order of the first samples; False if more
        samples are only appended."""
        return self.windows or self.compat

    @property
    def unsplit_documents(self) -> bool:
        """True if no document continues in another row."""
        return self.pack_impl != "packed"

    @property
    def overlap(self) -> int:
        """The number of tokens that consecutive rows share: 0 or 1."""
        return 1 if self.windows or self.compat else 0

    def width(self, seq_length: int) -> int:
        """Return how many tokens a row takes from the data.

        Usually it is seq_length + 1, where the last token is only a label; for blocks (`drop_last` set) it is
        seq_length.
        """
        return seq_length + 1 if self.windows or self.unsplit_documents else seq_length

    def lengths(self, sizes: np.ndarray) -> np.ndarray:
        """Return how many tokens of each document are used, [documents]: its size, at most
        `truncate_documents`."""
        return sizes if self.truncate_documents is None else np.minimum(sizes, self.truncate_documents)


SegmentEnds = Mapping[
    str, tuple[tuple[int, ...], ...]
]  # set name -> for each member, the ends of its segments in samples


@dataclass(frozen=True)
class DataState:
    """The position of a run in its data, from its checkpoint; an extended run needs it to keep the order of
    its samples.

    The default is a new run. segment_ends: for each member of a set, the ends of the segments of its order,
    in samples (see `build_packed`); sets whose order does not depend on the number of samples are omitted.
    further_samples: samples consumed of each of `further_sets`.
    """

    iteration: int = 0
    consumed_samples: int = 0
    segment_ends: SegmentEnds = field(default_factory=dict)
    further_samples: int = 0

    def segments(self, name: str, member: int) -> tuple[int, ...]:
        """Return the ends of the segments (see `build_packed`) of dataset number `member` of set `name`.

        It is () if the run had no such dataset, or did not record its segment ends.
        """
        members = self.segment_ends.get(name, ())
        return members[member] if member < len(members) else ()


@dataclass(frozen=True)
class IndexKey(CacheKey):
    """The cache key of the index maps of sequences [first, last) of one dataset.

    before: `earlier_ends` of `build_packed`. The field names are part of the names of cached files.
    """

    index_sha256: str
    first: int
    last: int
    num_samples: int
    seq_length: int
    seed: int
    packing: Packing
    labels_sha256: str | None = None
    before: tuple[int, ...] = ()
    format_version: int = 2


def epochs_for(tokens_per_epoch: int, seq_length: int, num_samples: int) -> int:
    """Return how many epochs of `tokens_per_epoch` tokens are needed for `num_samples` windows.

    It is the smallest e >= 1 with (e * tokens_per_epoch - 1) // seq_length >= num_samples.
    """
    return max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))


def full_windows(tokens_per_epoch: int, seq_length: int, num_samples: int) -> int:
    """Return how many windows fit into the epochs that `num_samples` windows need."""
    return (epochs_for(tokens_per_epoch, seq_length, num_samples) * tokens_per_epoch - 1) // seq_length


def segment_ends(earlier_ends: Sequence[int], num_samples: int, round_up: Callable[[int], int]) -> tuple[int, ...]:
    """Return the ends of the segments of an order of samples, in samples.

    Each extension of a run adds a segment to the order (see `build_packed`). The ends are the earlier ends,
    then one more if num_samples exceeds the last of them. round_up: maps each of these numbers of samples to
    the number laid out in full epochs, as `full_windows` does.
    """
    ends: list[int] = []
    for end in map(round_up, (*earlier_ends, num_samples)):
        if not ends or end > ends[-1]:
            ends.append(end)
    return tuple(ends)


def segment_generators(seed: int, count: int) -> list[np.random.RandomState]:
    """Return `count` random generators, one for each segment of an order of samples.

    Each extension of a run adds a segment to the order. The first generator is seeded with `seed` alone, as
    in GPT-NeoX.
    """
    return [np.random.RandomState(seed if number == 0 else [seed, number]) for number in range(count)]


def build_packed(
    sizes: np.ndarray,
    start: int,
    stop: int,
    num_samples: int,
    seq_length: int,
    seed: int,
    earlier_ends: Sequence[int] = (),
) -> IndexMaps:
    """Build the index maps of GPT-NeoX's windows over sequences [start, stop), in enough epochs for
    `num_samples` windows.

    All windows that fit into these epochs are used; GPT-NeoX's `len(dataset)` is one less.
    sizes: [n] tokens of each sequence.
    earlier_ends: for an extended run, the numbers of windows after which earlier segments of the order end.
      Windows of earlier segments stay the same; the next segment begins with the tokens that they leave over.
    """
    tokens_per_epoch = int(sizes[start:stop].sum(dtype=np.int64))
    epochs = [0, *(epochs_for(tokens_per_epoch, seq_length, count) for count in (*earlier_ends, num_samples))]
    doc_idx = np.tile(np.arange(start, stop, dtype=np.int32 if stop <= INT32_MAX else np.int64), epochs[-1])
    generators = segment_generators(seed, len(epochs) - 1)
    for random, begin, end in zip(generators, epochs, epochs[1:], strict=False):
        random.shuffle(doc_idx[begin * (stop - start) : end * (stop - start)])
    sample_idx = _sample_idx(sizes, doc_idx, epochs[-1] * tokens_per_epoch, seq_length)
    ends = [max(0, (count * tokens_per_epoch - 1) // seq_length) for count in epochs]
    shuffle_idx = np.arange(ends[-1], dtype=np.uint32 if ends[-1] < UINT32_MAX - 1 else np.int64)
    for random, begin, end in zip(generators, ends, ends[1:], strict=False):
        random.shuffle(shuffle_idx[begin:end])
    return IndexMaps(doc_idx, sample_idx, shuffle_idx)


def _sample_idx(sizes: np.ndarray, doc_idx: np.ndarray, tokens: int, seq_length: int) -> np.ndarray:
    """Return `IndexMaps.sample_idx` of GPT-NeoX's windows.

    tokens: sum of the lengths of the documents in doc_idx.
    """
    samples = (tokens - 1) // seq_length
    dtype = np.int32 if 2 * (samples + 1) < INT32_MAX and len(doc_idx) <= INT32_MAX else np.int64
    sample_idx = np.empty((samples + 1, 2), dtype)
    tokens_so_far = 0
    for start in range(0, len(doc_idx), CHUNK):
        look_for_stop()
        lengths = sizes[doc_idx[start : start + CHUNK]]
        ends = tokens_so_far + np.cumsum(lengths, dtype=np.int64)
        # Window i begins at token i * seq_length of the joined documents, in the first that ends after it
        first_window, end_window = -(-tokens_so_far // seq_length), -(-int(ends[-1]) // seq_length)
        begins = np.arange(first_window, end_window) * seq_length
        place = np.searchsorted(ends, begins, side="right")
        sample_idx[first_window:end_window, 0] = start + place
        sample_idx[first_window:end_window, 1] = begins - (ends[place] - lengths[place])
        tokens_so_far = int(ends[-1])
    # The first window begins at the first document, even if that is empty
    sample_idx[0] = 0
    return sample_idx
