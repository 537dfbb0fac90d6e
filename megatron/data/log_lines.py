"""Writes log lines about the training data: truncated or dropped documents, masked tokens, and how full
rows are."""

from collections.abc import Sequence

import numpy as np

from megatron.data.index_maps import IndexMaps, Packing
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.labels import unlisted_labels
from megatron.data.open_dataset import open_dataset
from megatron.data.packing import packing_from_args
from megatron.data.set_config import SET_PREFIX, companion_paths, data_prefixes, names_missing_data, storage
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.methods import declaration_of, further_sets
from megatron.neox_arguments.values.losses import sample_kind
from megatron.process import look_for_stop

BLOCK = 1 << 20  # tokens read at once
BLOCKS = 64  # read of a dataset that is larger than this many blocks
LABELS_COUNTED = 1 << 24  # at most, so that a run starts fast

Part = tuple[IndexedDataset, IndexedDataset | None, int, int]
"""A part of a dataset: (dataset, its labels or None, first sequence, end of the sequences)."""


@names_missing_data
def data_log_lines(args: NeoXArgs) -> list[str]:
    """Return log lines on truncated and dropped documents, label files that are not used, and steps of the
    training method.

    The files are read in full. For preference data, `Datasets.log_lines` has such lines instead.
    """
    lines: list[str] = []
    if sample_kind(args) != "texts":
        return lines
    lines += declaration_of(args).log_lines(args)
    for name, prefixes in data_prefixes(args).items():
        unlisted = companion_paths(args, name)[0] is None
        key = "train_label_data_paths (with train_data_paths)" if name == "all" else f"{name}_label_data_paths"
        key = further_sets()[name].labels if name in further_sets() else key
        key = f"valid_set_labels.{name.removeprefix(SET_PREFIX)}" if name.startswith(SET_PREFIX) else key
        for prefix in prefixes:
            labels = unlisted and unlisted_labels(prefix, key)
            lines += [line for line in (labels, _truncated_documents(args, prefix, storage(args, name))) if line]
    return lines


def _truncated_documents(args: NeoXArgs, prefix: str, data_impl: str) -> str | None:
    """Return a log line on the documents that are too long for a sample, None if there are none."""
    packing = packing_from_args(args)
    limits = [packing.truncate_documents] if packing.truncate_documents is not None else []
    if packing.unsplit_documents:
        limits.append(packing.width(args.seq_length))
    if not limits:
        return None
    sizes = open_dataset(prefix, data_impl).sizes
    long = sizes > min(limits)
    count, excess = int(np.count_nonzero(long)), int((sizes[long].astype(np.int64) - min(limits)).sum())
    if not count:
        return None
    are_truncated = packing.allow_chopped or min(limits) == packing.truncate_documents
    outcome = f"cut there, {excess} tokens in all" if are_truncated else "left out (allow_chopped: false)"
    return f"{prefix}: {count} of {len(sizes)} documents are longer than {min(limits)} tokens and are {outcome}"


def masked_token_lines(ids: Sequence[int], parts: Sequence[Part]) -> list[str]:
    """Return a list with one log line: how many trained tokens of the training data `loss_mask_token_ids`
    masks.

    The list is empty without ids. In a part of more than 64 blocks of about 1 Mi tokens, only 64 evenly
    spaced blocks are counted; the line then says that it is a sample.
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
        + (f" (counts by token id: {', '.join(frequencies)})" if frequencies else "")
        + (f"; never found: token id {', '.join(missing)}" if missing else "")
    )
    return [line]


def _counts(
    ids: np.ndarray, indexed: IndexedDataset, labels: IndexedDataset | None, begin: int, stop: int
) -> tuple[np.ndarray, int, bool]:
    """Count the given ids among the labels of sequences [begin, stop).

    Returns (count of each id [ids] int64, number of unmasked labels read, whether all tokens were read).
    """
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
        block = block if is_complete else block[:BLOCK]  # a single document may be longer than a block
        trained += int(np.count_nonzero(block >= 0))
        candidates = block[(block >= 0) & (block <= ids.max())]
        counts += np.bincount(candidates.astype(np.int64), minlength=int(ids.max()) + 1)[ids]
    return counts, trained, is_complete


def packing_efficiency_line(
    indexed: IndexedDataset,
    maps: IndexMaps,
    packing: Packing,
    seq_length: int,
    labels: IndexedDataset | None,
    batch: int,
) -> str:
    """Return a log line on how full the rows of a training set are.

    It gives the documents and rows of one epoch, the share of padding and, with labels, the share of trained
    tokens.
    batch: rows of an optimizer step.
    labels: None if all tokens are trained.
    """
    documents, rows, width = np.asarray(maps.doc_idx), len(maps.sample_idx) - 1, packing.width(seq_length)
    used_lengths = np.minimum(packing.lengths(indexed.sizes[documents]).astype(np.int64), width)
    line = (
        f"train: {indexed.data_file}: {len(documents)} documents in {rows} rows of {seq_length} tokens, "
        f"{len(documents) / rows * batch:.1f} documents a step on average; "
        f"{100 * (1 - used_lengths.sum() / (rows * width)):.1f} % padding"
    )
    return line if labels is None else f"{line}, {_trained(labels, documents, used_lengths)}"


def _trained(labels: IndexedDataset, documents: np.ndarray, used_lengths: np.ndarray) -> str:
    step = max(1, -(-int(used_lengths.sum()) // LABELS_COUNTED))
    sampled = list(zip(documents[::step].tolist(), used_lengths[::step].tolist(), strict=True))
    # No token precedes the first token, so its label is never predicted
    trained = sum(int((labels.get(document, 1, count - 1) >= 0).sum()) for document, count in sampled)
    share = 100 * trained / max(1, sum(count for _, count in sampled))
    return f"{share:.1f} % of the tokens are trained" + (f" (of {len(sampled)} documents)" if step > 1 else "")
