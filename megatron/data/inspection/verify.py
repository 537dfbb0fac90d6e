"""Checks full datasets for errors; each error message names the first wrong document."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from megatron.data.errors import DataError
from megatron.data.indexed_dataset import CHUNK, IndexedDataset, check_boundaries, data_path, index_path
from megatron.data.inspection.file_groups import FileGroup
from megatron.data.labels import MASKED
from megatron.data.open_dataset import has_cached_format, open_dataset, open_tokens

TOKENS = 1 << 22  # tokens read at once


@dataclass(frozen=True)
class VerifiedDataset:
    """The facts about a dataset in which `verify` found no error.

    ids: lowest and highest token id; None without tokens.
    trained: number of labels that are not masked; None if the dataset does not hold labels.
    """

    prefix: str
    documents: int
    tokens: int
    dtype: str
    ids: tuple[int, int] | None = None
    trained: int | None = None


def verify(group: FileGroup, vocab_size: int | None = None) -> Iterator[VerifiedDataset]:
    """Check a text, then its labels, then its rewards, and yield the result of each.

    Raises DataError, naming the first bad document. vocab_size: token ids must be below it; None: ids must
    only not be negative.
    """
    text = _opened(group.text, open_tokens)
    yield _check_ids(text, vocab_size)
    if group.label is not None:
        label = _opened(group.label)
        _check_same_documents(label, text)
        yield _check_labels(label, text)
    if group.reward is not None:
        reward = _opened(group.reward)
        if len(reward.doc_idx) != len(text.doc_idx):
            raise DataError(
                f"{reward.index_file}: {len(reward.doc_idx) - 1} documents, but {text.index_file} has "
                f"{len(text.doc_idx) - 1}; make both again in one preprocessing run"
            )
        for begin, end in blocks(reward.sizes):
            values = np.asarray(reward.span(begin, end))
            if not np.isfinite(values).all():
                raise _bad(reward, begin, int(np.argmin(np.isfinite(values))), "is not a finite reward", values)
        yield _verified(reward)


def blocks(sizes: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield ranges [begin, end) of sequences, each with about TOKENS tokens and at least one sequence."""
    for start in range(0, len(sizes), CHUNK):
        ends = np.cumsum(sizes[start : start + CHUNK], dtype=np.int64)
        begin = 0
        while begin < len(ends):
            tokens_before = int(ends[begin - 1]) if begin else 0
            end = max(begin + 1, int(np.searchsorted(ends, tokens_before + TOKENS, side="right")))
            yield start + begin, start + end
            begin = end


def document_of(dataset: IndexedDataset, sequence: int) -> int:
    """Return the index of the document that holds sequence `sequence`.

    A document may hold no sequence, or several.
    """
    return int(np.searchsorted(dataset.doc_idx, sequence, side="right")) - 1


class _UncheckedIndex(IndexedDataset):
    """Reads only the `.idx` of a dataset, and does not check it."""

    def __init__(self, prefix: str):
        self.prefix, self.index_file, self.data_file = prefix, index_path(prefix), data_path(prefix)
        self._read_index()


def _opened(prefix: str, open_it: Callable[[str], IndexedDataset] = open_dataset) -> IndexedDataset:
    """Open the dataset at data path `prefix` with `open_it`.

    Raises DataError, naming the first document whose place in the `.bin` is wrong.
    """
    if index_path(prefix).is_file() and data_path(prefix).is_file() and not has_cached_format(prefix):
        _check_layout(_UncheckedIndex(prefix))
    return open_it(prefix)


def _check_layout(index: IndexedDataset) -> None:
    n = len(index.sizes)
    check_boundaries(index.index_file, index.boundaries, n)
    size, end = index.data_file.stat().st_size, 0
    for start in range(0, n, CHUNK):
        lengths = index.sizes[start : start + CHUNK].astype(np.int64)
        ends = end + np.cumsum(np.maximum(lengths, 0)) * index.dtype.itemsize
        pointers = index.pointers[start : start + CHUNK]
        wrong = (lengths < 0) | (pointers != np.concatenate([[end], ends[:-1]])) | (ends > size)
        if wrong.any():
            i = int(np.argmax(wrong))
            location = f"document {document_of(index, start + i)} (sequence {start + i})"
            if lengths[i] < 0:
                raise DataError(f"{index.index_file}: {location} has {lengths[i]} tokens; the index is damaged")
            expected = int(ends[i - 1]) if i else end
            if pointers[i] != expected:
                raise DataError(
                    f"{index.index_file}: {location} points to byte {pointers[i]}, but must begin at byte {expected}; "
                    "make or copy the pair again"
                )
            raise DataError(
                f"{index.data_file}: truncated after {size} bytes, before the end of {location} at byte {ends[i]}; "
                "make or copy the pair again"
            )
        end = int(ends[-1])
    if size != end:
        raise DataError(
            f"{index.data_file}: {size - end} bytes after the last document, which ends at byte {end}; make or copy "
            "the pair again"
        )


def _check_ids(dataset: IndexedDataset, vocab_size: int | None) -> VerifiedDataset:
    low, high = np.iinfo(np.int64).max, -1
    for begin, end in blocks(dataset.sizes):
        ids = dataset.span(begin, end)
        if not len(ids):
            continue
        low, high = min(low, int(ids.min())), max(high, int(ids.max()))
        if low < 0 or (vocab_size is not None and high >= vocab_size):
            wrong = (ids < 0) if vocab_size is None else (ids < 0) | (ids >= vocab_size)
            range_note = "" if vocab_size is None else f" in a vocabulary of {vocab_size}"
            raise _bad(dataset, begin, int(np.argmax(wrong)), f"is not a token id{range_note}", ids)
    return _verified(dataset, ids=(low, high) if high >= 0 else None)


def _check_same_documents(label: IndexedDataset, text: IndexedDataset) -> None:
    for name in ("doc_idx", "sizes"):
        label_values, text_values = getattr(label, name), getattr(text, name)
        n = min(len(label_values), len(text_values))
        differ = np.flatnonzero(label_values[:n] != text_values[:n])
        if len(differ) or len(label_values) != len(text_values):
            i = int(differ[0]) if len(differ) else n
            document = i - 1 if name == "doc_idx" else document_of(text, i)
            lengths = [_tokens(dataset, document) for dataset in (label, text)]
            raise DataError(
                f"{label.index_file}: document {document} has {lengths[0]} labels, but {lengths[1]} tokens in "
                f"{text.index_file}; make both again in one preprocessing run"
            )


def _tokens(dataset: IndexedDataset, document: int) -> int | str:
    if document + 1 >= len(dataset.doc_idx):
        return "no"
    return int(dataset.sizes[dataset.doc_idx[document] : dataset.doc_idx[document + 1]].sum())


def _check_labels(label: IndexedDataset, text: IndexedDataset) -> VerifiedDataset:
    trained = 0
    for begin, end in blocks(label.sizes):
        labels, ids = label.span(begin, end), text.span(begin, end)
        is_trained = labels != MASKED
        wrong = is_trained & (labels != ids)
        if wrong.any():
            i = int(np.argmax(wrong))
            problem = f"is neither {MASKED} nor the token there, {ids[i]} (labels are not shifted)"
            raise _bad(label, begin, i, problem, labels)
        trained += int(is_trained.sum())
    return _verified(label, trained=trained)


def _verified(
    dataset: IndexedDataset, ids: tuple[int, int] | None = None, trained: int | None = None
) -> VerifiedDataset:
    tokens = int(dataset.sizes.sum(dtype=np.int64))
    return VerifiedDataset(dataset.prefix, len(dataset.doc_idx) - 1, tokens, dataset.dtype.name, ids, trained)


def _bad(dataset: IndexedDataset, begin: int, i: int, problem: str, values: np.ndarray) -> DataError:
    """Return a DataError about `values[i]` that names its document and token, then says `problem`.

    `values` hold the dataset's tokens from sequence `begin` on.
    """
    sequence, offset = begin, 0
    while offset + int(dataset.sizes[sequence]) <= i:
        offset, sequence = offset + int(dataset.sizes[sequence]), sequence + 1
    document = document_of(dataset, sequence)
    offset -= sum(map(int, dataset.sizes[dataset.doc_idx[document] : sequence]))
    return DataError(f"{dataset.data_file}: document {document}, token {i - offset}: {values[i]} {problem}")
