"""Counts the tokens of the training data that `loss_mask_token_ids` masks, for a log line."""

from collections.abc import Sequence

import numpy as np

from megatron.data.indexed_dataset import IndexedDataset
from megatron.process import look_for_stop

BLOCK = 1 << 20  # tokens looked at in one go
BLOCKS = 64  # of a set that is larger, so many are looked at

Part = tuple[IndexedDataset, IndexedDataset | None, int, int]
"""Sequences [first, last) of a set, and its labels."""


def masked_token_lines(ids: Sequence[int], parts: Sequence[Part]) -> list[str]:
    """Return one log line on how many trained tokens of a training set `loss_mask_token_ids` masks; an empty
    list without ids.

    In a part of more than 64 blocks of about 1 Mi tokens, only 64 evenly spaced blocks are counted; the line
    then says that it is a sample.
    """
    if not ids:
        return []
    counts, trained, sampled = np.zeros(len(ids), np.int64), 0, False
    for part in parts:
        part_counts, num_labels, is_complete = _counts(np.array(ids), *part)
        counts, trained, sampled = counts + part_counts, trained + num_labels, sampled or not is_complete
    frequencies = [f"{token}: {count}" for token, count in zip(ids, counts.tolist(), strict=True) if count]
    missing = [str(token) for token, count in zip(ids, counts.tolist(), strict=True) if not count]
    masked = int(counts.sum())
    line = (
        f"loss_mask_token_ids: masks {masked} of {trained} trained tokens of the training data"
        f"{' (a sample: evenly spread blocks)' if sampled else ''}, {100 * masked / max(1, trained):.3g} %"
        + (f" (token id: times {', '.join(frequencies)})" if frequencies else "")
        + (f"; never there: token id {', '.join(missing)}" if missing else "")
    )
    return [line]


def _counts(
    ids: np.ndarray, indexed: IndexedDataset, labels: IndexedDataset | None, begin: int, stop: int
) -> tuple[np.ndarray, int, bool]:
    """Return (how often each id occurs as a label [ids] int64, how many unmasked labels were read, whether
    all tokens were read)."""
    target, counts, trained = labels or indexed, np.zeros(len(ids), np.int64), 0
    tokens = int(indexed.sizes[begin:stop].sum(dtype=np.int64))
    starts = np.arange(begin, stop, max(1, (stop - begin) * BLOCK // max(1, tokens)))
    ends, is_complete = np.append(starts[1:], stop), tokens <= BLOCKS * BLOCK
    if not is_complete:
        chosen = np.unique(np.linspace(0, len(starts) - 1, BLOCKS).astype(np.int64))
        starts, ends = starts[chosen], ends[chosen]
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        look_for_stop()
        block = target.span(start, end)
        block = block if is_complete else block[:BLOCK]  # a document may be longer
        trained += int(np.count_nonzero(block >= 0))
        candidates = block[(block >= 0) & (block <= ids.max())]
        counts += np.bincount(candidates.astype(np.int64), minlength=int(ids.max()) + 1)[ids]
    return counts, trained, is_complete
