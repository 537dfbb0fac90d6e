"""How many tokens of the training data `loss_mask_token_ids` masks: a line for the start of the log."""

from collections.abc import Sequence

import numpy as np

from megatron.data.indexed_dataset import IndexedDataset
from megatron.process import look_for_stop

BLOCK = 1 << 20  # tokens looked at in one go
BLOCKS = 64  # of a set that is larger, so many are looked at

Part = tuple[IndexedDataset, IndexedDataset | None, int, int]
"""Sequences [first, last) of a set, with the labels beside it."""


def masked_token_lines(ids: Sequence[int], parts: Sequence[Part]) -> list[str]:
    """A line on how often each of `ids` would be trained in the parts of a training set; none without ids.

    Of parts of more than 64 blocks of about 1 Mi tokens, so many evenly spaced ones are read, which the line
    says.
    """
    if not ids:
        return []
    counts, trained, sampled = np.zeros(len(ids), np.int64), 0, False
    for part in parts:
        here, seen, whole = _counts(np.array(ids), *part)
        counts, trained, sampled = counts + here, trained + seen, sampled or not whole
    found = [f"{token}: {count}" for token, count in zip(ids, counts.tolist(), strict=True) if count]
    missing = [str(token) for token, count in zip(ids, counts.tolist(), strict=True) if not count]
    masked = int(counts.sum())
    line = (
        f"loss_mask_token_ids: masks {masked} of {trained} trained tokens of the training data"
        f"{' (a sample: evenly spread blocks)' if sampled else ''}, {100 * masked / max(1, trained):.3g} %"
        + (f" (token id: times {', '.join(found)})" if found else "")
        + (f"; never there: token id {', '.join(missing)}" if missing else "")
    )
    return [line]


def _counts(
    ids: np.ndarray, indexed: IndexedDataset, labels: IndexedDataset | None, first: int, last: int
) -> tuple[np.ndarray, int, bool]:
    """(how often each id is a label [ids] int64, labels of any kind, whether all tokens were read)."""
    target, counts, trained = labels or indexed, np.zeros(len(ids), np.int64), 0
    tokens = int(indexed.sizes[first:last].sum(dtype=np.int64))
    starts = np.arange(first, last, max(1, (last - first) * BLOCK // max(1, tokens)))
    ends, whole = np.append(starts[1:], last), tokens <= BLOCKS * BLOCK
    if not whole:
        chosen = np.unique(np.linspace(0, len(starts) - 1, BLOCKS).astype(np.int64))
        starts, ends = starts[chosen], ends[chosen]
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        look_for_stop()
        block = target.span(start, end)
        block = block if whole else block[:BLOCK]  # a document may be longer
        trained += int(np.count_nonzero(block >= 0))
        inside = block[(block >= 0) & (block <= ids.max())]
        counts += np.bincount(inside.astype(np.int64), minlength=int(ids.max()) + 1)[ids]
    return counts, trained, whole
