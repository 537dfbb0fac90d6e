"""Packed pre-training samples: windows of seq_length + 1 tokens cut from the joined documents."""

from collections.abc import Iterator

import numpy as np

from megatron.data.errors import DataError
from megatron.data.index_maps import IndexMaps
from megatron.data.indexed_dataset import IndexedDataset


class PackedDataset:
    """Item i: int64 [seq_length + 1], window shuffle_idx[i] of the documents of one `.bin/.idx` pair.

    `len()` counts every window; upstream leaves the last one out. Raises DataError for a window with a token id that
    is not below vocab_size (None: any id goes).
    """

    def __init__(
        self, name: str, indexed: IndexedDataset, maps: IndexMaps, seq_length: int, vocab_size: int | None = None
    ):
        self.name, self.indexed, self.maps, self.seq_length = name, indexed, maps, seq_length
        self.vocab_size = vocab_size

    def __len__(self) -> int:
        return len(self.maps.shuffle_idx)

    def __getitem__(self, index: int) -> np.ndarray:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        sample = np.empty(self.seq_length + 1, dtype=np.int64)
        filled = 0
        for _, _, piece in self._pieces(index):
            sample[filled : filled + len(piece)] = piece
            filled += len(piece)
        # Read as unsigned, a negative id is a large one
        if self.vocab_size is not None and sample.view(np.uint64).max() >= self.vocab_size:
            raise self._foreign_token(index, self.vocab_size)
        return sample

    @property
    def order(self) -> dict[str, int]:
        """What decides the order, besides `data_fingerprint`, seed and seq_length: equal numbers of samples over whole
        epochs mean the same shuffle."""
        return {f"{self.name}_samples": len(self)}

    def _pieces(self, index: int) -> Iterator[tuple[int, int, np.ndarray]]:
        """(document, its token to begin at, tokens) of a sample."""
        window = int(self.maps.shuffle_idx[index])
        (place, offset), (last_place, _) = self.maps.sample_idx[window : window + 2].tolist()
        missing = self.seq_length + 1
        for document in self.maps.doc_idx[place : last_place + 1].tolist():
            piece = self.indexed.get(document, offset)[:missing]
            yield document, offset, piece
            missing, offset = missing - len(piece), 0

    def _foreign_token(self, index: int, vocab_size: int) -> DataError:
        document, token, place = next(
            (document, int(piece[bad[0]]), offset + int(bad[0]))
            for document, offset, piece in self._pieces(index)
            if len(bad := np.flatnonzero((piece < 0) | (piece >= vocab_size)))
        )
        return DataError(
            f"{self.indexed.data_file}: document {document} holds token id {token} (its token {place}), but the "
            f"vocabulary has {vocab_size} entries (padded_vocab_size): the data was made with another tokenizer; "
            "set vocab_file to that one, or preprocess the text again with this one"
        )
