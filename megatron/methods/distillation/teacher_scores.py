"""Looks up a teacher's most likely tokens for rows of text, by a hash of their content."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron.data.blending import BlendedDataset, RepeatedDataset
from megatron.data.errors import DataError
from megatron.data.packed_dataset import PackedDataset, TokenSample, TopRow

# name: `row_name`; file: its number; first, count: its trained tokens in that file; digest: of these.
ROWS = np.dtype([("name", "S32"), ("first", "<i8"), ("count", "<i4"), ("digest", "S32")])


def token_type(k: int) -> np.dtype:
    """Return the numpy record type of the teacher's scores of one token.

    ids: the k most likely tokens. logprobs: their log-probabilities, then that of all other tokens together.
    """
    return np.dtype([("ids", "<i4", (k,)), ("logprobs", "<f4", (k + 1,))])


def trained_places(sample: TokenSample) -> np.ndarray:
    """Return the positions of the tokens that may be trained; position 0 is the second token of the row."""
    return np.flatnonzero(sample.labels[1:] >= 0)


def row_name(sample: TokenSample) -> bytes:
    """Return a hash of the row's tokens, trained positions and document starts, 32 hexadecimal digits."""
    digest = hashlib.blake2b(sample.tokens.astype("<i8").tobytes(), digest_size=16)
    digest.update((sample.labels >= 0).tobytes() + sample.begins.tobytes() + bytes([sample.labelled]))
    return digest.hexdigest().encode()


def digest_of_tokens(tokens: np.ndarray) -> bytes:
    """Return a hash of an array of records of `token_type`, 32 hexadecimal digits."""
    return hashlib.blake2b(tokens.tobytes(), digest_size=16).hexdigest().encode()


class Shard(NamedTuple):
    """One file pair of a teacher's scores. rows: records of type `ROWS`; tokens: memory-mapped records of
    `token_type`, one for each trained token of these rows."""

    file: Path
    rows: np.ndarray
    tokens: np.ndarray


class TeacherScores:
    """Looks up a teacher's scores of a row by `row_name`. If several rows have one name, the first counts."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = shards
        names = np.concatenate([np.empty(0, "S32"), *(shard.rows["name"] for shard in shards)])
        shard_numbers = [np.full(len(shard.rows), number) for number, shard in enumerate(shards)]
        row_numbers = [np.arange(len(shard.rows)) for shard in shards]
        self.names, first_indices = np.unique(names, return_index=True)
        no_rows = np.empty(0, np.int64)
        self._shard, self._row = (
            np.concatenate([no_rows, *shard_numbers])[first_indices],
            np.concatenate([no_rows, *row_numbers])[first_indices],
        )

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: bytes) -> bool:
        return self._find(name) is not None

    def _find(self, name: bytes) -> int | None:
        place = int(np.searchsorted(self.names, np.array(name, "S32")))
        return place if place < len(self.names) and self.names[place] == name else None

    def with_top(self, sample: TokenSample) -> TokenSample:
        """Return the sample with `top` set to the teacher's most likely tokens.

        Raises DataError if the sample has no scores or its score file is damaged.
        """
        place = self._find(row_name(sample))
        if place is None:
            raise DataError(
                "a row has no scores of the teacher: the data has changed since the run began; start the run again"
            )
        shard = self.shards[self._shard[place]]
        row = shard.rows[self._row[place]]
        tokens = shard.tokens[row["first"] : row["first"] + row["count"]]
        if digest_of_tokens(tokens) != row["digest"]:
            raise DataError(f"{shard.file}: damaged; delete this file, it is rebuilt")
        places, k = trained_places(sample), tokens["ids"].shape[1]
        ids = np.zeros((len(sample.tokens) - 1, k), np.int64)
        logprobs = np.zeros((len(sample.tokens) - 1, k + 1), np.float32)
        ids[places], logprobs[places] = tokens["ids"], tokens["logprobs"]
        return replace(sample, top=TopRow(ids, logprobs))


class TeacherScoredDataset:
    """Wraps a dataset: each sample gets `top`, the teacher's most likely tokens, looked up in `scores`."""

    def __init__(self, dataset: PackedDataset | BlendedDataset | RepeatedDataset, scores: TeacherScores) -> None:
        self.dataset, self.scores = dataset, scores

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> TokenSample:
        sample = self.dataset[index]
        assert isinstance(sample, TokenSample)
        return self.scores.with_top(sample)

    def pieces(self, index: int) -> Iterator[tuple[int, ...]]:
        """Return what the wrapped dataset's `pieces` yields for the sample: a tuple for each document."""
        return self.dataset.pieces(index)
