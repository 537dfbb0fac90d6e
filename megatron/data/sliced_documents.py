"""Documents made of parts of others: a response cut to a length, or a prompt with the response to another
one."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.labels import MASKED


@dataclass(frozen=True, eq=False)
class DocumentSlices:
    """One part of each of n documents, as arrays [n]: the source it is taken from, the document of that
    source, its first token there, and how many tokens."""

    source: np.ndarray
    document: np.ndarray
    begin: np.ndarray
    count: np.ndarray


class SlicedDocuments:
    """Reads like an `IndexedDataset` whose document d is `parts[0][d]`, then `parts[1][d]`, and so on, of
    `sources`."""

    def __init__(self, sources: Sequence[IndexedDataset], parts: Sequence[DocumentSlices]):
        self.sources, self.parts = tuple(sources), tuple(parts)
        self.sizes: np.ndarray = np.asarray(sum(part.count.astype(np.int64) for part in parts))
        self.data_file = sources[0].data_file

    def __len__(self) -> int:
        return len(self.sizes)

    def get(self, index: int, offset: int, length: int) -> np.ndarray:
        """`length` tokens of document `index` from its token `offset` on, in the stored type."""
        pieces, end = [], offset + length
        for part in self.parts:
            count = int(part.count[index])
            first, last = max(0, offset), min(count, end)
            if first < last:
                source, document = self.sources[int(part.source[index])], int(part.document[index])
                pieces.append(source.get(document, int(part.begin[index]) + first, last - first))
            offset, end = offset - count, end - count
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces or [np.empty(0, np.int64)])

    def origin(self, index: int, place: int) -> tuple[Path, int, int]:
        """(file, document, token) that token `place` of document `index` comes from.

        Raises IndexError for a token behind its end.
        """
        for part in self.parts:
            count = int(part.count[index])
            if place < count:
                source = self.sources[int(part.source[index])]
                return source.data_file, int(part.document[index]), int(part.begin[index]) + place
            place -= count
        raise IndexError(f"document {index} of {self.data_file} ends before that token")


class PromptMaskedLabels:
    """Labels where none are given: the tokens themselves, masked for the first `prompts` [documents] tokens
    of each."""

    def __init__(self, documents: SlicedDocuments, prompts: np.ndarray):
        self.documents, self.prompts, self.data_file = documents, prompts, documents.data_file

    def get(self, index: int, offset: int, length: int) -> np.ndarray:
        """The labels of `length` tokens of document `index` from its token `offset` on, int64."""
        labels = self.documents.get(index, offset, length).astype(np.int64)
        labels[: max(0, int(self.prompts[index]) - offset)] = MASKED
        return labels
