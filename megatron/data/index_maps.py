"""Document, sample and shuffle order of packed pre-training data, equal to NeoX's for the same seed.

The documents of a split are shuffled (all epochs together), laid end to end, and cut into windows of seq_length + 1
tokens that overlap by one; the windows are shuffled again by the same generator. Documents cross window borders.
"""

from dataclasses import dataclass

import numpy as np

from megatron.data.cache import CacheKey

INT32_MAX = np.iinfo(np.int32).max
UINT32_MAX = np.iinfo(np.uint32).max


@dataclass(frozen=True)
class IndexMaps:
    """doc_idx [epochs * documents] sequence numbers; sample_idx [samples + 1, 2] = (place in doc_idx, token offset) of
    every window's first token; shuffle_idx [samples] windows in training order."""

    doc_idx: np.ndarray
    sample_idx: np.ndarray
    shuffle_idx: np.ndarray


@dataclass(frozen=True)
class IndexKey(CacheKey):
    """All that decides the maps of one part of one dataset."""

    index_sha256: str
    first: int
    last: int
    num_samples: int
    seq_length: int
    seed: int
    pack_impl: str
    format_version: int = 1


def epochs_for(tokens_per_epoch: int, seq_length: int, num_samples: int) -> int:
    """The least e >= 1 with (e * tokens_per_epoch - 1) // seq_length >= num_samples."""
    return max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))


def build_packed(sizes: np.ndarray, first: int, last: int, num_samples: int, seq_length: int, seed: int) -> IndexMaps:
    """Maps over sequences [first, last) whose lengths are sizes [n]; enough epochs for num_samples windows.

    All windows that fit into these epochs are used; upstream's `len(dataset)` is one short of them.
    """
    tokens_per_epoch = int(sizes[first:last].sum(dtype=np.int64))
    epochs = epochs_for(tokens_per_epoch, seq_length, num_samples)
    random = np.random.RandomState(seed)
    doc_idx = np.tile(np.arange(first, last, dtype=np.int32 if last <= INT32_MAX else np.int64), epochs)
    random.shuffle(doc_idx)
    sample_idx = _sample_idx(sizes, doc_idx, seq_length)
    samples = len(sample_idx) - 1
    shuffle_idx = np.arange(samples, dtype=np.uint32 if samples < UINT32_MAX - 1 else np.int64)
    random.shuffle(shuffle_idx)
    return IndexMaps(doc_idx, sample_idx, shuffle_idx)


def _sample_idx(sizes: np.ndarray, doc_idx: np.ndarray, seq_length: int) -> np.ndarray:
    lengths = sizes[doc_idx]
    ends = np.cumsum(lengths, dtype=np.int64)
    samples = (int(ends[-1]) - 1) // seq_length
    # Window i begins at token i * seq_length of the joined documents: in the first one that ends after it
    begins = np.arange(samples + 1, dtype=np.int64) * seq_length
    place = np.searchsorted(ends, begins, side="right")
    offset = begins - (ends[place] - lengths[place])
    # The first window begins at the first document, be it empty
    place[0] = offset[0] = 0
    dtype = np.int32 if 2 * (samples + 1) < INT32_MAX and len(doc_idx) <= INT32_MAX else np.int64
    return np.stack([place, offset], axis=1).astype(dtype)
