"""Computes statistics of a dataset: lengths, packing, labels, duplicates and special tokens; draws a
histogram."""

import hashlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.inspection.file_groups import FileGroup
from megatron.data.inspection.verify import blocks
from megatron.data.labels import MASKED
from megatron.data.open_dataset import open_dataset, open_tokens
from megatron.data.packing import best_fit, next_fit

PERCENTILES = (1, 5, 25, 50, 75, 90, 95, 99, 100)
CANDIDATE_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True)
class PackingShares:
    """How well documents fill rows of `length` tokens, for each way of packing.

    fit: share of documents that are not longer than a row; longer documents are truncated, except by
      `packed`.
    unpacked: share of row positions that hold text if each row holds one document.
    next_fit: the same share if documents are packed in order until the next does not fit.
    best_fit: the same share with best-fit decreasing packing.
    packed_cuts: share of documents that continue in another row if all rows are full (`packed`).
    """

    length: int
    fit: float
    unpacked: float
    next_fit: float
    best_fit: float
    packed_cuts: float


@dataclass(frozen=True)
class DatasetStats:
    """The statistics of one dataset.

    special: {name of a special token: its count}.
    trained: share of trained tokens; None without labels.
    rewards: {reward: number of documents}; None without rewards.
    """

    name: str
    documents: int
    empty: int
    tokens: int
    percentiles: Mapping[int, int]
    mean: float
    packing: tuple[PackingShares, ...]
    duplicates: int
    special: Mapping[str, int]
    trained: float | None
    untrained_documents: int
    rewards: Mapping[float, int] | None
    lengths: np.ndarray  # [documents] int64, in tokens


def dataset_stats(group: FileGroup, special_tokens: Mapping[int, str]) -> DatasetStats:
    """Compute the statistics of a dataset. special_tokens: {id: name}. Memory: 24 bytes per document."""
    text = open_tokens(group.text)
    lengths = document_lengths(text)
    trained, untrained = (None, 0) if group.label is None else _trained(open_dataset(group.label))
    percentiles = np.percentile(lengths, PERCENTILES, method="higher") if len(lengths) else np.zeros(len(PERCENTILES))
    return DatasetStats(
        name=group.text,
        documents=len(lengths),
        empty=int((lengths == 0).sum()),
        tokens=int(lengths.sum()),
        percentiles=dict(zip(PERCENTILES, map(int, percentiles), strict=True)),
        mean=float(lengths.mean()) if len(lengths) else 0.0,
        packing=tuple(packing_shares(lengths, length) for length in CANDIDATE_LENGTHS) if lengths.sum() else (),
        duplicates=_duplicates(text),
        special=_counts(text, special_tokens),
        trained=trained,
        untrained_documents=untrained,
        rewards=None if group.reward is None else _rewards(open_dataset(group.reward)),
        lengths=lengths,
    )


def document_lengths(dataset: IndexedDataset) -> np.ndarray:
    """Return the number of tokens in each document, [documents] int64."""
    ends = np.concatenate([[0], np.cumsum(dataset.sizes, dtype=np.int64)])
    return np.diff(ends[dataset.doc_idx])


def packing_shares(lengths: np.ndarray, length: int) -> PackingShares:
    """Return how well documents of these lengths (in tokens) fill rows of `length` tokens."""
    full_lengths = lengths[lengths > 0].astype(np.int64)
    truncated = np.minimum(full_lengths, length)
    ends = np.cumsum(full_lengths)
    text = int(truncated.sum())
    return PackingShares(
        length=length,
        fit=float((full_lengths <= length).mean()),
        unpacked=text / (len(truncated) * length),
        next_fit=text / ((len(next_fit(truncated, length)) - 1) * length),
        best_fit=text / ((len(best_fit(truncated, length)[1]) - 1) * length),
        packed_cuts=float(((ends - full_lengths) // length != (ends - 1) // length).mean()),
    )


def _trained(label: IndexedDataset) -> tuple[float, int]:
    """Return (share of trained tokens, number of documents without a trained token)."""
    tokens = trained = untrained = 0
    for begin, end in blocks(label.sizes):
        is_trained = label.span(begin, end) != MASKED
        sizes = label.sizes[begin:end].astype(np.int64)
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])[sizes > 0]
        untrained += int((np.add.reduceat(is_trained, starts, dtype=np.int64) == 0).sum()) if len(starts) else 0
        tokens, trained = tokens + len(is_trained), trained + int(is_trained.sum())
    return trained / max(tokens, 1), untrained


def _rewards(reward: IndexedDataset) -> dict[float, int]:
    values, counts = np.unique(np.asarray(reward.tokens), return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def _duplicates(text: IndexedDataset) -> int:
    """Return the number of documents that have the same tokens as an earlier document."""

    def digests() -> Iterator[int]:
        for start, end in zip(text.doc_idx[:-1].tolist(), text.doc_idx[1:].tolist(), strict=True):
            if end > start:
                content = np.ascontiguousarray(text.span(start, end)).tobytes()
                yield int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")

    hashes = np.fromiter(digests(), dtype=np.uint64)
    return len(hashes) - len(np.unique(hashes))


def _counts(text: IndexedDataset, special_tokens: Mapping[int, str]) -> dict[str, int]:
    if not special_tokens:
        return {}
    totals = np.zeros(max(special_tokens) + 1, dtype=np.int64)
    for begin, end in blocks(text.sizes):
        ids = text.span(begin, end)
        totals += np.bincount(ids[(ids >= 0) & (ids < len(totals))], minlength=len(totals))
    return {name: int(totals[i]) for i, name in sorted(special_tokens.items())}


def table(stats: DatasetStats) -> list[str]:
    """Return the statistics as lines of text for a terminal."""
    lines = [
        f"{stats.name}: {stats.documents} documents, {stats.tokens} tokens, mean {stats.mean:.1f}",
        f"  empty {stats.empty}, exact duplicates {stats.duplicates} ({share(stats.duplicates, stats.documents)})",
        "  length  " + "  ".join(f"p{p} {value}" for p, value in stats.percentiles.items()).replace("p100", "max"),
    ]
    if stats.trained is not None:
        lines.append(
            f"  labels  {stats.trained:.1%} of the tokens trained, none in {stats.untrained_documents} documents"
        )
    if stats.rewards is not None:
        lines.append("  rewards " + rewards_line(stats.rewards))
    if stats.special:
        lines.append("  special " + "  ".join(f"{name} {count}" for name, count in stats.special.items()))
    if stats.packing:
        lines.append("  seq_length  documents that fit  unpacked  pack_until_overflow  best_fit  cut by packed")
        lines += [
            f"  {row.length:>10}  {row.fit:>18.1%}  {row.unpacked:>8.1%}  {row.next_fit:>19.1%}  "
            f"{row.best_fit:>8.1%}  {row.packed_cuts:>13.1%}"
            for row in stats.packing
        ]
    return lines


def rewards_line(rewards: Mapping[float, int]) -> str:
    if len(rewards) <= 8:
        return "  ".join(f"{value:g}: {count}" for value, count in rewards.items())
    values, counts = np.array(list(rewards)), np.array(list(rewards.values()))
    mean = float((values * counts).sum() / counts.sum())
    return f"{counts.sum()} values from {values.min():g} to {values.max():g}, mean {mean:g}"


def share(part: int, total: int) -> str:
    return f"{part / max(total, 1):.1%}"


def histogram(lengths: Mapping[str, np.ndarray]) -> bytes:
    """Return a PNG with a histogram of document lengths (logarithmic axis) and their cumulative share.

    lengths: {name of a dataset: number of tokens of each document}.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, axis = pyplot.subplots(figsize=(8, 4), layout="constrained")
    cumulative = axis.twinx()
    longest = max([2, *(int(values.max()) for values in lengths.values() if len(values))])
    shortest = min([longest, *(int(values[values > 0].min()) for values in lengths.values() if values.any())])
    edges = np.unique(np.geomspace(shortest, longest + 1, 61).round()).tolist()
    for number, (name, values) in enumerate(lengths.items()):
        axis.hist(values[values > 0], bins=edges, alpha=0.5, label=name, color=f"C{number}")
        cumulative.plot(np.sort(values), np.arange(1, len(values) + 1) / max(len(values), 1), color=f"C{number}")
    for length in CANDIDATE_LENGTHS:
        if length <= longest:
            axis.axvline(length, color="grey", linewidth=0.5, linestyle=":")
    axis.set(xscale="log", xlabel="tokens of a document", ylabel="documents")
    axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
    axis.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    axis.xaxis.set_minor_formatter(ticker.NullFormatter())
    cumulative.set(ylim=(0, 1.02), ylabel="share not longer")
    axis.legend(loc="upper left", fontsize="small")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    pyplot.close(figure)
    return picture.getvalue()
