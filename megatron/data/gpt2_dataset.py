"""Packed pre-training samples: windows of seq_length + 1 tokens cut from the joined documents."""

import numpy as np

from megatron.data.index_maps import IndexMaps
from megatron.data.indexed_dataset import IndexedDataset


class PackedDataset:
    """Item i: int64 [seq_length + 1], window shuffle_idx[i] of the documents [first, last) of one `.bin/.idx` pair.

    `len()` counts every window; upstream leaves the last one out.
    """

    def __init__(self, name: str, indexed: IndexedDataset, maps: IndexMaps, seq_length: int, first: int, last: int):
        self.name, self.indexed, self.maps, self.seq_length = name, indexed, maps, seq_length
        self.first, self.last = first, last

    def __len__(self) -> int:
        return len(self.maps.shuffle_idx)

    def __getitem__(self, index: int) -> np.ndarray:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        window = int(self.maps.shuffle_idx[index])
        (place, offset), (last_place, _) = self.maps.sample_idx[window : window + 2].tolist()
        sample = np.empty(self.seq_length + 1, dtype=np.int64)
        filled = 0
        for document in self.maps.doc_idx[place : last_place + 1].tolist():
            piece = self.indexed.get(document, offset)[: len(sample) - filled]
            sample[filled : filled + len(piece)] = piece
            filled, offset = filled + len(piece), 0
        return sample

    def document_tokens(self) -> np.ndarray:
        """Every token of this set's documents once, in file order and stored dtype."""
        return self.indexed.span(self.first, self.last)
