"""Texts as sequences that are scored as a whole: what NPO and SimNPO compare, as preference samples of one
row."""

from collections.abc import Iterator

import numpy as np

from megatron.data.labels import MASKED
from megatron.data.packed_dataset import PackedDataset, TokenSample
from megatron.data.preferences.preference_dataset import PreferenceSample


class SequenceDataset:
    """Item i: row i of `dataset` as a `PreferenceSample` whose responses are its sequences.

    apart: a sequence is a document of the row, as attention keeps them apart; otherwise the row is one.
    eod: in sets without labels documents also end with it, as for `collate_samples`. mask_after_eod: what
    follows it is not trained (`eod_mask_loss`). masked_ids: as of `collate`.
    """

    def __init__(
        self,
        dataset: PackedDataset,
        *,
        apart: bool,
        eod: int | None,
        mask_after_eod: bool,
        masked_ids: tuple[int, ...] = (),
    ) -> None:
        self.dataset, self.apart, self.eod = dataset, apart, eod
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
        numbers = np.cumsum(begins) - 1 if self.apart else np.zeros(len(begins), np.int64)
        numbers[filled:] = -1
        count = int(numbers.max()) + 1
        sample = TokenSample(row.tokens, labels, begins, True, None, filled)
        return PreferenceSample((sample,), (numbers,), np.ones(count, np.float32))

    def pieces(self, index: int) -> Iterator[tuple[int, ...]]:
        """The documents that sample `index` is made from, as the dataset under it gives them."""
        return self.dataset.pieces(index)
