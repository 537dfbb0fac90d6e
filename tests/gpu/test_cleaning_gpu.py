"""Signatures of MinHash on a GPU: the bits of numpy, so the same clusters."""

import numpy as np
import pytest
import torch

from megatron.data.cleaning.minhash import MinHash, signatures, torch_signatures

pytestmark = pytest.mark.gpu


def test_signatures_are_numpy_s(device: torch.device) -> None:
    draw, method = np.random.default_rng(0), MinHash()
    counts = draw.integers(0, 700, 3000)
    counts[7] = 300_000  # more than a block
    values = draw.integers(-(2**31), 2**31, counts.sum()).astype(np.int32)
    assert np.array_equal(torch_signatures(values, counts, method, device), signatures(values, counts, method))
