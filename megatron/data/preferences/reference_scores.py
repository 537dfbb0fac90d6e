"""Responses that a reference model has scored, found again by their tokens, wherever the data has put
them."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron.data.blending import BlendedDataset
from megatron.data.errors import DataError
from megatron.data.labels import MASKED
from megatron.data.packed_dataset import TokenSample
from megatron.data.packing import best_fit
from megatron.data.preferences.pairwise import common_prefix
from megatron.data.preferences.preference_dataset import PreferenceDataset, PreferenceSample
from megatron.data.sequences import SequenceDataset

# name: `Response.name`; sum: of the log-probabilities of its trained tokens; count: how many these are.
SCORES = np.dtype([("name", "S32"), ("sum", "<f4"), ("count", "<i4")])


@dataclass(frozen=True, eq=False)
class Response:
    """One response with its prompt, [tokens] int64. labels: of the tokens in the same places, negative where
    one is not trained."""

    tokens: np.ndarray
    labels: np.ndarray

    @property
    def name(self) -> bytes:
        """A hash of the tokens and of where they are trained, 32 hexadecimal digits."""
        digest = hashlib.blake2b(self.tokens.astype("<i8").tobytes(), digest_size=16)
        digest.update(np.where(self.labels >= 0, self.labels, MASKED).astype("<i8").tobytes())
        return digest.hexdigest().encode()

    @property
    def count(self) -> int:
        """How many of the tokens are trained."""
        return int((self.labels >= 0).sum())


def responses_of(sample: PreferenceSample) -> list[Response]:
    """The responses of a sample, in the order of their ids; those of its `kl_sample` are not among them.

    Raises DataError for a response that no row holds.
    """
    responses: list[Response] = []
    for number in range(len(sample.preference_labels)):
        for row, response_ids in zip(sample.rows, sample.response_ids, strict=True):
            places = np.flatnonzero(response_ids == number)
            if len(places):
                tokens, labels = row.tokens[places], row.labels[places].copy()
                labels[:1] = MASKED  # nothing stands before the first token, so it is never predicted
                if sample.prefix_lengths is not None and (shared := int(sample.prefix_lengths[number])):
                    tokens = np.concatenate([responses[-1].tokens[:shared], tokens])
                    labels = np.concatenate([np.full(shared, MASKED, np.int64), labels])
                responses.append(Response(tokens, labels))
                break
        else:
            raise DataError(f"a sample has no row of its answer {number}")
    return responses


def all_responses_of(sample: PreferenceSample) -> list[Response]:
    """The responses of a sample, then those of its `kl_sample`."""
    return responses_of(sample) + (responses_of(sample.kl_sample) if sample.kl_sample is not None else [])


def pack_responses(
    responses: Sequence[Response], width: int, packed: bool, least_saving: float | None = None
) -> tuple[list[PreferenceSample], list[int]]:
    """(samples of one row of `width` tokens each, indices of `responses` in the order of samples and ids).

    packed: several responses in one sample; otherwise each is alone. least_saving: the share of the tokens
    from which on what a response and the next one begin with is laid out once; None: never.
    """
    lengths = np.array([len(response.tokens) for response in responses], np.int64)
    shared = np.zeros_like(lengths)
    if packed and least_saving is not None:
        shared = _shared_with_the_one_before(responses, lengths, width)
        if shared.sum() < least_saving * lengths.sum():
            shared[:] = 0
    firsts = np.flatnonzero(shared == 0)  # each with the one that continues its prefix, if any
    order, begins = np.arange(len(firsts)), np.arange(len(firsts) + 1)
    if packed and responses:
        order, begins = best_fit(np.add.reduceat(lengths - shared, firsts), width)
    units = np.split(np.arange(len(responses)), firsts[1:])
    rows = [
        [int(i) for unit in order[first:last].tolist() for i in units[unit]]
        for first, last in zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True)
    ]
    samples = [responses_to_sample([responses[i] for i in row], width, shared[row]) for row in rows]
    return samples, [i for row in rows for i in row]


def _shared_with_the_one_before(responses: Sequence[Response], lengths: np.ndarray, width: int) -> np.ndarray:
    """How many tokens of the beginning of each response, [n], may be left out behind the one before: all that
    both begin with before the first trained one, but the last, whose place predicts."""
    shared = np.zeros_like(lengths)
    for i in range(1, len(responses)):
        if shared[i - 1] == 0:
            pair = responses[i - 1 : i + 1]
            most = min(int(np.argmax(response.labels >= 0)) for response in pair)
            saved = common_prefix(*(response.tokens[:most] for response in pair)) - 1
            if saved > 0 and lengths[i - 1] + lengths[i] - saved <= width:
                shared[i] = saved
    return shared


def responses_to_sample(
    responses: Sequence[Response], width: int, shared: np.ndarray | None = None
) -> PreferenceSample:
    """One row of `width` tokens that holds these responses; without any it is padding. shared: how many
    tokens of the beginning of each are left out, which are those of the one before."""
    left_out = [0] * len(responses) if shared is None else shared.tolist()
    tokens, labels = np.zeros(width, np.int64), np.full(width, MASKED, np.int64)
    begins, response_ids, filled = np.zeros(width, bool), np.full(width, -1, np.int64), 0
    for number, (response, begin) in enumerate(zip(responses, left_out, strict=True)):
        end = filled + len(response.tokens) - begin
        tokens[filled:end], labels[filled:end] = response.tokens[begin:], response.labels[begin:]
        response_ids[filled:end] = number
        begins[filled] = True
        filled = end
    begins[0] = begins[filled : filled + 1] = True
    row = TokenSample(tokens, labels, begins, True, filled=filled)
    prefixes = shared if any(left_out) else None
    return PreferenceSample((row,), (response_ids,), np.ones(len(responses), np.float32), prefix_lengths=prefixes)


class ReferenceScores:
    """Scored responses by name. rows: of `SCORES`, in any order; of equal names the first one counts."""

    def __init__(self, rows: np.ndarray) -> None:
        self.names, first = np.unique(rows["name"], return_index=True)
        self.rows = rows[first]

    def __len__(self) -> int:
        return len(self.rows)

    def find(self, names: Iterable[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """(whether each name has a score, boolean, and its index in `rows` where it has)."""
        wanted = np.array(list(names), self.names.dtype)
        if not len(self.names) or not len(wanted):
            return np.zeros(len(wanted), bool), np.zeros(len(wanted), np.int64)
        places = np.minimum(np.searchsorted(self.names, wanted), len(self.names) - 1)
        return self.names[places] == wanted, places

    def with_references(self, sample: PreferenceSample) -> PreferenceSample:
        """A sample with its `reference_logprobs`, and those of its `kl_sample`.

        Raises DataError for a response that was not scored.
        """
        known, places = self.find(response.name for response in responses_of(sample))
        if not known.all():
            raise DataError(
                f"{int((~known).sum())} of {len(known)} answers of a sample have no reference log-probabilities: the "
                "data has changed since the run began; start it again"
            )
        kl_sample = None if sample.kl_sample is None else self.with_references(sample.kl_sample)
        return replace(sample, reference_logprobs=self.rows["sum"][places], kl_sample=kl_sample)


class ReferenceScoredDataset:
    """The samples of a dataset with the reference scores of their responses."""

    def __init__(self, dataset: PreferenceDataset | BlendedDataset | SequenceDataset, scores: ReferenceScores) -> None:
        self.dataset, self.scores = dataset, scores

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> PreferenceSample:
        return self.scores.with_references(self.dataset[index])

    def pieces(self, index: int) -> Iterator[tuple[int, ...]]:
        """The documents that sample `index` is made from, as the dataset under it gives them."""
        return self.dataset.pieces(index)
