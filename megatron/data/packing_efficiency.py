"""How full the rows of a set are at the start of a run, and those of its batches."""

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
    """The line for the log on a set of whole documents: documents and rows of one epoch, the share of
    padding, and the share of the tokens that is trained. batch: rows of a step. labels: None where all tokens
    are trained."""
    documents, rows, width = np.asarray(maps.doc_idx), len(maps.sample_idx) - 1, packing.width(seq_length)
    used = np.minimum(packing.lengths(indexed.sizes[documents]).astype(np.int64), width)
    line = (
        f"{name}: {indexed.data_file}: {len(documents)} documents in {rows} rows of {seq_length} tokens, "
        f"{len(documents) / rows * batch:.1f} documents a step on average; "
        f"{100 * (1 - used.sum() / (rows * width)):.1f} % padding"
    )
    return line if labels is None else f"{line}, {_trained(labels, documents, used)}"


def _trained(labels: IndexedDataset, documents: np.ndarray, used: np.ndarray) -> str:
    step = max(1, -(-int(used.sum()) // LABELS_COUNTED))
    counted = list(zip(documents[::step].tolist(), used[::step].tolist(), strict=True))
    # Nothing stands before the first token: its label is never predicted
    trained = sum(int((labels.get(document, 1, count - 1) >= 0).sum()) for document, count in counted)
    share = 100 * trained / max(1, sum(count for _, count in counted))
    return f"{share:.1f} % of the tokens are trained" + (f" (of {len(counted)} documents)" if step > 1 else "")


def count_places(batches: "Iterable[Batch]") -> tuple[int, int, int]:
    """(places, places that hold no document, places that are trained), each summed over micro-batches."""
    counts = [(b.tokens.numel(), b.padding, int(b.loss_weights.sum())) for b in batches]
    places, padding, trained = (sum(column) for column in zip(*counts, strict=True))
    return places, padding, trained
