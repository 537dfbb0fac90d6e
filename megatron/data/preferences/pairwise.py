"""Reads preference pairs: a chosen and a rejected answer to the same prompt (`dataset_impl: pairwise`).

Document d of the pos set is the prompt and the chosen answer, document d of the neg set the prompt and the
rejected answer. Labels mask the prompt; without labels the prompt is the common prefix of both (TRL's
implicit prompt).
"""

from collections.abc import Sequence

import numpy as np

from megatron.data.errors import DataError
from megatron.data.indexed_dataset import IndexedDataset


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the common prefix of two documents, in tokens."""
    shorter = min(len(a), len(b))
    differ = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(differ[0]) if len(differ) else shorter


def implicit_prompt_lengths(pos: IndexedDataset, neg: IndexedDataset, pairs: int) -> np.ndarray:
    """Return the prompt lengths of both sides of the first `pairs` pairs, for data without labels, [pairs,
    2].

    The prompt is the common prefix of both sides. It has at least one token, because the first token cannot
    be predicted.
    """
    shared = np.array([max(1, common_prefix(pos.get(i), neg.get(i))) for i in range(pairs)], np.int64)
    return np.repeat(shared[:, None], 2, axis=1)


def shared_prefixes(sides: Sequence[IndexedDataset], begin: np.ndarray, max_tokens: np.ndarray) -> np.ndarray:
    """Return how many tokens the chosen and the rejected response of each pair have in common at their
    beginning, [pairs] int64.

    sides: the files of chosen and rejected. begin [pairs, 2]: the first used token of each response.
      max_tokens [pairs]: how many tokens are compared at most.
    """
    pos, neg = sides
    starts, counts = begin.tolist(), max_tokens.tolist()
    return np.array(
        [
            common_prefix(pos.get(i, pos_begin, count), neg.get(i, neg_begin, count)) if count > 0 else 0
            for i, ((pos_begin, neg_begin), count) in enumerate(zip(starts, counts, strict=True))
        ],
        np.int64,
    )


def check_pairs(pos: IndexedDataset, neg: IndexedDataset) -> None:
    """Raise DataError unless both files have the same number of documents and the same documents are
    empty."""
    if len(pos) != len(neg):
        raise DataError(
            f"{pos.data_file}: {len(pos)} documents, but {neg.data_file} has {len(neg)}: "
            "the two files are not pairs; make both again in one preprocessing run"
        )
    if not np.array_equal(pos.doc_idx, neg.doc_idx):
        raise DataError(
            f"{pos.data_file}: its empty documents differ from those of {neg.data_file}: chosen and rejected would "
            "be paired wrongly; make both files again without the rows that have an empty side"
        )


def check_reference(reference: IndexedDataset, side: IndexedDataset) -> None:
    """Raise DataError unless the reference model's log-probabilities fit the tokens of `side`.

    `reference` must hold one finite float for each token of `side`, or one for each document.
    """
    file = reference.data_file
    if len(reference) != len(side) or reference.dtype.kind != "f":
        raise DataError(
            f"{file}: {len(reference)} documents of {reference.dtype}; expected {len(side)} of float32; make the "
            "values again"
        )
    if (reference.sizes != 1).any() and (reference.sizes != side.sizes).any():
        document = int(np.flatnonzero(reference.sizes != side.sizes)[0])
        raise DataError(
            f"{file}: document {document} has {reference.sizes[document]} values for {side.sizes[document]} tokens of "
            f"{side.data_file}; make the values again from these tokens"
        )
    bad = np.flatnonzero(~np.isfinite(reference.tokens))
    if len(bad):
        raise DataError(f"{file}: value {int(bad[0])} is not finite ({len(bad)} such values); make the values again")


def check_sums(reference: IndexedDataset, side: IndexedDataset, num_used: np.ndarray, in_samples: np.ndarray) -> None:
    """Raise DataError if a document is truncated, but the reference log-probabilities are sums over full
    documents.

    num_used: [documents] tokens used of each document. in_samples: the documents to check.
    """
    truncated = in_samples[num_used[in_samples] < side.sizes[in_samples]]
    if len(truncated) and (reference.sizes == 1).all():
        document = int(truncated[0])
        raise DataError(
            f"{reference.data_file}: sums over full documents, but document {document} of {side.data_file} is cut to "
            f"{num_used[document]} tokens; use a longer seq_length, allow_chopped: false, or values for each token"
        )
