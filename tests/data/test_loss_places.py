"""The places whose loss weight is 1: all of them, once, in few sizes."""

import numpy as np
import pytest
import torch

from megatron.data.batch import collate, places_of_loss, rechunk


@pytest.mark.parametrize("shape", [(1, 7), (3, 50), (4, 2048)])
def test_places(shape: tuple[int, int]) -> None:
    sizes, total = set(), shape[0] * shape[1]
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        weights = (torch.rand(shape, generator=generator) < seed / 40).long()
        places = places_of_loss(weights.numpy())
        if places is None:
            assert 2 * weights.sum() > total, "half of the places are few"
            continue
        chosen = weights.t().reshape(-1)[places]
        assert chosen.sum() == weights.sum() and len(places.unique()) == len(places) <= 0.75 * total
        sizes.add(len(places))
    assert 0 < len(sizes) <= 8


def test_batches_name_them() -> None:
    rows = np.random.default_rng(0).integers(1, 9, (2, 65))
    labels = np.where(np.arange(65) < 48, -1, rows)  # a prompt, which is not trained
    batch = collate(rows, labels=labels)
    assert batch.loss_places is not None and collate(rows).loss_places is None
    assert batch.loss_weights.t().reshape(-1)[batch.loss_places].sum() == batch.loss_weights.sum() == 2 * 17
    rechunked = rechunk(batch, 16)
    assert rechunked.loss_weights.t().reshape(-1)[rechunked.loss_places].sum() == rechunked.loss_weights.sum() == 2 * 17
