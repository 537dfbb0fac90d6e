"""Preference pairs: a chosen and a rejected answer to the same prompt (`dataset_impl: pairwise`).

Document d of the pos set and of the neg set are prompt and chosen, prompt and rejected. Labels beside them
mask the prompt; without labels the prompt is the tokens that both begin with (TRL's implicit prompt).
"""

from collections.abc import Sequence

import numpy as np

from megatron.data.errors import DataError
from megatron.data.indexed_dataset import IndexedDataset


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two documents begin alike with."""
    shorter = min(len(a), len(b))
    differ = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(differ[0]) if len(differ) else shorter


def implicit_prompt_lengths(pos: IndexedDataset, neg: IndexedDataset, pairs: int) -> np.ndarray:
    """Where the answers of the first `pairs` pairs begin without labels, [pairs, 2]; at least 1: nothing
    precedes the first token."""
    shared = np.array([max(1, common_prefix(pos.get(i), neg.get(i))) for i in range(pairs)], np.int64)
    return np.repeat(shared[:, None], 2, axis=1)


def shared_prefixes(sides: Sequence[IndexedDataset], begin: np.ndarray, most: np.ndarray) -> np.ndarray:
    """How many tokens chosen and rejected begin alike with, [pairs] int64; sides: their two files.

    begin [pairs, 2]: the first token that is used of each side. most [pairs]: at most that many are compared.
    """
    pos, neg = sides
    starts, counts = begin.tolist(), most.tolist()
    return np.array(
        [
            common_prefix(pos.get(i, first, count), neg.get(i, other, count)) if count > 0 else 0
            for i, ((first, other), count) in enumerate(zip(starts, counts, strict=True))
        ],
        np.int64,
    )


def check_pairs(pos: IndexedDataset, neg: IndexedDataset) -> None:
    """Raise DataError for sides that are no pairs."""
    if len(pos) != len(neg):
        raise DataError(f"{pos.data_file}: {len(pos)} documents, but {neg.data_file} has {len(neg)}: no pairs")
    if not np.array_equal(pos.doc_idx, neg.doc_idx):
        raise DataError(
            f"{pos.data_file}: empty documents stand in other places than in {neg.data_file}: rows would be "
            "paired wrongly; make both again without the rows that have an empty side"
        )


def check_reference(reference: IndexedDataset, side: IndexedDataset) -> None:
    """Raise DataError for values that are not one for each token or one for each document, or are no
    numbers."""
    file = reference.data_file
    if len(reference) != len(side) or reference.dtype.kind != "f":
        raise DataError(f"{file}: {len(reference)} documents of {reference.dtype}; expected {len(side)} of float32")
    if (reference.sizes != 1).any() and (reference.sizes != side.sizes).any():
        document = int(np.flatnonzero(reference.sizes != side.sizes)[0])
        raise DataError(
            f"{file}: document {document} has {reference.sizes[document]} values for {side.sizes[document]} tokens of "
            f"{side.data_file}; make them again from these tokens"
        )
    bad = np.flatnonzero(~np.isfinite(reference.tokens))
    if len(bad):
        raise DataError(f"{file}: value {int(bad[0])} is not finite ({len(bad)} such values)")


def check_sums(reference: IndexedDataset, side: IndexedDataset, used: np.ndarray, kept: np.ndarray) -> None:
    """Raise DataError for sums over documents of which fewer tokens are `used` [documents]; kept: those in
    samples."""
    cut = kept[used[kept] < side.sizes[kept]]
    if len(cut) and (reference.sizes == 1).all():
        document = int(cut[0])
        raise DataError(
            f"{reference.data_file}: sums over whole documents, but document {document} of {side.data_file} is cut to "
            f"{used[document]} tokens; use a longer seq_length, allow_chopped: false, or values for each token"
        )
