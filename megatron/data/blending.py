"""Blends several sets in proportion to their weights, in GPT-NeoX's order.

Sample i comes from the set d with the largest error weights[d] * max(i, 1) - drawn[d] (the first of equal
ones, all in float64), and is the next sample of that set. So the order does not depend on the number of
samples: more of them only continue it.
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
    """The order of the samples of a blend.

    dataset_index [samples]: for each sample, the index of the set that it comes from.
    dataset_sample_index [samples]: the index of the sample in that set.
    drawn [sets] int64: how many samples the blend takes from each set.
    """

    dataset_index: np.ndarray
    dataset_sample_index: np.ndarray
    drawn: np.ndarray


class BlendingKey(CacheKey):
    """Base class of the cache keys of blends; the field names are part of the names of cached files."""

    def build(self) -> BlendMaps:
        """Build the `BlendMaps` that this key describes."""
        raise NotImplementedError


@dataclass(frozen=True)
class BlendKey(BlendingKey):
    """The cache key of a blend of num_samples samples in proportion to the weights."""

    weights: tuple[float, ...]
    num_samples: int
    blend_version: int = 1

    def build(self) -> BlendMaps:
        return build_blend(self.weights, self.num_samples)


@dataclass(frozen=True)
class OnePassKey(BlendingKey):
    """The cache key of a blend that takes each sample once. Sets are drawn in proportion to their weights; a
    set with no samples left is skipped."""

    weights: tuple[float, ...]
    samples: tuple[int, ...]
    once_version: int = 1

    def build(self) -> BlendMaps:
        return interleave(self.samples, normalized(self.weights))


@dataclass(frozen=True)
class EpochKey(BlendingKey):
    """The cache key of one pass over several sets: each sample once, every set spread evenly over the pass.

    (GPT-NeoX draws equally from all sets, so small sets repeat and large sets are not used in full.)
    """

    samples: tuple[int, ...]
    epoch_version: int = 1

    def build(self) -> BlendMaps:
        return interleave(self.samples, np.asarray(self.samples, dtype=np.int64))


Phases = tuple[tuple[int, tuple[float, ...]], ...]  # (samples, weights), one after another


@dataclass(frozen=True)
class PhasesKey(BlendingKey):
    """The cache key of consecutive blends, each with its own weights."""

    phases: Phases
    phases_version: int = 1

    def build(self) -> BlendMaps:
        return build_phases(self.phases)


def normalized(weights: Sequence[float]) -> np.ndarray:
    """Return the weights divided by their sum, float64; the sum is taken from left to right as in NeoX."""
    values = np.asarray(weights, dtype=np.float64)
    return values / np.cumsum(values)[-1]


def samples_per_member(weights: Sequence[float], num_samples: int) -> list[int]:
    """Return how many samples to prepare of each set for a blend of num_samples: its share plus 0.5 %, as in
    NeoX. The blend never draws more than that."""
    return [math.ceil(num_samples * weight * 1.005) for weight in normalized(weights).tolist()]


def weight_phases(
    end_steps: Sequence[int], weights: Sequence[tuple[float, ...]], batch: int, num_samples: int
) -> Phases:
    """Return phases (number of samples, weights of the sets) for blend weights that change during the run.

    weights[0] apply up to step end_steps[0], weights[1] up to end_steps[1], and so on; the last weights apply
    to the end. batch: samples per step. num_samples: of all phases together.
    """
    borders = [0, *(min(step * batch, num_samples) for step in end_steps), num_samples]
    return tuple((end - begin, phase) for (begin, end), phase in zip(pairwise(borders), weights, strict=True))


def build_phases(phases: Phases) -> BlendMaps:
    """Return the maps of consecutive blends, one for each phase. A set continues after its last sample of the
    earlier phases. A set with weight 0 is not drawn in that phase."""
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
    """Return maps that take every sample of all sets once, ordered by (index in its set + 1/2) / share.

    samples: number of samples of each set. shares [sets]: how fast each set is drawn; only ratios count.
    """
    counts = np.asarray(samples, dtype=np.int64)
    numbers = np.concatenate([np.arange(count) for count in counts])
    order = np.argsort((numbers + 0.5) / np.repeat(shares, counts), kind="stable")
    sets = np.repeat(np.arange(len(counts), dtype=np.min_scalar_type(len(counts) - 1)), counts)
    return BlendMaps(sets[order], numbers[order], counts)


def weights_by_documents(documents: Sequence[int], alpha: float, compat: bool = False) -> tuple[float, ...]:
    """Return one blend weight for each set: (n_d / N) ^ alpha, scaled to sum to 1 (XLM-R, arXiv 1911.02116).

    documents: n_d, the documents of each set; N is their sum.
    compat: also multiply each by 1 - n_d / N, as GPT-NeoX does contrary to its documentation.
    """
    if len(documents) == 1:
        return (1.0,)
    shares = np.asarray(documents, dtype=np.float64) / sum(documents)
    # Python's power, as NeoX: that of numpy may differ in the last bit
    weights = normalized([share**alpha for share in shares.tolist()])
    return tuple((normalized(weights * (1 - shares)) if compat else weights).tolist())  # type: ignore[arg-type]


def build_blend(
    weights: Sequence[float], num_samples: int, *, lanes: int = 1024, lane_length: int = 4096, warm_up: int = 512
) -> BlendMaps:
    """Return the maps of the first num_samples samples of a blend of sets in proportion to `weights`.

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
    """Return (set, index in the set) for samples [start, start + lanes * length). num_drawn: samples drawn
    from each set before `start`.

    Drawing samples one by one would take minutes in Python. So the block is split into lanes that advance
    together. The state at a lane's start (samples drawn so far from each set) is guessed, and corrected by
    drawing the `warm_up` samples before it: wrong states soon converge to the right one, because the next
    sample always comes from the set that is furthest behind. A lane is right if it starts in the state in
    which the lane before it ends; the other lanes are computed again from that state.
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
    """Return how many of each lane's `samples` [lanes] come from each set by weight, [lanes, sets].

    Fractions are rounded by the largest-remainder method.
    """
    due = samples[:, None] * weights
    floors = np.floor(due)
    remainder = samples[:, None] - floors.sum(axis=1, keepdims=True)
    return floors + (np.argsort(np.argsort(floors - due)) < remainder)


def _draw(weights: np.ndarray, begins: np.ndarray, state: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw the next `steps` samples of every lane; return (set, index in the set), each [lanes, steps] int64.

    begins [lanes]: the number of each lane's next sample. state [lanes, sets] float64: how many samples each
    lane has drawn from each set before; updated in place.
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
    """A dataset whose item i is sample dataset_sample_index[i] of member dataset_index[i].

    Raises DataError if a member has fewer samples than the blend draws (GPT-NeoX would repeat them).
    """

    def __init__(self, members: Sequence[PackedDataset | PreferenceDataset], maps: BlendMaps):
        self.members, self.maps = tuple(members), maps
        for member, num_drawn in zip(members, maps.drawn.tolist(), strict=True):
            if num_drawn > len(member):
                raise DataError(f"{member.indexed.data_file}: {len(member)} samples, but the blend draws {num_drawn}")

    def __len__(self) -> int:
        return len(self.maps.dataset_index)

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"no sample {index}: the dataset has {len(self)}")
        return self.members[self.maps.dataset_index[index]][int(self.maps.dataset_sample_index[index])]

    def pieces(self, index: int) -> Iterator[tuple[int, ...]]:
        """Yield (index of the member, *piece) for each piece that the member's `pieces` yields."""
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
            raise IndexError(f"no sample {index}: the dataset has {len(self)}")
        return self.dataset[index % len(self.dataset)]

    def pieces(self, index: int) -> Iterator[tuple[int, ...]]:
        """Yield the tuples that the repeated dataset's `pieces` yields for the sample, one per document."""
        return self.dataset.pieces(index % len(self.dataset))
