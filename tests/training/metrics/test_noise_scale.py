"""The noise scale of gradients whose noise scale is known."""

import math
from dataclasses import replace

import pytest
import torch

from megatron.mpu import ParallelGroups
from megatron.training.metrics.noise_scale import NoiseScale
from tests.pool import run_ranks

BATCH = 8
# Per sample: mean G, independent noise of variance sigma^2 an element; tr(Sigma) / |G|^2 is 100.
SIZE, MEAN, SIGMA = 400, 0.05, 0.5


def measured(rank: int, world_size: int, n_batches: int, offload: bool, poison: bool = False) -> float:
    """For the pool: the estimate from 1,200 steps, each rank owning its part of the gradient."""
    generator = torch.Generator().manual_seed(7)
    groups = replace(ParallelGroups.single(), world_rank=rank, world_size=world_size)
    scale = NoiseScale(BATCH, n_batches, groups, cpu_offload=offload)
    for step in range(1200):
        gradient = MEAN + SIGMA / math.sqrt(BATCH) * torch.randn(SIZE, generator=generator)
        if poison and step == 500:
            gradient[3] = math.inf
        local_gradient = gradient.chunk(world_size)[rank].view(-1, 20)
        scale.add([((0, "weight"), local_gradient[:4]), ((2, "weight"), local_gradient[4:])])
        if step < n_batches - 1:
            assert scale.values()[0] == []
    return float(scale.values()[1])


@pytest.mark.parametrize(("n_batches", "poison"), [(2, False), (5, False), (5, True)])
def test_known_noise_scale(n_batches: int, poison: bool) -> None:
    """A step without a finite gradient spoils its window only."""
    assert measured(0, 1, n_batches, offload=False, poison=poison) == pytest.approx(100.0, rel=0.1)


def test_ranks_that_share_the_gradient_agree() -> None:
    one_process = measured(0, 1, 5, offload=False)
    assert run_ranks(measured, 2, 5, True) == pytest.approx([one_process, one_process], rel=1e-5)
