"""Turns rows of text into scored sequences, as preference samples of one row, for NPO and SimNPO."""

from collections.abc import Iterator

import numpy as np

from megatron.data import SampleSet
from megatron.data.labels import MASKED
from megatron.data.packed_dataset import TokenSample
from megatron.data.preferences.preference_dataset import PreferenceSample


class SequenceDataset:
    """Turns each row of `dataset` into a `PreferenceSample` whose responses are the sequences to score.

    separate_documents: each document of the row is a sequence, as with `reset_attention_mask`; otherwise the
      row is one sequence.
    eod: id of the end-of-document token. In data without label files it also ends a document.
    mask_after_eod: the token after `eod` is not trained (`eod_mask_loss`).
    masked_ids: labels that are never trained.
    """

    def __init__(
        self,
        dataset: SampleSet,
        *,
        separate_documents: bool,
        eod: int | None,
        mask_after_eod: bool,
        masked_ids: tuple[int, ...] = (),
    ) -> None:
        self.dataset, self.separate_documents, self.eod = dataset, separate_documents, eod
        self.mask_after_eod, self.masked_ids = mask_after_eod, masked_ids

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> PreferenceSample:
        row = self.dataset[index]
        labels, begins = row.labels.copy(), row.begins.copy()
        if self.masked_ids:
            labels[np.isin(labels, self.masked_ids)] = MASKED
        filled = len(row.tokens) if row.filled is None else row.filled
        if self.eod is not None:
            follows = np.zeros_like(begins)
            follows[1:] = row.tokens[:-1] == self.eod
            if self.mask_after_eod:
                labels[follows] = MASKED
            if not row.labelled:
                begins |= follows
        numbers = np.cumsum(begins) - 1 if self.separate_documents else np.zeros(len(begins), np.int64)
        numbers[filled:] = -1
        count = int(numbers.max()) + 1
        sample = TokenSample(row.tokens, labels, begins, True, None, filled)
        return PreferenceSample((sample,), (numbers,), np.ones(count, np.float32))

    def pieces(self, index: int) -> Iterator[tuple[int, ...]]:
        """Return what the wrapped dataset's `pieces` yields for the sample: a tuple for each document."""
        return self.dataset.pieces(index)
