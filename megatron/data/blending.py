"""Several sets read as one, in the proportion of their weights and in GPT-NeoX's order.

Sample i comes from the set d with the largest error weights[d] * max(i, 1) - drawn[d] (the first of equal
ones, all in float64), and is the next one of that set. So the order does not depend on the number of samples:
more of them only continue it.
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

LANES = 1024
LANE_LENGTH = 4096
WARM_UP = 512
UINT32_MAX = np.iinfo(np.uint32).max


@dataclass(frozen=True)
class BlendMaps:
    """dataset_index [samples]: the set of every sample;
    dataset_sample_index [samples]: its number in that set;
    drawn [sets] int64: how many samples are taken of each set."""

    dataset_index: np.ndarray
    dataset_sample_index: np.ndarray
    drawn: np.ndarray


class BlendingKey(CacheKey):
    """The base of the keys of blends; the names of the fields are part of the names of cached files."""

    def build(self) -> BlendMaps:
        """The maps that the fields decide."""
        raise NotImplementedError


@dataclass(frozen=True)
class BlendKey(BlendingKey):
    """All that decides the maps of a blend of num_samples samples in the proportion of the weights."""

    weights: tuple[float, ...]
    num_samples: int
    blend_version: int = 1

    def build(self) -> BlendMaps:
        return build_blend(self.weights, self.num_samples)


@dataclass(frozen=True)
class OnePassKey(BlendingKey):
    """All that decides the maps of a blend of each sample once, in the proportion of the weights while all
    sets last; a set that has given its samples is left out of what follows."""

    weights: tuple[float, ...]
    samples: tuple[int, ...]
    once_version: int = 1

    def build(self) -> BlendMaps:
        return interleave(self.samples, normalized(self.weights))


@dataclass(frozen=True)
class EpochKey(BlendingKey):
    """All that decides the maps of one pass over several sets: each sample once, every set spread evenly over
    the pass.

    (GPT-NeoX draws from all sets alike, so that small ones come again and large ones never end.)
    """

    samples: tuple[int, ...]
    epoch_version: int = 1

    def build(self) -> BlendMaps:
        return interleave(self.samples, np.asarray(self.samples, dtype=np.int64))


Phases = tuple[tuple[int, tuple[float, ...]], ...]  # (samples, weights), one after another


@dataclass(frozen=True)
class PhasesKey(BlendingKey):
    """All that decides the maps of blends that follow each other, each with weights of its own."""

    phases: Phases
    phases_version: int = 1

    def build(self) -> BlendMaps:
        return build_phases(self.phases)


def normalized(weights: Sequence[float]) -> np.ndarray:
    """The weights divided by their sum, float64; they are added from left to right as in NeoX."""
    values = np.asarray(weights, dtype=np.float64)
    return values / np.cumsum(values)[-1]


def samples_per_member(weights: Sequence[float], num_samples: int) -> list[int]:
    """Samples to prepare of each set: 0.5 % more than its share, as in NeoX. No more than these are ever
    drawn."""
    return [math.ceil(num_samples * weight * 1.005) for weight in normalized(weights).tolist()]


def weight_phases(until: Sequence[int], weights: Sequence[tuple[float, ...]], batch: int, num_samples: int) -> Phases:
    """The weights that hold up to step until[0], until[1], ... and then to the end, by samples; `batch` a
    step."""
    borders = [0, *(min(step * batch, num_samples) for step in until), num_samples]
    return tuple((end - begin, phase) for (begin, end), phase in zip(pairwise(borders), weights, strict=True))


def build_phases(phases: Phases) -> BlendMaps:
    """Blends one after another: in each phase a set goes on where it stopped in the one before. A weight of 0
    leaves a set out of a phase."""
    drawn = np.zeros(len(phases[0][1]), np.int64)
    which, number = [], []
    for samples, weights in phases:
        present = np.flatnonzero(weights)
        blend = build_blend([weights[i] for i in present.tolist()], samples)
        which.append(present.astype(np.min_scalar_type(len(drawn) - 1))[blend.dataset_index])
        number.append(blend.dataset_sample_index + drawn[which[-1]])
        drawn[present] += blend.drawn
    return BlendMaps(np.concatenate(which), np.concatenate(number), drawn)


def interleave(samples: Sequence[int], shares: np.ndarray) -> BlendMaps:
    """Each sample of all sets once, in the order of (its number + 1/2) / the share of its set.

    samples: how many each set has. shares [sets]: in any unit.
    """
    counts = np.asarray(samples, dtype=np.int64)
    numbers = np.concatenate([np.arange(count) for count in counts])
    order = np.argsort((numbers + 0.5) / np.repeat(shares, counts), kind="stable")
    sets = np.repeat(np.arange(len(counts), dtype=np.min_scalar_type(len(counts) - 1)), counts)
    return BlendMaps(sets[order], numbers[order], counts)


def weights_by_documents(documents: Sequence[int], alpha: float, compat: bool = False) -> tuple[float, ...]:
    """Weights (n_d / N) ^ alpha, summing to 1, of sets of n_d documents (XLM-R, arXiv 1911.02116).

    compat: each multiplied by 1 - n_d / N besides, as GPT-NeoX does contrary to its documentation.
    """
    if len(documents) == 1:
        return (1.0,)
    shares = np.asarray(documents, dtype=np.float64) / sum(documents)
    # Python's power, as NeoX: that of numpy may differ in the last bit
    weights = normalized([share**alpha for share in shares.tolist()])
    return tuple((normalized(weights * (1 - shares)) if compat else weights).tolist())  # type: ignore[arg-type]


def build_blend(
    weights: Sequence[float],
    num_samples: int,
    *,
    lanes: int = LANES,
    lane_length: int = LANE_LENGTH,
    warm_up: int = WARM_UP,
) -> BlendMaps:
    """The order of the first num_samples samples.

    lanes, lane_length, warm_up: how the work is cut up (see `_block`); the result does not depend on them.
    """
    # NeoX normalises once more, with numpy's sum
    shares = normalized(weights)
    shares /= np.sum(shares)
    dataset_index = np.empty(num_samples, np.min_scalar_type(len(shares) - 1))
    sample_index = np.empty(num_samples, np.uint32 if num_samples <= UINT32_MAX else np.int64)
    drawn = np.zeros(len(shares), np.int64)
    for first in range(0, num_samples, lanes * lane_length):
        look_for_stop()
        block = slice(first, min(num_samples, first + lanes * lane_length))
        count = block.stop - first
        chosen, number = _block(
            shares, first, drawn, -(-count // lane_length), min(lane_length, count), min(warm_up, lane_length)
        )
        dataset_index[block], sample_index[block] = chosen[:count], number[:count]
        drawn += np.bincount(chosen[:count], minlength=len(drawn))
    return BlendMaps(dataset_index, sample_index, drawn)


def _block(
    weights: np.ndarray, first: int, drawn: np.ndarray, lanes: int, length: int, warm_up: int
) -> tuple[np.ndarray, np.ndarray]:
    """(set, number in the set) of samples [first, first + lanes * length), the sets having given `drawn`
    before.

    One sample after the other would take minutes in Python. So the block is cut into lanes that go on
    together, each from a guess of what was drawn before it, made better by a run-up of `warm_up` samples: two
    runs that differ soon fall into step, since what one of them has drawn too little of is what it draws
    next. A lane is right if it begins exactly as the lane before it ends; those that are not begin again,
    from that very state.
    """
    begins = first + length * np.arange(lanes)
    state = np.empty((lanes, len(weights)))
    state[0] = drawn
    state[1:] = _share_out(weights, begins[1:] - warm_up)
    _draw(weights, begins[1:] - warm_up, state[1:], warm_up)
    start = state.copy()
    chosen, number = _draw(weights, begins, state, length)
    while len(wrong := 1 + np.flatnonzero((start[1:] != state[:-1]).any(axis=1))):
        start[wrong] = state[wrong - 1]
        end = start[wrong]
        chosen[wrong], number[wrong] = _draw(weights, begins[wrong], end, length)
        state[wrong] = end
    return chosen.ravel(), number.ravel()


def _share_out(weights: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """`samples` [lanes] divided by weight among the sets [lanes, sets], rounded by largest remainder."""
    due = samples[:, None] * weights
    whole = np.floor(due)
    left = samples[:, None] - whole.sum(axis=1, keepdims=True)
    return whole + (np.argsort(np.argsort(whole - due)) < left)


def _draw(weights: np.ndarray, begins: np.ndarray, state: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Go on by `steps` samples in every lane: (set, number in the set), each [lanes, steps] int64.

    begins [lanes] sample each lane is at; state [lanes, sets] float64 drawn before it, changed in place.
    """
    lanes, sets = state.shape
    chosen, number = np.empty((2, steps, lanes), np.int64)
    position = begins[:, None].astype(np.float64)
    error = np.empty_like(state)
    flat, row = state.reshape(-1), sets * np.arange(lanes)
    for step in range(steps):
        # Two roundings, as in NeoX: a fused multiply-add would order near-ties otherwise
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
    """Item i: sample dataset_sample_index[i] of member dataset_index[i].

    Upstream starts a member again, with a warning, that has given all its samples; here that does not occur.
    """

    def __init__(self, name: str, members: Sequence[PackedDataset | PreferenceDataset], maps: BlendMaps):
        self.name, self.members, self.maps = name, tuple(members), maps
        for member, drawn in zip(members, maps.drawn.tolist(), strict=True):
            if drawn > len(member):
                raise DataError(f"{member.indexed.data_file}: {len(member)} samples, but {drawn} are drawn of it")

    def __len__(self) -> int:
        return len(self.maps.dataset_index)

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.members[self.maps.dataset_index[index]][int(self.maps.dataset_sample_index[index])]

    def pieces(self, index: int) -> Iterator[tuple[int, ...]]:
        """(member, and what `pieces` of that member gives) of each document in sample `index`."""
        member = int(self.maps.dataset_index[index])
        for piece in self.members[member].pieces(int(self.maps.dataset_sample_index[index])):
            yield member, *piece


class RepeatedDataset:
    """`epochs` passes over a dataset (`train_epochs`): every window once, then again in the same order, as
    NeoX's."""

    def __init__(self, dataset: PackedDataset | BlendedDataset, epochs: int):
        self.dataset, self.epochs = dataset, epochs

    def __len__(self) -> int:
        return self.epochs * len(self.dataset)

    def __getitem__(self, index: int) -> TokenSample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.dataset[index % len(self.dataset)]

    def pieces(self, index: int) -> Iterator[tuple[int, ...]]:
        """The documents that sample `index` is made from, as the dataset under it gives them."""
        return self.dataset.pieces(index % len(self.dataset))
