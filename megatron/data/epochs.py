"""Whole passes over the data (`train_epochs`): every window once, then again in the same order, as GPT-NeoX's."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.data.blending import BlendedDataset, BlendingKey, BlendMaps, spread
from megatron.data.gpt2_dataset import PackedDataset, Sample


@dataclass(frozen=True)
class EpochKey(BlendingKey):
    """All that decides the maps of one pass over several sets."""

    samples: tuple[int, ...]
    epoch_version: int = 1

    def build(self) -> BlendMaps:
        return build_epoch(self.samples)


def build_epoch(samples: Sequence[int]) -> BlendMaps:
    """One pass over sets of so many samples: each sample once, every set spread evenly over the pass.

    (GPT-NeoX draws from all sets alike, so that small ones come again and large ones never end.)
    """
    return spread(samples, np.asarray(samples, dtype=np.int64))


class RepeatedDataset:
    """`epochs` passes over a dataset."""

    def __init__(self, dataset: PackedDataset | BlendedDataset, epochs: int):
        self.dataset, self.epochs = dataset, epochs

    def __len__(self) -> int:
        return self.epochs * len(self.dataset)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.dataset[index % len(self.dataset)]

    def pieces(self, index: int) -> Iterator[tuple[int, ...]]:
        """As those of the dataset."""
        return self.dataset.pieces(index % len(self.dataset))
