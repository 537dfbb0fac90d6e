"""How full rows are: of a set at the start, and of the batches of a run."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from megatron.data.index_maps import IndexMaps, Packing
from megatron.data.indexed_dataset import IndexedDataset

if TYPE_CHECKING:
    from megatron.data.batch import Batch

LOOKED_AT = 1 << 24  # labels that are counted at most


def packing_efficiency_line(
    name: str,
    indexed: IndexedDataset,
    maps: IndexMaps,
    packing: Packing,
    seq_length: int,
    labels: IndexedDataset | None,
    batch: int,
) -> str:
    """The line on a set of whole documents: documents and rows of one epoch, padding, and what is trained of the
    tokens that are used. batch: rows of a step."""
    documents, rows, width = np.asarray(maps.doc_idx), len(maps.sample_idx) - 1, packing.width(seq_length)
    used = np.minimum(packing.lengths(indexed.sizes[documents]).astype(np.int64), width)
    line = (
        f"{name}: {indexed.data_file}: {len(documents)} documents in {rows} rows of {seq_length} tokens, "
        f"{len(documents) / rows * batch:.1f} documents a step on average; "
        f"{100 * (1 - used.sum() / (rows * width)):.1f} % padding"
    )
    return line if labels is None else f"{line}, {_trained(labels, documents, used)}"


def _trained(labels: IndexedDataset, documents: np.ndarray, used: np.ndarray) -> str:
    step = max(1, -(-int(used.sum()) // LOOKED_AT))
    looked = list(zip(documents[::step].tolist(), used[::step].tolist(), strict=True))
    # Nothing stands before the first token: its label is never predicted
    trained = sum(int((labels.get(document, 1, count - 1) >= 0).sum()) for document, count in looked)
    share = 100 * trained / max(1, sum(count for _, count in looked))
    return f"{share:.1f} % of the tokens are trained" + (f" (of {len(looked)} documents)" if step > 1 else "")


def count_places(batches: "Iterable[Batch]") -> tuple[int, int, int]:
    """(places, those of them that hold no document, those that are trained) of micro-batches."""
    found = [(b.tokens.numel(), b.padding, int(b.loss_weights.sum())) for b in batches]
    places, padding, trained = (sum(column) for column in zip(*found, strict=True))
    return places, padding, trained
