"""Preference pairs: a chosen and a rejected answer to the same prompt (`dataset_impl: pairwise`).

Document d of the pos set and of the neg set are prompt and chosen, prompt and rejected. Labels beside them mask the
prompt; without labels the prompt is the tokens that both begin with (TRL's implicit prompt).
"""

from dataclasses import dataclass

import numpy as np

from megatron.data.blending import BlendedDataset, build_blend, wanted_samples
from megatron.data.datasets import NAMES, blend_weights, data_seed
from megatron.data.errors import DataError
from megatron.data.gpt2_dataset import PackedDataset, Sample
from megatron.data.index_maps import Packing
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.labels import MASKED, labelled, open_labels
from megatron.data.packing import build_maps, packing_of
from megatron.data.storage import open_dataset
from megatron.neox_arguments import NeoXArgs


@dataclass(frozen=True, eq=False)
class Pair:
    """References are log-probabilities, float32: [seq_length + 1], of the token in the same place, 0 in padding; or,
    where they were summed, one for each document of the row; None without them."""

    chosen: Sample
    rejected: Sample
    chosen_reference: np.ndarray | None = None
    rejected_reference: np.ndarray | None = None


class _AfterPrompt:
    """Labels of one side of pairs that have none: its tokens, masked where both sides are the same up to there."""

    def __init__(self, indexed: IndexedDataset, other: IndexedDataset):
        self.indexed, self.other, self.data_file = indexed, other, indexed.data_file

    def get(self, document: int, offset: int, length: int) -> np.ndarray:
        labels = self.indexed.get(document, offset, length).astype(np.int64)
        labels[: max(0, common_prefix(self.indexed[document], self.other[document]) - offset)] = MASKED
        return labels


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two documents begin alike with."""
    shorter = min(len(a), len(b))
    differ = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(differ[0]) if len(differ) else shorter


class PairwiseDataset:
    """Item i: the `Pair` of row i; both sides are the same documents in the same order.

    Pairs of which a side has nothing to train within seq_length are left out, as are, with allow_chopped: false, those
    too long. labels, references: (pos, neg). Raises DataError for sides that are no pairs.
    """

    def __init__(
        self,
        name: str,
        sides: tuple[IndexedDataset, IndexedDataset],
        num_samples: int,
        seq_length: int,
        seed: int,
        packing: Packing,
        *,
        labels: tuple[IndexedDataset, IndexedDataset] | None = None,
        references: tuple[IndexedDataset, IndexedDataset] | None = None,
        vocab_size: int | None = None,
    ):
        pos, neg = sides
        if len(pos) != len(neg):
            raise DataError(f"{pos.data_file}: {len(pos)} documents, but {neg.data_file} has {len(neg)}: no pairs")
        if not np.array_equal(pos.doc_idx, neg.doc_idx):
            raise DataError(
                f"{pos.data_file}: empty documents stand in other places than in {neg.data_file}: rows would be "
                "paired wrongly; make both again without the rows that have an empty side"
            )
        self.indexed, self.references = pos, references
        lengths = np.maximum(pos.sizes, neg.sizes)
        width = min(seq_length + 1, packing.truncate_documents or seq_length + 1)
        if not packing.compat:
            lengths[~_usable(sides, labels, width)] = 0
        maps = build_maps(lengths, 0, len(pos), num_samples, seq_length, seed, packing)
        if not len(maps.shuffle_idx):
            raise DataError(f"{pos.data_file}: none of {len(pos)} pairs has two answers to train in {width} tokens")
        for side, reference in zip(sides, references or (), strict=False):
            _check_reference(reference, side, width if packing.allow_chopped else None)
        masked = labels or (_AfterPrompt(pos, neg), _AfterPrompt(neg, pos))
        self.chosen, self.rejected = (
            PackedDataset(name, side, maps, seq_length, vocab_size, packing=packing, labels=beside)  # type: ignore[arg-type]
            for side, beside in zip(sides, masked, strict=True)
        )

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> Pair:
        pair = self.chosen[index], self.rejected[index]
        if self.references is None:
            return Pair(*pair)
        parts = zip((self.chosen, self.rejected), self.references, strict=True)
        return Pair(*pair, *(_reference(side, beside, index) for side, beside in parts))

    @property
    def order(self) -> dict[str, int | str]:
        """As `PackedDataset.order`."""
        return self.chosen.order


def build_pairs(args: NeoXArgs, name: str, num_samples: int) -> PairwiseDataset | BlendedDataset:
    """The train, valid or test set of `pos_..._data_paths` and `neg_..._data_paths`, several blended by weight."""
    place = NAMES.index(name)
    pos = (args.pos_train_data_paths, args.pos_valid_data_paths, args.pos_test_data_paths)[place]
    neg = (args.neg_train_data_paths, args.neg_valid_data_paths, args.neg_test_data_paths)[place]
    pos_labels = (args.pos_train_label_data_paths, args.pos_valid_label_data_paths, args.pos_test_label_data_paths)
    neg_labels = (args.neg_train_label_data_paths, args.neg_valid_label_data_paths, args.neg_test_label_data_paths)
    if not pos or not neg:
        raise DataError(f"no {name} pairs: set pos_{name}_data_paths and neg_{name}_data_paths")
    sides = [(open_dataset(p, args.data_impl), open_dataset(n, args.data_impl)) for p, n in zip(pos, neg, strict=True)]
    weights = blend_weights(args, name, [chosen for chosen, _ in sides])
    wanted = [num_samples] if len(sides) == 1 else wanted_samples(weights, num_samples)

    def member(i: int) -> PairwiseDataset:
        labels = references = None
        listed = pos_labels[place], neg_labels[place]
        if listed[0] is not None and listed[1] is not None:
            labels = open_labels(listed[0][i], sides[i][0]), open_labels(listed[1][i], sides[i][1])
        if args.precompute_model_name is not None:
            beside = [open_dataset(f"{path}_{args.precompute_model_name}") for path in (pos[i], neg[i])]
            references = beside[0], beside[1]
        return PairwiseDataset(
            name, sides[i], wanted[i], args.seq_length, data_seed(args), packing_of(args),
            labels=labels, references=references, vocab_size=args.padded_vocab_size,
        )  # fmt: skip

    members = [member(i) for i in range(len(sides))]
    if len(members) == 1:
        return members[0]
    return BlendedDataset(name, members, build_blend(weights, num_samples))  # type: ignore[arg-type]


def _usable(
    sides: tuple[IndexedDataset, IndexedDataset], labels: tuple[IndexedDataset, IndexedDataset] | None, width: int
) -> np.ndarray:
    """Pairs with something to train on either side: what nothing precedes, or is cut off, is not."""
    pos, neg = sides
    if labels is not None:
        return labelled(labels[0], 0, len(pos), 1, width) & labelled(labels[1], 0, len(pos), 1, width)
    shared = np.array([common_prefix(pos[i], neg[i]) for i in range(len(pos))], np.int64)
    return np.maximum(shared, 1) < np.minimum(np.minimum(pos.sizes, neg.sizes), width)


def _check_reference(reference: IndexedDataset, side: IndexedDataset, width: int | None) -> None:
    """Raises DataError for values that are not one for each token or one for each document, or are no numbers.

    width: what documents are cut to; None: longer ones are left out.
    """
    file = reference.data_file
    if len(reference) != len(side) or reference.dtype.kind != "f":
        raise DataError(f"{file}: {len(reference)} documents of {reference.dtype}; expected {len(side)} of float32")
    summed = bool((reference.sizes == 1).all())
    if not summed and (reference.sizes != side.sizes).any():
        document = int(np.flatnonzero(reference.sizes != side.sizes)[0])
        raise DataError(
            f"{file}: document {document} has {reference.sizes[document]} values for {side.sizes[document]} tokens of "
            f"{side.data_file}; make them again from these tokens"
        )
    if summed and width is not None and side.sizes.max() > width:
        raise DataError(
            f"{file}: sums over whole documents, but document {int(side.sizes.argmax())} of {side.data_file} is cut to "
            f"{width} tokens; use a longer seq_length, allow_chopped: false, or values for each token"
        )
    bad = np.flatnonzero(~np.isfinite(reference.tokens))
    if len(bad):
        raise DataError(f"{file}: value {int(bad[0])} is not finite ({len(bad)} such values)")


def _reference(side: PackedDataset, reference: IndexedDataset, index: int) -> np.ndarray:
    pieces = list(side.pieces(index))
    if (reference.sizes == 1).all():
        return np.array([reference[document][0] for document, _, _ in pieces], np.float32)
    values, filled = np.zeros(side.seq_length + 1, np.float32), 0
    for document, offset, count in pieces:
        values[filled : filled + count] = reference.get(document, offset, count)
        filled += count
    return values
