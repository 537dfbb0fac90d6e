"""Joining the ranks' process group."""

import logging

import pytest
import torch

from megatron.launch import process_info
from megatron.mpu import join
from megatron.neox_arguments import ConfigError
from tests.model.stages import small
from tests.pool import run_ranks

NCCL = {"distributed_backend": "nccl"}


def backend(rank: int, world_size: int) -> str:
    join(small(**NCCL).for_world(world_size), process_info(), logging.getLogger("tests.quiet"))
    return torch.distributed.get_backend()


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_nccl_without_a_gpu_is_refused_unless_one_rank_has_nothing_to_connect():
    assert run_ranks(backend, 1, init=False) == ["gloo"]
    with pytest.raises(AssertionError, match=ConfigError.__name__ + ".*distributed_backend: nccl needs a GPU"):
        run_ranks(backend, 2, init=False)
