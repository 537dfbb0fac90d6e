"""Defines the datasets of a run: its train, validation and test sets."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from megatron.data.index_maps import SegmentEnds


class SampleSet(Protocol):
    """The interface of a dataset of samples, which are read by their numbers."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...

    def pieces(self, index: int, /) -> Iterator[tuple[int, ...]]:
        """Return (document, first token, ...) for each piece, a part of a document, that makes up sample
        `index`."""


class WrappedSet:
    """Base class of datasets that change the samples of another dataset; each sample keeps the pieces it
    is made of."""

    def __init__(self, dataset: SampleSet) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def pieces(self, index: int) -> Iterator[tuple[int, ...]]:
        """Return the pieces (parts of documents) of sample `index`, as the wrapped dataset's `pieces`
        gives them."""
        return self.dataset.pieces(index)


@dataclass(frozen=True)
class SetContents:
    """The facts that decide the rows of a dataset; caches derived from the rows use them as their key.

    layout: hex SHA-256 of labels, keys and order.
    files: the files with the tokens.
    hash_cache: the folder that caches the hashes of these files (`cached_sha256`).
    """

    layout: str
    files: tuple[Path, ...]
    hash_cache: Path


@dataclass(frozen=True)
class Datasets:
    """The datasets of one run. A set is None if the split leaves it no document, or if the run takes no
    sample of it.

    valid_sets: {name: validation set} of the key `valid_sets`.
    further: {name: extra training set that the training method declares}, see `further_sets`.
    log_lines: lines about the sets for the start of the log.
    contents: for sets that a reference model scores, what decides their rows.
    segment_ends: the ends of the segments of each set's order, which `DataState` needs when a run is resumed.
    """

    train: SampleSet | None
    valid: SampleSet | None
    test: SampleSet | None
    log_lines: tuple[str, ...] = ()
    contents: Mapping[str, SetContents] = field(default_factory=dict)
    segment_ends: SegmentEnds = field(default_factory=dict)
    further: Mapping[str, SampleSet] = field(default_factory=dict)
    valid_sets: Mapping[str, SampleSet] = field(default_factory=dict)

    def get(self, name: str) -> SampleSet | None:
        """Return the dataset called `name`: train, valid, test, or one of `further`; None if the run does
        not have it."""
        return {**self.further, "train": self.train, "valid": self.valid, "test": self.test}.get(name)

    def with_sets(self, sets: Mapping[str, SampleSet | None]) -> "Datasets":
        """Return a copy in which the datasets in `sets`, by name, are replaced or added."""
        own_sets: dict[str, Any] = {name: value for name, value in sets.items() if name in ("train", "valid", "test")}
        further = {name: value for name, value in sets.items() if name not in own_sets and value is not None}
        return replace(self, further={**self.further, **further}, **own_sets)
