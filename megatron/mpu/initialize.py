"""From a configuration to the process groups of its layout."""

import logging

import torch.distributed as dist

from megatron.distributed import Process, init_process_group
from megatron.mpu.groups import ParallelGroups, build_groups
from megatron.neox_arguments import NeoXArgs


def init_model_parallel(
    args: NeoXArgs, process: Process, logger: logging.Logger, store: dist.Store | None = None
) -> ParallelGroups:
    """Initialise torch.distributed (unless it already is) and make the groups of `args`, which is for this
    world.

    store and what is raised: as `distributed.init_process_group`.
    """
    device = init_process_group(args, process, logger, store)
    return build_groups(pipe=args.pp, data=args.data_parallel_size, tensor=args.tp, device=device)
