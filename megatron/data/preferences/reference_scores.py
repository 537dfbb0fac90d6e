"""Rows that a reference model has scored, found again by what stands in them, wherever the data has put them."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron.data.blending import BlendedDataset
from megatron.data.errors import DataError
from megatron.data.labels import MASKED
from megatron.data.packed_dataset import Sample
from megatron.data.packing import best_fit
from megatron.data.preferences.preference_dataset import AnswerDataset, Answers

# name: `AnswerRow.name`; sum: of the log-probabilities of its trained tokens; count: how many these are.
SCORES = np.dtype([("name", "S32"), ("sum", "<f4"), ("count", "<i4")])


@dataclass(frozen=True, eq=False)
class AnswerRow:
    """An answer with its prompt, alone. labels: of the tokens in the same places, negative where one is not trained."""

    tokens: np.ndarray
    labels: np.ndarray

    @property
    def name(self) -> bytes:
        """A hash of the tokens and of where they are trained."""
        digest = hashlib.blake2b(self.tokens.astype("<i8").tobytes(), digest_size=16)
        digest.update(np.where(self.labels >= 0, self.labels, MASKED).astype("<i8").tobytes())
        return digest.hexdigest().encode()

    @property
    def count(self) -> int:
        return int((self.labels >= 0).sum())


def answer_rows(item: Answers) -> list[AnswerRow]:
    """The answers of a sample by number; those of its `kl` are not among them."""
    found = []
    for answer in range(len(item.preference_labels)):
        for row, numbers in zip(item.rows, item.response_ids, strict=True):
            places = np.flatnonzero(numbers == answer)
            if len(places):
                labels = row.labels[places].copy()
                labels[:1] = MASKED  # nothing stands before it
                found.append(AnswerRow(row.tokens[places], labels))
                break
        else:
            raise DataError(f"a sample has no row of its answer {answer}")
    return found


def all_answer_rows(item: Answers) -> list[AnswerRow]:
    """These, then those of `kl`."""
    return answer_rows(item) + (answer_rows(item.kl_sample) if item.kl_sample is not None else [])


def samples_of(rows: Sequence[AnswerRow], width: int, packed: bool) -> tuple[list[Answers], list[int]]:
    """Samples of one row, `width` tokens wide, and which of `rows` their answers are, in order of samples and numbers.

    packed: several answers in one; else each alone.
    """
    order, begins = np.arange(len(rows)), np.arange(len(rows) + 1)
    if packed and rows:
        order, begins = best_fit(np.array([len(row.tokens) for row in rows]), width)
    places = order.tolist()
    return [
        sample_of([rows[i] for i in places[first:last]], width)
        for first, last in zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True)
    ], places


def sample_of(rows: Sequence[AnswerRow], width: int) -> Answers:
    """One row of these answers; of none it is padding."""
    tokens, labels = np.zeros(width, np.int64), np.full(width, MASKED, np.int64)
    begins, numbers, filled = np.zeros(width, bool), np.full(width, -1, np.int64), 0
    for number, row in enumerate(rows):
        end = filled + len(row.tokens)
        tokens[filled:end], labels[filled:end], numbers[filled:end] = row.tokens, row.labels, number
        begins[filled] = True
        filled = end
    begins[0] = begins[filled : filled + 1] = True
    return Answers((Sample(tokens, labels, begins, True),), (numbers,), np.ones(len(rows), np.float32))


class Scores:
    """Scored rows by name. rows: of `SCORES`, in any order; of equal names the first counts."""

    def __init__(self, rows: np.ndarray) -> None:
        self.names, first = np.unique(rows["name"], return_index=True)
        self.rows = rows[first]

    def __len__(self) -> int:
        return len(self.rows)

    def find(self, names: Iterable[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """Which of these are there, boolean, and of each its place in `rows`, where it is there."""
        asked = np.array(list(names), self.names.dtype)
        if not len(self.names) or not len(asked):
            return np.zeros(len(asked), bool), np.zeros(len(asked), np.int64)
        places = np.minimum(np.searchsorted(self.names, asked), len(self.names) - 1)
        return self.names[places] == asked, places

    def with_references(self, item: Answers) -> Answers:
        """A sample with its `reference`, and that of its `kl`. Raises DataError for a row that was not scored."""
        there, places = self.find(row.name for row in answer_rows(item))
        if not there.all():
            raise DataError(
                f"{int((~there).sum())} of {len(there)} answers of a sample have no reference log-probabilities: the "
                "data has changed since the run began; start it again"
            )
        kl = None if item.kl_sample is None else self.with_references(item.kl_sample)
        return replace(item, reference_logprobs=self.rows["sum"][places], kl_sample=kl)


class ReferencedDataset:
    """The samples of a dataset with the scores of their answers."""

    def __init__(self, dataset: AnswerDataset | BlendedDataset, scores: Scores) -> None:
        self.dataset, self.scores = dataset, scores

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Answers:
        return self.scores.with_references(self.dataset[index])

    def pieces(self, index: int) -> Iterator[tuple[int, ...]]:
        """As those of the dataset."""
        return self.dataset.pieces(index)
