"""Tiny runs and models on the first GPU, in the process of the test."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from megatron.distributed import init_process_group
from megatron.launch import process_info
from megatron.model import Stage
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.training import Training
from tests.model.stages import random_weights, small, stage_with
from tests.training.runs import begin

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
# Heads of 64, which every kernel takes.
WIDE: dict[str, Any] = {"hidden_size": 256, "seq_length": 128, "max_position_embeddings": 256}


def join_gpu() -> None:
    """Make this process's group, of NCCL."""
    args = small(distributed_backend="nccl").for_world(1)
    init_process_group(args, process_info(env={}), logging.getLogger("tests.quiet"))


def stage_on(args: NeoXArgs, device: torch.device) -> Stage:
    """The model of `args` with random weights, the same on every device, in its dtype."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[args.params_dtype]
    return stage_with(args, random_weights(args), ParallelGroups.single(device)).to(dtype)


@contextmanager
def run(values: Mapping[str, Any]) -> Iterator[Training]:
    """A run up to its first step; gives back what it holds."""
    training = begin({"distributed_backend": "nccl", **values})
    try:
        yield training
    finally:
        training.engine.close()
        training.watchdog.close()
        if training.checkpointer._lock is not None:
            training.checkpointer._lock.close()
