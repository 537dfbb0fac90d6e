"""Tells of which documents, in which files, a sample of a dataset of texts is made."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Piece:
    """A part of a document in a sample.

    source: index of the dataset among those that are blended; 0 for a single one. file: of the document's
      tokens. document: its number in the file, which is the number of its sequence in the index file.
    offset: the first of its tokens in the sample. place: where it begins in the sample. count: of its tokens.
    """

    source: int
    file: Path
    document: int
    offset: int
    place: int
    count: int


def pieces_of(dataset: Any, index: int) -> Iterator[Piece]:
    """Yield the pieces of sample `index`, in their order. dataset: of texts, as `build_datasets` makes it."""
    blend = dataset
    while hasattr(blend, "dataset"):  # a wrapper
        blend = blend.dataset
    members, place = getattr(blend, "members", (blend,)), 0
    for piece in dataset.pieces(index):
        *member, document, offset, count = piece
        source = member[0] if member else 0
        yield Piece(source, members[source].indexed.data_file, document, offset, place, count)
        place += count
