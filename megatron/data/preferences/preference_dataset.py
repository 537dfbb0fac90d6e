"""Provides samples of preference training: rows of full responses, each a prompt with a model's answer.

The chosen and the rejected response of pair p are documents 2p and 2p + 1; a KTO example is one document. A
pair or an example is called a unit and is never split over samples: with `pack_impl: best_fit` the responses
of a unit are in one row; otherwise the chosen and the rejected response of a pair are in the same places of
two rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron.data.index_maps import IndexMaps, Packing
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.labels import MASKED
from megatron.data.packed_dataset import PackedDataset, TokenSample
from megatron.data.sliced_documents import DocumentSlices, PromptMaskedLabels, SlicedDocuments


@dataclass(frozen=True, eq=False)
class PreferenceSample:
    """One sample of preference training, with n responses.

    response_ids: for each row [seq_length + 1] int64, the number of the response that each token belongs to
      (2p and 2p + 1 for pair p), -1 in padding.
    preference_labels: [n] float32, as in `Responses`.
    reference_logprobs: [n] float32, as in `Responses`.
    margins: [n / 2] float32, as in `Responses`.
    prefix_lengths: [n] int64, the length of the prefix that a response shares with the response before it,
      and that the row does not repeat; None: no shared prefixes.
    kl_sample: responses to other prompts, for KTO's KL.
    """

    rows: tuple[TokenSample, ...]
    response_ids: tuple[np.ndarray, ...]
    preference_labels: np.ndarray
    reference_logprobs: np.ndarray | None = None
    margins: np.ndarray | None = None
    prefix_lengths: np.ndarray | None = None
    kl_sample: "PreferenceSample | None" = None

    def as_padding(self) -> "PreferenceSample":
        """Return a sample of the same shapes in which no token is trained."""
        rows = tuple(replace(row, labels=np.full_like(row.labels, MASKED)) for row in self.rows)
        kl_sample = None if self.kl_sample is None else self.kl_sample.as_padding()
        return replace(self, rows=rows, preference_labels=np.zeros_like(self.preference_labels), kl_sample=kl_sample)


class PreferenceDataset:
    """A dataset of preference training: item i is a `PreferenceSample`.

    sources: the files with the tokens.
    parts: slices of documents in `sources`; document d joins slice d of each part.
    prompts: [documents], number of tokens before the first trained token.
    maps: index maps over documents; with two_rows, over pairs.
    preference_labels: [documents] float32, as in `Responses`.
    two_rows: the responses of a pair, documents 2p and 2p + 1, are in two rows instead of one.
    shared: [documents] int64, the length of the prefix that each document shares with the document before it,
      and that the row does not repeat.
    labels: for each source, one value per token.
    references: for each source, one float32 per token or per document.
    margins: [pairs] float32, as in `Responses`.
    kl_dataset: its item i is the `kl_sample` of sample i.
    """

    def __init__(
        self,
        sources: Sequence[IndexedDataset],
        parts: Sequence[DocumentSlices],
        prompts: np.ndarray,
        maps: IndexMaps,
        *,
        seq_length: int,
        packing: Packing,
        preference_labels: np.ndarray,
        two_rows: bool = False,
        shared: np.ndarray | None = None,
        labels: Sequence[IndexedDataset] | None = None,
        references: Sequence[IndexedDataset] | None = None,
        vocab_size: int | None = None,
        kl_dataset: "PreferenceDataset | None" = None,
        margins: np.ndarray | None = None,
    ):
        self.indexed, self.maps = sources[0], maps
        self.preference_labels, self.shared, self.kl_dataset = preference_labels, shared, kl_dataset
        self.margins = margins
        self.parts, self.references = tuple(parts), None if references is None else tuple(references)
        step, untruncated = 2 if two_rows else 1, replace(packing, truncate_documents=None)
        self.rows = []
        for row in range(step):
            row_parts = [DocumentSlices(*(array[row::step] for array in vars(part).values())) for part in parts]
            documents = SlicedDocuments(sources, row_parts)
            row_labels: SlicedDocuments | PromptMaskedLabels
            if labels is None:
                row_labels = PromptMaskedLabels(documents, prompts[row::step])
            else:
                row_labels = SlicedDocuments(labels, row_parts)
            self.rows.append(
                PackedDataset(documents, maps, seq_length, vocab_size, packing=untruncated, labels=row_labels)
            )

    def __len__(self) -> int:
        return len(self.rows[0])

    def __getitem__(self, index: int) -> PreferenceSample:
        rows = tuple(row[index] for row in self.rows)
        place = int(self.maps.shuffle_idx[index])
        begin, end = self.maps.sample_idx[place : place + 2, 0].tolist()
        units, step = self.maps.doc_idx[begin:end].astype(np.int64), len(rows)
        documents = (units[:, None] * step + np.arange(step)).ravel()
        response_ids = tuple(self._response_ids(row, index, len(units)) for row in range(step))
        reference = None if self.references is None else self._reference_logprobs(documents, rows, response_ids)
        kl_sample = None if self.kl_dataset is None else self.kl_dataset[index % len(self.kl_dataset)]
        prefixes = None if self.shared is None else self.shared[documents]
        margins = None if self.margins is None else self.margins[documents[0::2] // 2]
        labels = self.preference_labels[documents]
        return PreferenceSample(rows, response_ids, labels, reference, margins, prefixes, kl_sample)

    def pieces(self, index: int) -> Iterator[tuple[int, ...]]:
        """Yield (row, document of that row, first token, number of tokens) for each document in sample
        `index`.

        The first token is counted within the used part of the document.
        """
        for number, row in enumerate(self.rows):
            for piece in row.pieces(index):
                yield number, *piece

    def documents(self, index: int) -> list[int]:
        """Return the numbers of the documents in sample `index`, in the order of its responses."""
        pieces = [[document for document, _, _ in row.pieces(index)] for row in self.rows]
        return [
            document * len(pieces) + row
            for row_documents in zip(*pieces, strict=True)
            for row, document in enumerate(row_documents)
        ]

    def _response_ids(self, row: int, index: int, units: int) -> np.ndarray:
        """Return the response number of each token in one row of sample `index`, [seq_length + 1] int64; -1
        in padding.

        units: number of pairs or examples in the sample.
        """
        packed = self.rows[row]
        response_ids, filled = np.full(packed.seq_length + 1, -1, np.int64), 0
        # GPT-NeoX's rows end with a token of the next document, which belongs to no response
        for unit, (_, _, count) in zip(range(units), packed.pieces(index), strict=False):
            response_ids[filled : filled + count] = unit * len(self.rows) + row
            filled += count
        return response_ids

    def _reference_logprobs(
        self, documents: np.ndarray, rows: tuple[TokenSample, ...], response_ids: tuple[np.ndarray, ...]
    ) -> np.ndarray:
        """Return the reference model's log-probability of each response, summed over its trained tokens,
        [n] float32."""
        assert self.references is not None
        sums, (part,) = np.zeros(len(documents), np.float32), self.parts
        for response, document in enumerate(documents.tolist()):
            source = self.references[int(part.source[document])]
            number, begin = int(part.document[document]), int(part.begin[document])
            if (source.sizes == 1).all():
                sums[response] = source[number][0]
                continue
            row = response % len(rows)
            places = np.flatnonzero(response_ids[row] == response)
            trained = rows[row].labels[places] >= 0
            trained[:1] = False
            sums[response] = source.get(number, begin, len(places))[trained].sum(dtype=np.float64)
        return sums
