"""Makes documents of parts of other documents: a truncated response, or a prompt with another prompt's
response."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.labels import MASKED


@dataclass(frozen=True, eq=False)
class DocumentSlices:
    """The slices of stored documents that make n new documents, as arrays [n].

    source: index of the dataset. document: index of the document in it. begin: first token of the slice.
      count: its number of tokens.
    """

    source: np.ndarray
    document: np.ndarray
    begin: np.ndarray
    count: np.ndarray


class SlicedDocuments:
    """Reads like an `IndexedDataset` whose documents are made of slices of documents in `sources`.

    Document d is the slices `parts[0][d]`, `parts[1][d]`, ..., joined.
    """

    def __init__(self, sources: Sequence[IndexedDataset], parts: Sequence[DocumentSlices]):
        self.sources, self.parts = tuple(sources), tuple(parts)
        self.sizes: np.ndarray = np.asarray(sum(part.count.astype(np.int64) for part in parts))
        self.data_file = sources[0].data_file

    def __len__(self) -> int:
        return len(self.sizes)

    def get(self, index: int, offset: int, length: int) -> np.ndarray:
        """Return `length` tokens of document `index` from its token `offset` on, in the stored type."""
        pieces, end = [], offset + length
        for part in self.parts:
            count = int(part.count[index])
            start, stop = max(0, offset), min(count, end)
            if start < stop:
                source, document = self.sources[int(part.source[index])], int(part.document[index])
                pieces.append(source.get(document, int(part.begin[index]) + start, stop - start))
            offset, end = offset - count, end - count
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces or [np.empty(0, np.int64)])

    def origin(self, index: int, place: int) -> tuple[Path, int, int]:
        """Return (file, document, token): where token `place` of document `index` was taken from.

        Raises IndexError if the document is shorter.
        """
        for part in self.parts:
            count = int(part.count[index])
            if place < count:
                source = self.sources[int(part.source[index])]
                return source.data_file, int(part.document[index]), int(part.begin[index]) + place
            place -= count
        raise IndexError(f"document {index} of {self.data_file} ends before the requested token")


class PromptMaskedLabels:
    """Labels for data without label files: the tokens themselves, with the first `prompts[d]` of document
    d masked."""

    def __init__(self, documents: SlicedDocuments, prompts: np.ndarray):
        self.documents, self.prompts, self.data_file = documents, prompts, documents.data_file

    def get(self, index: int, offset: int, length: int) -> np.ndarray:
        """Return the labels of `length` tokens of document `index` from its token `offset` on, int64."""
        labels = self.documents.get(index, offset, length).astype(np.int64)
        labels[: max(0, int(self.prompts[index]) - offset)] = MASKED
        return labels
