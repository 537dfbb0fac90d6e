"""Samples of preference training: rows of whole answers, each a prompt and what a model wrote to it.

Pairs are documents 2p (chosen) and 2p + 1 (rejected) of a view, KTO's examples one document each. A unit, a pair or an
example, is whole in one sample: packed `best_fit` its answers stand in one row; else chosen and rejected ones stand in
two rows, in the same places.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron.data.index_maps import IndexMaps, Packing
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.labels import MASKED
from megatron.data.packed_dataset import PackedDataset, Sample
from megatron.data.packing import build_maps
from megatron.data.slices import AfterPrompt, DocumentsView, Slices


@dataclass(frozen=True, eq=False)
class Answers:
    """One sample. numbers: of each row, [seq_length + 1] int64, which of its answers a token belongs to, -1 in padding
    (of pairs, 2p and 2p + 1); signs and reference [n]: as of `Batch`; kl: answers to other prompts."""

    rows: tuple[Sample, ...]
    response_ids: tuple[np.ndarray, ...]
    preference_labels: np.ndarray
    reference_logprobs: np.ndarray | None = None
    kl_sample: "Answers | None" = None

    def as_padding(self) -> "Answers":
        """The same shapes, in which nothing counts."""
        rows = tuple(replace(row, labels=np.full_like(row.labels, MASKED)) for row in self.rows)
        kl = None if self.kl_sample is None else self.kl_sample.as_padding()
        return replace(self, rows=rows, preference_labels=np.zeros_like(self.preference_labels), kl_sample=kl)


@dataclass(frozen=True)
class Limits:
    """What is used of an answer; None: all. max_prompt: the last tokens of what stands before the first trained one;
    max_length: of that and the rest together, the first tokens."""

    max_length: int | None = None
    max_prompt: int | None = None


@dataclass(frozen=True, eq=False)
class AnswerMaps(IndexMaps):
    """`IndexMaps` over documents, over pairs where they take two rows; begin, size [documents]: what is used of each;
    prompt: how many of these tokens come before the first trained one; counts: as `COUNTS`."""

    begin: np.ndarray
    size: np.ndarray
    prompt: np.ndarray
    counts: np.ndarray


COUNTS = (
    "units",  # pairs or examples that are trained
    "samples",  # of one epoch
    "tokens",  # used, of all answers
    "untrained",  # units with an answer that has no token to train
    "first_untrained",
    "unreached",  # units with an answer whose tokens to train are all cut off
    "first_unreached",
    "too_long",  # units left out by allow_chopped: false
    "cut_prompts",
    "cut_prompt_tokens",
    "cut_answers",
    "cut_answer_tokens",
)


def lay_out(
    sizes: np.ndarray,
    first: np.ndarray,
    num_samples: int,
    seq_length: int,
    seed: int,
    packing: Packing,
    limits: Limits,
    before: Sequence[int] = (),
) -> AnswerMaps:
    """Maps over units whose answers are `sizes` [units, answers] tokens long and are trained from token `first` on
    (their size: nowhere); whole epochs, at least num_samples samples, no row at all is possible. before: as
    `build_packed`."""
    width = seq_length + 1
    full = sizes.astype(np.int64)
    used = packing.lengths(full)
    begin = np.zeros_like(full)
    if limits.max_prompt is not None:
        begin = np.where(first < full, np.maximum(0, first - limits.max_prompt), 0)
    left = np.maximum(0, used - begin)
    size = np.minimum(left, min(limits.max_length or width, width))
    one_row = packing.pack_impl == "best_fit"
    if one_row and size.shape[1] == 2:
        other = np.maximum(width // 2, width - size[:, ::-1])
        fitting = np.minimum(size, other)
    else:
        fitting = size
    trained = (first < full).all(axis=1)
    short = (fitting == left).all(axis=1) if not packing.allow_chopped else np.ones(len(full), bool)
    size, reached = fitting, (first < begin + fitting).all(axis=1)
    keep = trained & short & reached
    if packing.compat:  # all documents as they are
        begin, size, keep = np.zeros_like(full), full, np.ones(len(full), bool)
    lengths = np.where(keep, size.sum(axis=1) if one_row else size.max(axis=1), 0)
    plain = replace(packing, truncate_documents=None)
    if packing.compat or keep.any():
        maps = build_maps(lengths, 0, len(lengths), num_samples, seq_length, seed, plain, None, before)
    else:
        maps = IndexMaps(np.zeros(0, np.int64), np.zeros((1, 2), np.int64), np.zeros(0, np.uint32))
    if one_row and size.shape[1] == 2:
        maps = IndexMaps(_both(maps.doc_idx), maps.sample_idx * 2, maps.shuffle_idx)
    untrained, unreached = np.flatnonzero(~trained), np.flatnonzero(trained & short & ~reached)
    cut_begin, cut_end = keep[:, None] & (begin > 0), keep[:, None] & (begin + size < full)
    counts = (
        keep.sum(), len(maps.sample_idx) - 1, size[keep].sum(),
        len(untrained), untrained[0] if len(untrained) else -1,
        len(unreached), unreached[0] if len(unreached) else -1, (trained & ~short).sum(),
        cut_begin.sum(), begin[cut_begin].sum(), cut_end.sum(), (full - begin - size)[cut_end].sum(),
    )  # fmt: skip
    arrays = (begin.ravel(), size.ravel(), np.clip(first - begin, 0, size).ravel(), np.array(counts, np.int64))
    return AnswerMaps(maps.doc_idx, maps.sample_idx, maps.shuffle_idx, *arrays)


def _both(pairs: np.ndarray) -> np.ndarray:
    return (2 * pairs[:, None] + np.arange(2)).ravel()


class AnswerDataset:
    """Item i: the `Answers` of sample i.

    parts, prompts: the documents' slices of `sources`, and how many of their tokens come before the first trained one.
    two_rows: documents 2p and 2p + 1 stand in two rows; then maps are over p. labels, references (float32, for each
    token or one for each document): beside each source. signs [documents] float32, as of `Batch`. kl: samples that go
    with these.
    """

    def __init__(
        self,
        name: str,
        sources: Sequence[IndexedDataset],
        parts: Sequence[Slices],
        prompts: np.ndarray,
        maps: IndexMaps,
        *,
        seq_length: int,
        packing: Packing,
        preference_labels: np.ndarray,
        two_rows: bool = False,
        labels: Sequence[IndexedDataset] | None = None,
        references: Sequence[IndexedDataset] | None = None,
        vocab_size: int | None = None,
        kl: "AnswerDataset | None" = None,
    ):
        self.indexed, self.maps, self.preference_labels, self.kl = sources[0], maps, preference_labels, kl
        self.parts, self.references = tuple(parts), None if references is None else tuple(references)
        step, plain = 2 if two_rows else 1, replace(packing, truncate_documents=None)
        self.rows = []
        for row in range(step):
            own = [Slices(*(array[row::step] for array in vars(part).values())) for part in parts]
            documents = DocumentsView(sources, own)
            masked = AfterPrompt(documents, prompts[row::step]) if labels is None else DocumentsView(labels, own)
            self.rows.append(PackedDataset(name, documents, maps, seq_length, vocab_size, packing=plain, labels=masked))

    def __len__(self) -> int:
        return len(self.rows[0])

    def __getitem__(self, index: int) -> Answers:
        rows = tuple(row[index] for row in self.rows)
        place = int(self.maps.shuffle_idx[index])
        first, last = self.maps.sample_idx[place : place + 2, 0].tolist()
        units, step = self.maps.doc_idx[first:last].astype(np.int64), len(rows)
        documents = (units[:, None] * step + np.arange(step)).ravel()
        numbers = tuple(self._numbers(row, index, len(units)) for row in range(step))
        reference = None if self.references is None else self._reference(documents, rows, numbers)
        kl = None if self.kl is None else self.kl[index % len(self.kl)]
        return Answers(rows, numbers, self.preference_labels[documents], reference, kl)

    def pieces(self, index: int) -> Iterator[tuple[int, ...]]:
        """As `PackedDataset.pieces`, the row first; documents are those of the row, tokens those that are used."""
        for number, row in enumerate(self.rows):
            for piece in row.pieces(index):
                yield number, *piece

    def documents(self, index: int) -> list[int]:
        """The documents of a sample, in the order of its answers."""
        pieces = [[document for document, _, _ in row.pieces(index)] for row in self.rows]
        return [document * len(pieces) + row for each in zip(*pieces, strict=True) for row, document in enumerate(each)]

    def _numbers(self, row: int, index: int, units: int) -> np.ndarray:
        packed = self.rows[row]
        numbers, filled = np.full(packed.seq_length + 1, -1, np.int64), 0
        # GPT-NeoX's rows end in a token of a document that is no answer of theirs
        for unit, (_, _, count) in zip(range(units), packed.pieces(index), strict=False):
            numbers[filled : filled + count] = unit * len(self.rows) + row
            filled += count
        return numbers

    def _reference(
        self, documents: np.ndarray, rows: tuple[Sample, ...], numbers: tuple[np.ndarray, ...]
    ) -> np.ndarray:
        """Of each answer the sum over its trained tokens, float32."""
        assert self.references is not None
        found, (part,) = np.zeros(len(documents), np.float32), self.parts
        for answer, document in enumerate(documents.tolist()):
            source = self.references[int(part.source[document])]
            number, begin = int(part.document[document]), int(part.begin[document])
            if (source.sizes == 1).all():
                found[answer] = source[number][0]
                continue
            row = answer % len(rows)
            places = np.flatnonzero(numbers[row] == answer)
            trained = rows[row].labels[places] >= 0
            trained[:1] = False
            found[answer] = source.get(number, begin, len(places))[trained].sum(dtype=np.float64)
        return found
