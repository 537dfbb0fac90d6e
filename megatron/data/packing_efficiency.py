"""Measures how full the rows of a set, and of its batches, are."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from megatron.data.index_maps import IndexMaps, Packing
from megatron.data.indexed_dataset import IndexedDataset

if TYPE_CHECKING:
    from megatron.data.batch import Batch

LABELS_COUNTED = 1 << 24  # at most, so that the start of a run does not wait for it


def packing_efficiency_line(
    name: str,
    indexed: IndexedDataset,
    maps: IndexMaps,
    packing: Packing,
    seq_length: int,
    labels: IndexedDataset | None,
    batch: int,
) -> str:
    """Return a log line on how full the rows of a set of full documents are.

    It gives documents and rows of one epoch, the share of padding and, with labels, that of trained tokens.

    batch: rows of an optimizer step.
    labels: None if all tokens are trained.
    """
    documents, rows, width = np.asarray(maps.doc_idx), len(maps.sample_idx) - 1, packing.width(seq_length)
    used_lengths = np.minimum(packing.lengths(indexed.sizes[documents]).astype(np.int64), width)
    line = (
        f"{name}: {indexed.data_file}: {len(documents)} documents in {rows} rows of {seq_length} tokens, "
        f"{len(documents) / rows * batch:.1f} documents a step on average; "
        f"{100 * (1 - used_lengths.sum() / (rows * width)):.1f} % padding"
    )
    return line if labels is None else f"{line}, {_trained(labels, documents, used_lengths)}"


def _trained(labels: IndexedDataset, documents: np.ndarray, used_lengths: np.ndarray) -> str:
    step = max(1, -(-int(used_lengths.sum()) // LABELS_COUNTED))
    sampled = list(zip(documents[::step].tolist(), used_lengths[::step].tolist(), strict=True))
    # Nothing stands before the first token: its label is never predicted
    trained = sum(int((labels.get(document, 1, count - 1) >= 0).sum()) for document, count in sampled)
    share = 100 * trained / max(1, sum(count for _, count in sampled))
    return f"{share:.1f} % of the tokens are trained" + (f" (of {len(sampled)} documents)" if step > 1 else "")


def count_places(batches: "Iterable[Batch]") -> tuple[int, int, int]:
    """Return the number of positions, of padding positions, and of trained positions, summed over
    micro-batches."""
    counts = [(b.tokens.numel(), b.padding, int(b.loss_weights.sum())) for b in batches]
    places, padding, trained = (sum(column) for column in zip(*counts, strict=True))
    return places, padding, trained
