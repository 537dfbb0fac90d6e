"""DeepSpeed on the processes and groups that are there."""

import logging
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch.distributed as dist

from megatron.mpu import ParallelGroups


def attach_deepspeed() -> None:
    """Put DeepSpeed on the existing process group, quietly.

    On CPU its init_distributed would compile `deepspeed_shm_comm` (16 s, needs g++ and ninja; only inference
    uses it), and it refuses fp16 where the processor has no instructions for it, which torch computes
    nevertheless.
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel(logging.ERROR)
    accelerator = deepspeed.accelerator.get_accelerator()
    if accelerator.device_name() == "cpu":
        accelerator.is_fp16_supported = lambda: True
    deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    # Its pipeline engine asks every rank for every group of every axis, and one for each rank besides.
    deepspeed.comm.comm.cdb.new_group = lambda ranks: dist.new_group(list(ranks), use_local_synchronization=True)


def plain_mpu(groups: ParallelGroups) -> Any:
    """The groups in the words of DeepSpeed's plain engine; single-member groups are made for axes of size
    1."""
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    tensor, data = groups.group("tensor") or alone, groups.group("data") or alone
    return SimpleNamespace(
        get_model_parallel_group=lambda: tensor,
        get_model_parallel_rank=lambda: groups.rank("tensor"),
        get_model_parallel_world_size=lambda: groups.size("tensor"),
        get_data_parallel_group=lambda: data,
        get_data_parallel_rank=lambda: groups.rank("data"),
        get_data_parallel_world_size=lambda: groups.size("data"),
    )
