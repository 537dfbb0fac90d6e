"""Tells at which steps a run has read parts of documents, through its index maps, without reading batches."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.data.blending import BlendedDataset, RepeatedDataset
from megatron.data.packed_dataset import PackedDataset
from megatron.data.run_datasets import SampleSet, WrappedSet
from megatron.experiments.find_text import Occurrence
from megatron.experiments.past_run import PastRun
from megatron.experiments.run_data import RunData
from megatron.process import look_for_stop

_CHUNK = 1 << 22  # entries of an index map compared at once


@dataclass(frozen=True, order=True)
class Sighting:
    """A step's row that has a part of an occurrence, from its token `skipped` on.

    row: in the step. place: of the first of the `count` tokens in the row.
    """

    step: int
    row: int
    place: int
    count: int
    skipped: int
    sample: int


def sightings(data: RunData, source: int, occurrences: Sequence[Occurrence], last_step: int) -> list[list[Sighting]]:
    """Returns where the run has read each occurrence in a source, in order of steps.

    last_step: the last one that counts. Raises StopRequested after a stop signal.

    A row of GPT-NeoX's windows ends with a token that is a label alone, and the next row begins with it. It
    counts in the next row, so that each token of an epoch is in one row.
    """
    member, spans = data.members[source], data.run.spans
    results: list[list[Sighting]] = [[] for _ in occurrences]
    parts = list(_parts(member, occurrences))  # (occurrence, row, place, tokens, skipped)
    samples = _samples_of_rows(member, np.unique([row for _, row, *_ in parts]))
    in_member = sorted({sample for numbers in samples.values() for sample in numbers})
    in_set = _samples_of_set(data.dataset, source, np.array(in_member, np.int64))
    for number, row, place, count, skipped in parts:
        for sample in (i for n in samples.get(row, ()) for i in in_set.get(n, ())):
            step, row_in_step = step_of_sample(data.run, sample)
            count_in_row = min(count, data.length(step) + 1 - place)  # a curriculum may truncate rows
            if spans[0].start <= step <= last_step and count_in_row > 0:
                results[number].append(Sighting(step, row_in_step, place, count_in_row, skipped, sample))
    return [sorted(rows) for rows in results]


def step_of_sample(run: PastRun, sample: int) -> tuple[int, int]:
    """Returns (step that reads a sample, its row in the step); a step outside of the run's if none does."""
    spans = run.spans
    span = spans[max(0, bisect_right(spans, sample, key=lambda span: span.consumed) - 1)]
    steps, row = divmod(sample - span.consumed, span.batch)
    return span.start + steps, row


def _parts(member: PackedDataset, occurrences: Sequence[Occurrence]) -> Iterator[tuple[int, int, int, int, int]]:
    """Yields (occurrence, row, place in the row, tokens, earlier tokens of it) for each row with a part.

    Rows are numbered before they are shuffled.
    """
    numbers: dict[int, list[int]] = defaultdict(list)
    for number, occurrence in enumerate(occurrences):
        numbers[occurrence.document].append(number)
    documents = np.array(sorted(numbers))
    for position in _indices_of(documents, member.maps.doc_idx):
        for number in numbers[int(member.maps.doc_idx[position])]:
            token, end = occurrences[number].offset, occurrences[number].offset + occurrences[number].count
            while token < end and (part := _locate(member, position, token)) is not None:
                row, place, count = part
                count = min(count, end - token)
                yield number, row, place, count, token - occurrences[number].offset
                token += count


def _locate(member: PackedDataset, position: int, token: int) -> tuple[int, int, int] | None:
    """Returns (row, place in it, tokens from there on to its last) of a token; None if no row has it.

    position: index into `doc_idx` of its document. Tokens that the next row begins with are not counted.
    """
    sample_idx = member.maps.sample_idx
    rows, key = len(sample_idx) - 1, (position, token)
    row = min(bisect_right(range(rows + 1), key, key=lambda i: tuple(sample_idx[i].tolist())) - 1, rows - 1)
    place = 0
    for piece_position, _, offset, count in member.row_pieces(row):
        if piece_position == position and offset <= token < offset + count:
            following = tuple(sample_idx[row + 1].tolist())
            is_shared = following[0] == position and following[1] == offset + count - 1 and row + 1 < rows
            left = offset + count - token - (is_shared and member.packing.overlap)
            return row, place + token - offset, left
        place += count
    return None


def _indices_of(values: np.ndarray, index_map: np.ndarray) -> list[int]:
    """Returns the indices at which an index map has one of these values, in order."""
    indices: list[int] = []
    for start in range(0, len(index_map), _CHUNK):
        look_for_stop()
        indices += (np.flatnonzero(np.isin(index_map[start : start + _CHUNK], values)) + start).tolist()
    return indices


def _samples_of_rows(member: PackedDataset, rows: np.ndarray) -> Mapping[int, list[int]]:
    """Returns the samples of a source that are each of these rows, once or once an epoch."""
    shuffled, samples = member.maps.shuffle_idx, defaultdict(list)
    for sample in _indices_of(rows, shuffled):
        samples[int(shuffled[sample])].append(sample)
    return samples


def _samples_of_set(dataset: SampleSet, source: int, numbers: np.ndarray) -> Mapping[int, list[int]]:
    """Returns where the training set has each of these samples of a source, {number: [sample of the set]}."""
    if isinstance(dataset, WrappedSet):
        return _samples_of_set(dataset.dataset, source, numbers)
    if isinstance(dataset, RepeatedDataset):
        size, epochs = len(dataset.dataset), range(dataset.epochs)
        epoch_samples = _samples_of_set(dataset.dataset, source, numbers)
        return {n: [i + epoch * size for epoch in epochs for i in samples] for n, samples in epoch_samples.items()}
    if not isinstance(dataset, BlendedDataset):
        return {int(number): [int(number)] for number in numbers}
    places: dict[int, list[int]] = defaultdict(list)
    maps = dataset.maps
    for start in range(0, len(maps.dataset_index), _CHUNK):
        look_for_stop()
        part = slice(start, start + _CHUNK)
        is_drawn = (maps.dataset_index[part] == source) & np.isin(maps.dataset_sample_index[part], numbers)
        for i in (np.flatnonzero(is_drawn) + start).tolist():
            places[int(maps.dataset_sample_index[i])].append(i)
    return places
