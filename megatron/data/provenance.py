"""Tells of which documents, in which files, a sample of a dataset of texts is made."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Piece(NamedTuple):
    """A part of a document in a sample.

    source: index of the dataset among those that are blended; 0 for a single one. file: of the document's
      tokens. document: its number in the file. first_token: the document's first token in the sample. start,
      stop: its places in the sample's tokens.
    """

    source: int
    file: Path
    document: int
    first_token: int
    start: int
    stop: int


def pieces_of(dataset: Any, index: int) -> Iterator[Piece]:
    """Yield the pieces of sample `index`, in their order. dataset: of texts, as `build_datasets` makes it."""
    blend = dataset
    while hasattr(blend, "dataset"):  # a wrapper
        blend = blend.dataset
    members, filled = getattr(blend, "members", (blend,)), 0
    for piece in dataset.pieces(index):
        *member, document, first_token, count = piece
        source = member[0] if member else 0
        yield Piece(source, members[source].indexed.data_file, document, first_token, filled, filled + count)
        filled += count
