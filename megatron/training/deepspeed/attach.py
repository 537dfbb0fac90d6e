"""Attaches DeepSpeed to the existing processes and groups."""

import contextlib
import io
import logging
import os
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

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


def name_device(device: torch.device) -> None:
    """Set LOCAL_RANK, from which DeepSpeed takes this rank's GPU even if a device is passed.

    If OMPI_COMM_WORLD_LOCAL_RANK is set, it gets the same number. The number counts the GPUs that this
    process sees: 0 where each process of a machine sees only its own.
    """
    number = str(device.index or 0)
    os.environ.setdefault("LOCAL_RANK", number)
    if device.type == "cuda":
        names = {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"} & os.environ.keys()  # both, or it refuses
        os.environ.update(dict.fromkeys(names, number))


def plain_mpu(groups: ParallelGroups) -> Any:
    """Returns an `mpu` object with these groups for DeepSpeed's plain engine; axes of size 1 get a group of
    one rank."""
    single = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    tensor, data = groups.group("tensor") or single, groups.group("data") or single
    return SimpleNamespace(
        get_model_parallel_group=lambda: tensor,
        get_model_parallel_rank=lambda: groups.rank("tensor"),
        get_model_parallel_world_size=lambda: groups.size("tensor"),
        get_data_parallel_group=lambda: data,
        get_data_parallel_rank=lambda: groups.rank("data"),
        get_data_parallel_world_size=lambda: groups.size("data"),
    )


def shard_at_once(config: Mapping[str, Any], mpu: Any) -> Callable[[int, list[nn.Parameter]], None]:
    """Returns a function that shards parameters, such as one layer's, into this rank's ZeRO 3 slices.

    `deepspeed.initialize` with the same arguments accepts parameters sharded in this way.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        group = mpu.get_data_parallel_group()
        # The empty module stands for the model: as in `initialize`, DeepSpeed's linear is put in place.
        zero = deepspeed.zero.Init(nn.Module(), data_parallel_group=group, config_dict_or_path=dict(config), mpu=mpu)
    return lambda _, params: zero._convert_to_zero_parameters(params)
