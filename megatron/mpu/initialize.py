"""From a configuration to the process groups of its layout."""

import logging
import warnings

import torch
import torch.distributed as dist

from megatron.distributed import Process, StartError, init_process_group
from megatron.mpu.groups import ParallelGroups, build_groups
from megatron.neox_arguments import NeoXArgs


def init_model_parallel(
    args: NeoXArgs, process: Process, logger: logging.Logger, store: dist.Store | None = None
) -> ParallelGroups:
    """Set `tf32`, initialise torch.distributed (unless it already is), make the groups of `args`, which is
    for this world, and connect their members.

    store and what is raised: as `distributed.init_process_group`; ConfigError where experts would be shared
    out over machines.
    """
    _check_experts(args, process)
    allow_tf32(args.tf32)
    device = init_process_group(args, process, logger, store)
    groups = build_groups(
        pipe=args.pp, data=args.data_parallel_size, tensor=args.tp, device=device,
        expert=args.expert_parallel_size,
    )  # fmt: skip
    connect(groups)
    return groups


def _check_experts(args: NeoXArgs, process: Process) -> None:
    together, ranks = args.expert_parallel_size * args.tp, process.local_world_size
    if args.expert_parallel_size == 1 or args.expert_parallel_across_nodes or process.world_size == ranks:
        return
    if ranks % together:
        raise args.error(
            "expert_parallel_size",
            f"{args.expert_parallel_size} times model_parallel_size {args.cite('model_parallel_size')} are {together} "
            f"neighbouring ranks, and a machine has {ranks}: tokens would travel between machines, where such traffic "
            "has been seen to hang; make it divide a machine's ranks, or set expert_parallel_across_nodes: true",
        )


def allow_tf32(allowed: bool) -> None:
    """Let GPUs multiply fp32 matrices in TF32, or not."""
    with warnings.catch_warnings():
        # Releases of torch that call this name old cannot compile after the new one was used.
        warnings.simplefilter("ignore")
        torch.backends.cuda.matmul.allow_tf32 = allowed


def connect(groups: ParallelGroups) -> None:
    """Have the members of every group of this rank meet in an all-reduce; all ranks call it together.

    NCCL connects at a group's first collective: a member that is not there is named by its axis now, and the
    time limit of a step is not spent on connecting. Only collectives: a channel between each two ranks that
    is opened before a pipeline uses it was reported to make the pipeline many times slower.
    Raises StartError that names the axis and its ranks.
    """
    if groups.world_size == 1:
        return
    everyone = {"world": None, **{axis: handle for axis, handle in groups.handles.items() if handle is not None}}
    if groups.embedding is not None:
        everyone["embedding"] = groups.embedding
    for name, handle in everyone.items():
        try:
            met = torch.ones((), device=groups.device)
            dist.all_reduce(met, group=handle)
            count, size = int(met), dist.get_world_size(handle)
        except RuntimeError as problem:
            ranks = dist.get_process_group_ranks(handle or dist.group.WORLD)
            raise StartError(f"the {name} group, ranks {ranks}, cannot be connected: {problem}") from problem
        assert count == size, f"{count} ranks met in the {name} group of {size}"
