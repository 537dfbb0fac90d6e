"""Provides samples of seq_length + 1 tokens, cut out of documents by index maps, with labels and rewards."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron.data.errors import DataError
from megatron.data.index_maps import IndexMaps, Packing
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.labels import MASKED
from megatron.data.sliced_documents import PromptMaskedLabels, SlicedDocuments


class TopRow(NamedTuple):
    """A teacher model's k most likely tokens at each position of a row.

    ids: `[seq_length, k]` int64.
    logprobs: `[seq_length, k + 1]` float32; the last column is for all other tokens together.
    """

    ids: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True, eq=False)
class TokenSample:
    """One row of a batch, as arrays with one entry for each of its seq_length + 1 tokens."""

    tokens: np.ndarray  # int64; 0 in padding
    labels: np.ndarray  # int64, not shifted: the token in the same place; negative where it is not trained
    begins: np.ndarray  # boolean: True where the row, a document or the padding begins
    labelled: bool = False  # True: the labels come from the data; False: they are the tokens
    reward: float | None = None  # reward of the row's first document
    filled: int | None = None  # number of positions before the padding; None: all
    top: TopRow | None = None  # a teacher's values, if they were computed before the run


class PackedDataset:
    """A dataset over one `.bin/.idx` pair, its labels and rewards: item i is the `TokenSample` of row
    shuffle_idx[i].

    `len()` counts every row; GPT-NeoX leaves the last one out. Reading an item raises DataError if its row
    has a token or label that is not below vocab_size (None: no limit).
    """

    def __init__(
        self,
        indexed: IndexedDataset | SlicedDocuments,
        maps: IndexMaps,
        seq_length: int,
        vocab_size: int | None = None,
        *,
        packing: Packing | None = None,
        labels: IndexedDataset | SlicedDocuments | PromptMaskedLabels | None = None,
        rewards: IndexedDataset | None = None,
    ):
        self.indexed, self.maps, self.seq_length = indexed, maps, seq_length
        self.packing, self.labels, self.rewards = packing or Packing(), labels, rewards
        self.vocab_size = vocab_size

    def __len__(self) -> int:
        return len(self.maps.shuffle_idx)

    def __getitem__(self, index: int) -> TokenSample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is out of range: the dataset has {len(self)} samples")
        tokens = np.zeros(self.seq_length + 1, np.int64)
        labels = np.full(self.seq_length + 1, MASKED, np.int64)
        begins = np.zeros(self.seq_length + 1, bool)
        filled, reward = 0, None
        for document, offset, count in self.pieces(index):
            place = slice(filled, filled + count)
            tokens[place] = self.indexed.get(document, offset, count)
            labels[place] = tokens[place] if self.labels is None else self.labels.get(document, offset, count)
            if self.rewards is not None and not filled:
                reward = float(self.rewards.get(document, 0, 1)[0])
            begins[filled] = True
            filled += count
        begins[0] = True
        begins[filled : filled + 1] = True
        if self.packing.compat and self.labels is None:
            labels[filled:] = 0
        if self.vocab_size is not None:
            # Read as unsigned, a negative id is a large number
            if tokens.view(np.uint64).max() >= self.vocab_size or labels.max() >= self.vocab_size:
                raise self._foreign_token(index, self.vocab_size)
        return TokenSample(tokens, labels, begins, self.labels is not None, reward, filled)

    def pieces(self, index: int) -> Iterator[tuple[int, int, int]]:
        """Yield (document, first token, number of tokens) for each document, or part of a document, in
        sample `index`."""
        for _, document, offset, count in self.row_pieces(int(self.maps.shuffle_idx[index])):
            yield document, offset, count

    def row_pieces(self, row: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (index into `doc_idx`, document, first token, number of tokens) of each part of a row, before
        rows are shuffled."""
        (place, offset), (last_place, last_offset) = self.maps.sample_idx[row : row + 2].tolist()
        places_left = self.packing.width(self.seq_length)
        documents = self.maps.doc_idx[place : last_place + 1].tolist()
        for position, document in enumerate(documents, start=place):
            end = int(self.packing.lengths(self.indexed.sizes[document]))
            if position == last_place:
                end = min(end, last_offset + self.packing.overlap)
            count = min(end - offset, places_left)
            if count > 0:
                yield position, document, offset, count
                places_left -= count
            offset = 0

    def _foreign_token(self, index: int, vocab_size: int) -> DataError:
        document, place, token, data = next(
            (document, offset + int(bad[0]), int(row[bad[0]]), data)
            for document, offset, count in self.pieces(index)
            for data in (self.indexed, self.labels)
            if data is not None
            for row in [data.get(document, offset, count).astype(np.int64)]
            if len(bad := np.flatnonzero((row >= vocab_size) | ((row < 0) & (data is self.indexed))))
        )
        file = data.data_file
        if isinstance(data, SlicedDocuments):
            file, document, place = data.origin(document, place)
        return DataError(
            f"{file}: document {document} holds token id {token} (its token {place}), but the "
            f"vocabulary has {vocab_size} entries (padded_vocab_size): the data was made with another tokenizer; "
            "set vocab_file to that tokenizer, or preprocess the text again with the one in vocab_file"
        )


def answer_row(prompt: Sequence[int], answer: Sequence[int], width: int, trained: Sequence[bool] | bool) -> TokenSample:
    """Returns a row of `width` tokens: a prompt, an answer, and padding.

    trained: whether the answer is trained, or which of its tokens are.
    """
    tokens, labels, begins = np.zeros(width, np.int64), np.full(width, MASKED, np.int64), np.zeros(width, bool)
    start, filled = len(prompt), len(prompt) + len(answer)
    tokens[:filled] = [*prompt, *answer]
    labels[start:filled] = np.where(trained, tokens[start:filled], MASKED)
    begins[0] = begins[filled : filled + 1] = True
    return TokenSample(tokens, labels, begins, True, None, filled)
