"""Blends several datasets in proportion to their weights, in GPT-NeoX's order.

Sample i is the next sample of the dataset d with the largest error weights[d] * max(i, 1) - drawn[d], in
float64; of equal errors the first d counts. So the order does not depend on the number of samples: a longer
blend begins with the samples of a shorter one.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from megatron.data.errors import DataError
from megatron.data.index_cache import CacheKey
from megatron.data.packed_dataset import PackedDataset, TokenSample
from megatron.data.preferences.preference_dataset import PreferenceDataset
from megatron.process import look_for_stop


@dataclass(frozen=True)
class BlendMaps:
    """The order of samples in a blend of datasets.

    dataset_index [samples]: for each sample of the blend, the index of the dataset it comes from.
    dataset_sample_index [samples]: the index of the sample in that dataset.
    drawn [sets] int64: how many samples the blend takes from each dataset.
    """

    dataset_index: np.ndarray
    dataset_sample_index: np.ndarray
    drawn: np.ndarray


class BlendingKey(CacheKey):
    """Base class of the cache keys of blends. The names of its fields go into the names of cached files."""

    def build(self) -> BlendMaps:
        """Build the `BlendMaps` that this key describes."""
        raise NotImplementedError


@dataclass(frozen=True)
class BlendKey(BlendingKey):
    """The cache key of a blend of `num_samples` samples, drawn from datasets in proportion to `weights`."""

    weights: tuple[float, ...]
    num_samples: int
    blend_version: int = 1

    def build(self) -> BlendMaps:
        return build_blend(self.weights, self.num_samples)


@dataclass(frozen=True)
class OnePassKey(BlendingKey):
    """The cache key of a blend that takes every sample of every dataset once.

    Datasets are drawn in proportion to `weights`. A dataset with no samples left is skipped.
    """

    weights: tuple[float, ...]
    samples: tuple[int, ...]
    once_version: int = 1

    def build(self) -> BlendMaps:
        return interleave(self.samples, normalized(self.weights))


@dataclass(frozen=True)
class EpochKey(BlendingKey):
    """The cache key of one pass over several datasets: each sample once, every dataset spread evenly over the
    pass.

    (GPT-NeoX draws equally from all datasets, so small ones repeat and large ones are not used in full.)
    """

    samples: tuple[int, ...]
    epoch_version: int = 1

    def build(self) -> BlendMaps:
        return interleave(self.samples, np.asarray(self.samples, dtype=np.int64))


Phases = tuple[tuple[int, tuple[float, ...]], ...]  # (number of samples, weights of the datasets) of consecutive blends


@dataclass(frozen=True)
class PhasesKey(BlendingKey):
    """The cache key of several blends in sequence, each with its own number of samples and weights."""

    phases: Phases
    phases_version: int = 1

    def build(self) -> BlendMaps:
        return build_phases(self.phases)


def normalized(weights: Sequence[float]) -> np.ndarray:
    """Return the weights divided by their sum, float64. The sum is taken from left to right, as in NeoX."""
    values = np.asarray(weights, dtype=np.float64)
    return values / np.cumsum(values)[-1]


def samples_per_member(weights: Sequence[float], num_samples: int) -> list[int]:
    """Return how many samples to prepare of each dataset for a blend of `num_samples` samples.

    It is the dataset's share plus 0.5 %, as in NeoX. The blend never draws more.
    """
    return [math.ceil(num_samples * weight * 1.005) for weight in normalized(weights).tolist()]


def weight_phases(
    end_steps: Sequence[int], weights: Sequence[tuple[float, ...]], batch: int, num_samples: int
) -> Phases:
    """Return the phases (number of samples, weights of the datasets) of a blend whose weights change during
    the run.

    weights[0] apply up to step end_steps[0], weights[1] up to end_steps[1], and so on; the last weights apply
    to the end. batch: samples per step. num_samples: samples of all phases together.
    """
    borders = [0, *(min(step * batch, num_samples) for step in end_steps), num_samples]
    return tuple((end - begin, phase) for (begin, end), phase in zip(pairwise(borders), weights, strict=True))


def build_phases(phases: Phases) -> BlendMaps:
    """Return the maps of a blend that runs through `phases` one after another.

    In each phase a dataset continues after the samples it gave in earlier phases. A dataset with weight 0 is
    not drawn in that phase.
    """
    num_drawn = np.zeros(len(phases[0][1]), np.int64)
    set_indices, number = [], []
    for samples, weights in phases:
        present = np.flatnonzero(weights)
        blend = build_blend([weights[i] for i in present.tolist()], samples)
        set_indices.append(present.astype(np.min_scalar_type(len(num_drawn) - 1))[blend.dataset_index])
        number.append(blend.dataset_sample_index + num_drawn[set_indices[-1]])
        num_drawn[present] += blend.drawn
    return BlendMaps(np.concatenate(set_indices), np.concatenate(number), num_drawn)


def interleave(samples: Sequence[int], shares: np.ndarray) -> BlendMaps:
    """Return maps that take every sample of all datasets once, ordered by (index in its dataset + 1/2) /
    share.

    samples: number of samples of each dataset. shares [sets]: how fast each dataset is drawn; only ratios
      count.
    """
    counts = np.asarray(samples, dtype=np.int64)
    numbers = np.concatenate([np.arange(count) for count in counts])
    order = np.argsort((numbers + 0.5) / np.repeat(shares, counts), kind="stable")
    sets = np.repeat(np.arange(len(counts), dtype=np.min_scalar_type(len(counts) - 1)), counts)
    return BlendMaps(sets[order], numbers[order], counts)


def weights_by_documents(documents: Sequence[int], alpha: float, compat: bool = False) -> tuple[float, ...]:
    """Return one blend weight for each dataset: (n_d / N) ^ alpha, scaled to sum to 1 (XLM-R, arXiv
    1911.02116).

    documents: n_d, the number of documents of each dataset; N is their sum.
    compat: also multiply each weight by 1 - n_d / N, as GPT-NeoX does contrary to its documentation.
    """
    if len(documents) == 1:
        return (1.0,)
    shares = np.asarray(documents, dtype=np.float64) / sum(documents)
    # Python's ** as in NeoX: numpy's power may differ in the last bit
    weights = normalized([share**alpha for share in shares.tolist()])
    return tuple((normalized(weights * (1 - shares)) if compat else weights).tolist())  # type: ignore[arg-type]


def build_blend(
    weights: Sequence[float], num_samples: int, *, lanes: int = 1024, lane_length: int = 4096, warm_up: int = 512
) -> BlendMaps:
    """Return the maps of the first `num_samples` samples of a blend of datasets in proportion to `weights`.

    lanes, lane_length, warm_up: how the work is split (see `_block`); the result does not depend on them.
    """
    # NeoX normalises once more, with numpy's sum
    shares = normalized(weights)
    shares /= np.sum(shares)
    dataset_index = np.empty(num_samples, np.min_scalar_type(len(shares) - 1))
    sample_index = np.empty(num_samples, np.uint32 if num_samples <= np.iinfo(np.uint32).max else np.int64)
    num_drawn = np.zeros(len(shares), np.int64)
    for start in range(0, num_samples, lanes * lane_length):
        look_for_stop()
        block = slice(start, min(num_samples, start + lanes * lane_length))
        count = block.stop - start
        chosen, number = _block(
            shares, start, num_drawn, -(-count // lane_length), min(lane_length, count), min(warm_up, lane_length)
        )
        dataset_index[block], sample_index[block] = chosen[:count], number[:count]
        num_drawn += np.bincount(chosen[:count], minlength=len(num_drawn))
    return BlendMaps(dataset_index, sample_index, num_drawn)


def _block(
    weights: np.ndarray, start: int, num_drawn: np.ndarray, lanes: int, length: int, warm_up: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return (dataset, index in the dataset) for the samples [start, start + lanes * length) of a blend.

    num_drawn: samples drawn from each dataset before `start`.
    Drawing samples one by one would take minutes in Python. So the block is split into lanes that advance
    together. The state at a lane's start (samples drawn so far from each dataset) is guessed, and corrected
    by drawing the `warm_up` samples before it: wrong states soon converge to the right one, because the next
    sample always comes from the dataset that is furthest behind. A lane is right if it starts in the state in
    which the lane before it ends; all other lanes are computed again from that state.
    """
    begins = start + length * np.arange(lanes)
    state = np.empty((lanes, len(weights)))
    state[0] = num_drawn
    state[1:] = _share_out(weights, begins[1:] - warm_up)
    _draw(weights, begins[1:] - warm_up, state[1:], warm_up)
    lane_start = state.copy()
    chosen, number = _draw(weights, begins, state, length)
    while len(wrong := 1 + np.flatnonzero((lane_start[1:] != state[:-1]).any(axis=1))):
        lane_start[wrong] = state[wrong - 1]
        end = lane_start[wrong]
        chosen[wrong], number[wrong] = _draw(weights, begins[wrong], end, length)
        state[wrong] = end
    return chosen.ravel(), number.ravel()


def _share_out(weights: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Divide each lane's `samples` [lanes] among the datasets by weight; return whole numbers [lanes, sets].

    Fractions are rounded by the largest-remainder method.
    """
    due = samples[:, None] * weights
    floors = np.floor(due)
    remainder = samples[:, None] - floors.sum(axis=1, keepdims=True)
    return floors + (np.argsort(np.argsort(floors - due)) < remainder)


def _draw(weights: np.ndarray, begins: np.ndarray, state: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw the next `steps` samples of every lane; return (dataset, index in the dataset), each [lanes,
    steps] int64.

    begins [lanes]: the index in the blend of each lane's next sample. state [lanes, sets] float64: how many
      samples each lane has drawn from each dataset so far; updated in place.
    """
    lanes, sets = state.shape
    chosen, number = np.empty((2, steps, lanes), np.int64)
    position = begins[:, None].astype(np.float64)
    error = np.empty_like(state)
    flat, row = state.reshape(-1), sets * np.arange(lanes)
    for step in range(steps):
        # Two roundings, as in NeoX: a fused multiply-add would order near-ties differently
        np.multiply(weights, np.maximum(position, 1.0), out=error)
        np.subtract(error, state, out=error)
        error.argmax(axis=1, out=chosen[step])
        place = row + chosen[step]
        count = flat[place]
        number[step] = count
        flat[place] = count + 1
        position += 1
    return chosen.T, number.T


class BlendedDataset:
    """A dataset that blends `members` (datasets): item i is sample dataset_sample_index[i] of member
    dataset_index[i].

    Raises DataError if a member has fewer samples than the blend draws (GPT-NeoX would repeat them).
    """

    def __init__(self, members: Sequence[PackedDataset | PreferenceDataset], maps: BlendMaps):
        self.members, self.maps = tuple(members), maps
        for member, num_drawn in zip(members, maps.drawn.tolist(), strict=True):
            if num_drawn > len(member):
                raise DataError(
                    f"{member.indexed.data_file}: {len(member)} samples, but the blend draws {num_drawn}; lower the "
                    "weight of this dataset, or give it more data"
                )

    def __len__(self) -> int:
        return len(self.maps.dataset_index)

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is out of range: the dataset has {len(self)} samples")
        return self.members[self.maps.dataset_index[index]][int(self.maps.dataset_sample_index[index])]

    def pieces(self, index: int) -> Iterator[tuple[int, ...]]:
        """Yield (index of the member, *piece) for each piece (part of a document) that makes up sample
        `index`.

        The member's own `pieces` defines a piece.
        """
        member = int(self.maps.dataset_index[index])
        for piece in self.members[member].pieces(int(self.maps.dataset_sample_index[index])):
            yield member, *piece


class RepeatedDataset:
    """Repeats a dataset `epochs` times (`train_epochs`), in the same order each time, as NeoX does."""

    def __init__(self, dataset: PackedDataset | BlendedDataset, epochs: int):
        self.dataset, self.epochs = dataset, epochs

    def __len__(self) -> int:
        return self.epochs * len(self.dataset)

    def __getitem__(self, index: int) -> TokenSample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is out of range: the dataset has {len(self)} samples")
        return self.dataset[index % len(self.dataset)]

    def pieces(self, index: int) -> Iterator[tuple[int, ...]]:
        """Yield the pieces (parts of documents) that make up sample `index`, as the repeated dataset's
        `pieces` does."""
        return self.dataset.pieces(index % len(self.dataset))
