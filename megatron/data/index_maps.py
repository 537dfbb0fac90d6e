"""Document, sample and shuffle order of packed pre-training data, equal to NeoX's for the same seed.

The documents of a split are shuffled (all epochs together), laid end to end, and cut into windows of
seq_length + 1 tokens that overlap by one; the windows are shuffled again by the same generator. Documents
cross window borders.

So the order depends on how many epochs are mixed. A run that is extended keeps the epochs it was begun with
as they are; those that it needs besides are another segment of the order, shuffled by itself and laid behind
them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron.data.index_cache import CacheKey
from megatron.process import look_for_stop

INT32_MAX = np.iinfo(np.int32).max
UINT32_MAX = np.iinfo(np.uint32).max
CHUNK = 1 << 20  # documents looked at in one go, so that little memory is needed besides the maps


@dataclass(frozen=True)
class IndexMaps:
    """Which tokens make which sample, as in GPT-NeoX.

    doc_idx [epochs * documents]: sequence numbers in the order in which their tokens are laid end to end.
    sample_idx [samples + 1, 2]: (place in doc_idx, token offset) of the first token of every window.
    shuffle_idx [samples]: the windows in training order.
    """

    doc_idx: np.ndarray
    sample_idx: np.ndarray
    shuffle_idx: np.ndarray


@dataclass(frozen=True)
class Packing:
    """The configuration keys that decide how documents become samples. compat: `compat_pack_impl`.

    The names of the fields are part of the names of cached files.
    """

    pack_impl: str = "packed"
    allow_chopped: bool = True
    truncate_documents: int | None = None
    drop_last: bool | None = None
    group_texts_batch: int | None = None
    compat: bool = False

    @property
    def windows(self) -> bool:
        """Whether samples are GPT-NeoX's windows of seq_length + 1 tokens that overlap by one."""
        return self.pack_impl == "packed" and self.drop_last is None

    @property
    def joint(self) -> bool:
        """Whether the number of samples decides the order of all of them; otherwise more samples only
        continue it."""
        return self.windows or self.compat

    @property
    def whole_documents(self) -> bool:
        """Whether a document is never continued in another row."""
        return self.pack_impl != "packed"

    @property
    def overlap(self) -> int:
        """How many tokens the next row has in common with a row."""
        return 1 if self.windows or self.compat else 0

    def width(self, seq_length: int) -> int:
        """Tokens of a row: one more than the model reads, which is only predicted; a block has no such
        token."""
        return seq_length + 1 if self.windows or self.whole_documents else seq_length

    def lengths(self, sizes: np.ndarray) -> np.ndarray:
        """Tokens that are used of documents of these sizes, [documents]."""
        return sizes if self.truncate_documents is None else np.minimum(sizes, self.truncate_documents)


SegmentEnds = Mapping[str, tuple[tuple[int, ...], ...]]  # set name -> of each member, ends in samples


@dataclass(frozen=True)
class DataState:
    """How far a run is in its data, as its checkpoint says: what keeps the order of its samples when it is
    extended.

    The default is a new run. segment_ends: for each member of a set, where the segments of its order end, in
    samples (see `build_packed`); sets whose order only continues with more samples are not in it.
    forget_samples: consumed of each set of unlearning.
    """

    iteration: int = 0
    consumed_samples: int = 0
    segment_ends: SegmentEnds = field(default_factory=dict)
    forget_samples: int = 0

    def segments(self, name: str, member: int) -> tuple[int, ...]:
        """The segment ends of a member of a set; () where the run had no such member, or does not know."""
        members = self.segment_ends.get(name, ())
        return members[member] if member < len(members) else ()


@dataclass(frozen=True)
class IndexKey(CacheKey):
    """All that decides the maps of sequences [first, last) of one dataset. before: as in `build_packed`.

    The names of the fields are part of the names of cached files.
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
    """The least e >= 1 with (e * tokens_per_epoch - 1) // seq_length >= num_samples."""
    return max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))


def whole_windows(tokens_per_epoch: int, seq_length: int, num_samples: int) -> int:
    """How many windows fit into the epochs that num_samples windows need."""
    return (epochs_for(tokens_per_epoch, seq_length, num_samples) * tokens_per_epoch - 1) // seq_length


def segment_ends(before: Sequence[int], wanted: int, whole: Callable[[int], int]) -> tuple[int, ...]:
    """Where the segments of an order end, in samples: those of `before`, and one more if they are too few.

    whole: rounds a number of samples up to what is laid out at once, as `whole_windows`.
    """
    ends: list[int] = []
    for end in map(whole, (*before, wanted)):
        if not ends or end > ends[-1]:
            ends.append(end)
    return tuple(ends)


def segment_generators(seed: int, count: int) -> list[np.random.RandomState]:
    """A random generator for each segment of an order; that of the first one is GPT-NeoX's, of the seed
    alone."""
    return [np.random.RandomState(seed if number == 0 else [seed, number]) for number in range(count)]


def build_packed(
    sizes: np.ndarray,
    first: int,
    last: int,
    num_samples: int,
    seq_length: int,
    seed: int,
    before: Sequence[int] = (),
) -> IndexMaps:
    """Maps over sequences [first, last) whose lengths in tokens are sizes [n]; enough epochs for num_samples
    windows.

    All windows that fit into these epochs are used; upstream's `len(dataset)` is one short of them. before:
    where the earlier segments of the order end, in windows: their windows stay what they were, and the
    windows behind them begin with the tokens that filled none.
    """
    tokens_per_epoch = int(sizes[first:last].sum(dtype=np.int64))
    epochs = [0, *(epochs_for(tokens_per_epoch, seq_length, count) for count in (*before, num_samples))]
    doc_idx = np.tile(np.arange(first, last, dtype=np.int32 if last <= INT32_MAX else np.int64), epochs[-1])
    generators = segment_generators(seed, len(epochs) - 1)
    for random, begin, end in zip(generators, epochs, epochs[1:], strict=False):
        random.shuffle(doc_idx[begin * (last - first) : end * (last - first)])
    sample_idx = _sample_idx(sizes, doc_idx, epochs[-1] * tokens_per_epoch, seq_length)
    ends = [max(0, (count * tokens_per_epoch - 1) // seq_length) for count in epochs]
    shuffle_idx = np.arange(ends[-1], dtype=np.uint32 if ends[-1] < UINT32_MAX - 1 else np.int64)
    for random, begin, end in zip(generators, ends, ends[1:], strict=False):
        random.shuffle(shuffle_idx[begin:end])
    return IndexMaps(doc_idx, sample_idx, shuffle_idx)


def _sample_idx(sizes: np.ndarray, doc_idx: np.ndarray, tokens: int, seq_length: int) -> np.ndarray:
    """`IndexMaps.sample_idx` of GPT-NeoX's windows. tokens: the sum of the lengths of the documents in
    doc_idx."""
    samples = (tokens - 1) // seq_length
    dtype = np.int32 if 2 * (samples + 1) < INT32_MAX and len(doc_idx) <= INT32_MAX else np.int64
    sample_idx = np.empty((samples + 1, 2), dtype)
    before = 0
    for start in range(0, len(doc_idx), CHUNK):
        look_for_stop()
        lengths = sizes[doc_idx[start : start + CHUNK]]
        ends = before + np.cumsum(lengths, dtype=np.int64)
        # Window i begins at token i * seq_length of the joined documents: in the first one that ends after it
        first, last = -(-before // seq_length), -(-int(ends[-1]) // seq_length)
        begins = np.arange(first, last) * seq_length
        place = np.searchsorted(ends, begins, side="right")
        sample_idx[first:last, 0] = start + place
        sample_idx[first:last, 1] = begins - (ends[place] - lengths[place])
        before = int(ends[-1])
    # The first window begins at the first document, be it empty
    sample_idx[0] = 0
    return sample_idx
