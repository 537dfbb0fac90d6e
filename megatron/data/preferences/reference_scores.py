"""Looks up a reference model's scores of responses by a hash of the responses' tokens."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron.data.errors import DataError
from megatron.data.labels import MASKED
from megatron.data.packed_dataset import TokenSample
from megatron.data.packing import best_fit
from megatron.data.preferences.pairwise import common_prefix
from megatron.data.preferences.preference_dataset import PreferenceSample
from megatron.data.run_datasets import SampleSet, WrappedSet

# name: `Response.name`; sum: summed log-probabilities of its trained tokens; count: number of trained tokens.
SCORES = np.dtype([("name", "S32"), ("sum", "<f4"), ("count", "<i4")])


@dataclass(frozen=True, eq=False)
class Response:
    """A response together with its prompt, as tokens and labels, both [tokens] int64.

    labels: the label of each token, negative if it is not trained.
    """

    tokens: np.ndarray
    labels: np.ndarray

    @property
    def name(self) -> bytes:
        """A hash of the response's tokens and of the labels that are trained, 32 hexadecimal digits."""
        digest = hashlib.blake2b(self.tokens.astype("<i8").tobytes(), digest_size=16)
        digest.update(np.where(self.labels >= 0, self.labels, MASKED).astype("<i8").tobytes())
        return digest.hexdigest().encode()

    @property
    def count(self) -> int:
        """The number of trained tokens."""
        return int((self.labels >= 0).sum())


def responses_of(sample: PreferenceSample) -> list[Response]:
    """Return the responses of a sample in the order of their ids, without the responses of its `kl_sample`.

    Raises DataError for a response that no row holds.
    """
    responses: list[Response] = []
    for number in range(len(sample.preference_labels)):
        for row, response_ids in zip(sample.rows, sample.response_ids, strict=True):
            places = np.flatnonzero(response_ids == number)
            if len(places):
                tokens, labels = row.tokens[places], row.labels[places].copy()
                labels[:1] = MASKED  # no token precedes the first token, so it is never predicted
                if sample.prefix_lengths is not None and (shared := int(sample.prefix_lengths[number])):
                    tokens = np.concatenate([responses[-1].tokens[:shared], tokens])
                    labels = np.concatenate([np.full(shared, MASKED, np.int64), labels])
                responses.append(Response(tokens, labels))
                break
        else:
            raise DataError(f"answer {number} of a sample is in none of the sample's rows; make the data again")
    return responses


def all_responses_of(sample: PreferenceSample) -> list[Response]:
    """Return the responses of a sample, followed by the responses of its `kl_sample`."""
    return responses_of(sample) + (responses_of(sample.kl_sample) if sample.kl_sample is not None else [])


def pack_responses(
    responses: Sequence[Response], width: int, packed: bool, least_saving: float | None = None
) -> tuple[list[PreferenceSample], list[int]]:
    """Pack responses into samples with one row of `width` tokens each.

    Returns (the samples, for each response in the order of the samples its index in `responses`).
    packed: a sample holds several responses; otherwise one.
    least_saving: store a common prefix of consecutive responses once if that saves at least this share of the
      tokens; None: never.
    """
    lengths = np.array([len(response.tokens) for response in responses], np.int64)
    shared = np.zeros_like(lengths)
    if packed and least_saving is not None:
        shared = _shared_with_previous(responses, lengths, width)
        if shared.sum() < least_saving * lengths.sum():
            shared[:] = 0
    firsts = np.flatnonzero(shared == 0)  # responses that share no prefix with the response before
    order, begins = np.arange(len(firsts)), np.arange(len(firsts) + 1)
    if packed and responses:
        order, begins = best_fit(np.add.reduceat(lengths - shared, firsts), width)
    units = np.split(np.arange(len(responses)), firsts[1:])
    rows = [
        [int(i) for unit in order[begin:end].tolist() for i in units[unit]]
        for begin, end in zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True)
    ]
    samples = [responses_to_sample([responses[i] for i in row], width, shared[row]) for row in rows]
    return samples, [i for row in rows for i in row]


def _shared_with_previous(responses: Sequence[Response], lengths: np.ndarray, width: int) -> np.ndarray:
    """Return how many tokens at the beginning of each response need not be stored, [n].

    The response before it begins with the same tokens. They are the common prefix of both prompts without its
    last token, because the answer's first token is predicted at the position of that token.
    """
    shared = np.zeros_like(lengths)
    for i in range(1, len(responses)):
        if shared[i - 1] == 0:
            pair = responses[i - 1 : i + 1]
            prompt_length = min(int(np.argmax(response.labels >= 0)) for response in pair)
            saved = common_prefix(*(response.tokens[:prompt_length] for response in pair)) - 1
            if saved > 0 and lengths[i - 1] + lengths[i] - saved <= width:
                shared[i] = saved
    return shared


def responses_to_sample(
    responses: Sequence[Response], width: int, shared: np.ndarray | None = None
) -> PreferenceSample:
    """Return a sample with one row of `width` tokens that holds these responses, then padding.

    shared: how many tokens at the beginning of each response are left out, because the response before it
      begins with them.
    """
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
    """Looks up a reference model's scores of responses by `Response.name`.

    rows: records of type `SCORES`, in any order. If several have the same name, the first is used.
    """

    def __init__(self, rows: np.ndarray) -> None:
        self.names, first_indices = np.unique(rows["name"], return_index=True)
        self.rows = rows[first_indices]

    def __len__(self) -> int:
        return len(self.rows)

    def find(self, names: Iterable[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """Return (whether each name has a score, boolean [names]; index of the score in `rows`, valid only
        if there is one)."""
        name_array = np.array(list(names), self.names.dtype)
        if not len(self.names) or not len(name_array):
            return np.zeros(len(name_array), bool), np.zeros(len(name_array), np.int64)
        places = np.minimum(np.searchsorted(self.names, name_array), len(self.names) - 1)
        return self.names[places] == name_array, places

    def with_references(self, sample: PreferenceSample) -> PreferenceSample:
        """Return the sample with `reference_logprobs` set, also in its `kl_sample`.

        Raises DataError for a response without a score.
        """
        has_score, places = self.find(response.name for response in responses_of(sample))
        if not has_score.all():
            raise DataError(
                f"{int((~has_score).sum())} of {len(has_score)} answers of a sample have no reference "
                "log-probabilities: the data changed after they were computed; start the run again"
            )
        kl_sample = None if sample.kl_sample is None else self.with_references(sample.kl_sample)
        return replace(sample, reference_logprobs=self.rows["sum"][places], kl_sample=kl_sample)


class ReferenceScoredDataset(WrappedSet):
    """Wraps a dataset so that each sample has the `reference_logprobs` of its responses, looked up in
    `scores`."""

    def __init__(self, dataset: SampleSet, scores: ReferenceScores) -> None:
        super().__init__(dataset)
        self.scores = scores

    def __getitem__(self, index: int) -> PreferenceSample:
        return self.scores.with_references(self.dataset[index])
