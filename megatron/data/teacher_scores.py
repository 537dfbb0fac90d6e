"""Rows of texts for which a teacher's most likely tokens are known, found again by what stands in them."""

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
    """Of a trained token: the most likely ids, and their log-probabilities with that of all others."""
    return np.dtype([("ids", "<i4", (k,)), ("logprobs", "<f4", (k + 1,))])


def trained_places(sample: TokenSample) -> np.ndarray:
    """The places, counted from the second token of the row on, whose token may be trained."""
    return np.flatnonzero(sample.labels[1:] >= 0)


def row_name(sample: TokenSample) -> bytes:
    """A hash of the tokens, of which are trained and of where documents begin, 32 hexadecimal digits."""
    digest = hashlib.blake2b(sample.tokens.astype("<i8").tobytes(), digest_size=16)
    digest.update((sample.labels >= 0).tobytes() + sample.begins.tobytes() + bytes([sample.labelled]))
    return digest.hexdigest().encode()


def digest_of_tokens(tokens: np.ndarray) -> bytes:
    """32 hexadecimal digits."""
    return hashlib.blake2b(tokens.tobytes(), digest_size=16).hexdigest().encode()


class Shard(NamedTuple):
    """One file of each kind in a folder of scores. rows: of `ROWS`; tokens: of `token_type`, mapped."""

    file: Path
    rows: np.ndarray
    tokens: np.ndarray


class TeacherScores:
    """Scored rows by name; of equal names the first one counts."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = shards
        names = np.concatenate([np.empty(0, "S32"), *(shard.rows["name"] for shard in shards)])
        of_shard = [np.full(len(shard.rows), number) for number, shard in enumerate(shards)]
        of_row = [np.arange(len(shard.rows)) for shard in shards]
        self.names, first = np.unique(names, return_index=True)
        none = np.empty(0, np.int64)
        self._shard, self._row = np.concatenate([none, *of_shard])[first], np.concatenate([none, *of_row])[first]

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: bytes) -> bool:
        return self._find(name) is not None

    def _find(self, name: bytes) -> int | None:
        place = int(np.searchsorted(self.names, np.array(name, "S32")))
        return place if place < len(self.names) and self.names[place] == name else None

    def with_top(self, sample: TokenSample) -> TokenSample:
        """The sample with its `top`. Raises DataError for one that was not scored, and for damaged files."""
        place = self._find(row_name(sample))
        if place is None:
            raise DataError(
                "a row has no scores of the teacher: the data has changed since the run began; start it again"
            )
        shard = self.shards[self._shard[place]]
        row = shard.rows[self._row[place]]
        tokens = shard.tokens[row["first"] : row["first"] + row["count"]]
        if digest_of_tokens(tokens) != row["digest"]:
            raise DataError(f"{shard.file}: damaged; delete it, it is made again")
        places, k = trained_places(sample), tokens["ids"].shape[1]
        ids = np.zeros((len(sample.tokens) - 1, k), np.int64)
        logprobs = np.zeros((len(sample.tokens) - 1, k + 1), np.float32)
        ids[places], logprobs[places] = tokens["ids"], tokens["logprobs"]
        return replace(sample, top=TopRow(ids, logprobs))


class TeacherScoredDataset:
    """The samples of a dataset with the teacher's most likely tokens."""

    def __init__(self, dataset: PackedDataset | BlendedDataset | RepeatedDataset, scores: TeacherScores) -> None:
        self.dataset, self.scores = dataset, scores

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> TokenSample:
        sample = self.dataset[index]
        assert isinstance(sample, TokenSample)
        return self.scores.with_top(sample)

    def pieces(self, index: int) -> Iterator[tuple[int, ...]]:
        """The documents that sample `index` is made from, as the dataset under it gives them."""
        return self.dataset.pieces(index)
