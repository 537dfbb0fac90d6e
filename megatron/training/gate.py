"""DeepSpeed as it is taken: which versions compute wrong gradients, and how it joins the ranks' process group."""

from __future__ import annotations

import logging
from importlib.metadata import version

import torch.distributed as dist

from megatron.neox_arguments.deepspeed_versions import FIX, wrong_deepspeed


def check_version(installed: str) -> None:
    """Raise RuntimeError for a DeepSpeed that is known to train wrongly, or older than was ever checked."""
    wrong = wrong_deepspeed(installed)
    if wrong is not None:
        raise RuntimeError(f"{wrong}; {FIX}")


def check_deepspeed() -> None:
    """`check_version` of the installed DeepSpeed."""
    check_version(version("deepspeed"))


def attach_deepspeed() -> None:
    """Put DeepSpeed on the existing process group, quietly.

    On CPU its init_distributed would compile `deepspeed_shm_comm` (16 s, needs g++ and ninja; only inference uses it),
    and it refuses fp16 where the processor has no instructions for it, which torch computes nevertheless.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel(logging.ERROR)
    accelerator = deepspeed.accelerator.get_accelerator()
    if accelerator.device_name() == "cpu":
        accelerator.is_fp16_supported = lambda: True
    deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
