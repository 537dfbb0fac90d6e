"""Attaches DeepSpeed to the process groups that torch.distributed already has."""

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
    """Initialise DeepSpeed's communication on the existing process group, without its log lines.

    On a CPU it changes two defaults of DeepSpeed: compiling `deepspeed_shm_comm` (16 s, needs g++ and ninja,
    and only inference uses it), and refusing fp16 on processors without fp16 instructions, where torch
    computes it.
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel(logging.ERROR)
    accelerator = deepspeed.accelerator.get_accelerator()
    if accelerator.device_name() == "cpu":
        accelerator.is_fp16_supported = lambda: True
    deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    # DeepSpeed's pipeline engine has every rank create every group. This lets only the members create a
    # group.
    deepspeed.comm.comm.cdb.new_group = lambda ranks: dist.new_group(list(ranks), use_local_synchronization=True)


def name_device(device: torch.device) -> None:
    """Set the environment variable LOCAL_RANK, from which DeepSpeed takes this rank's GPU even if it is given
    one.

    The value is the index of the GPU among those that this process sees: 0 if each process sees only its own.
    If OMPI_COMM_WORLD_LOCAL_RANK is set, it gets the same value.
    """
    number = str(device.index or 0)
    os.environ.setdefault("LOCAL_RANK", number)
    if device.type == "cuda":
        names = {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"} & os.environ.keys()  # DeepSpeed requires that both agree
        os.environ.update(dict.fromkeys(names, number))


def plain_mpu(groups: ParallelGroups) -> Any:
    """Returns the `mpu` object through which DeepSpeed's engine without pipelines asks for process groups.

    An axis of size 1 gets a group of one rank.
    """
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
    """Returns a function (layer, parameters) that replaces the parameters of a layer by this rank's ZeRO 3
    slices.

    So a model is sharded layer by layer as it is built. `deepspeed.initialize` with the same `config` and
    `mpu` accepts such parameters.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        group = mpu.get_data_parallel_group()
        # Init is given an empty module instead of the model: as in `initialize`, it also patches torch's
        # linear.
        zero = deepspeed.zero.Init(nn.Module(), data_parallel_group=group, config_dict_or_path=dict(config), mpu=mpu)
    return lambda _, params: zero._convert_to_zero_parameters(params)
