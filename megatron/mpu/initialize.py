"""Creates the process groups of a configuration's layout."""

import logging
import warnings

import torch
import torch.distributed as dist

from megatron.distributed import Process, StartError, init_process_group
from megatron.mpu.groups import ParallelGroups, build_groups
from megatron.neox_arguments import ModelArgs, NeoXArgs


def init_model_parallel(
    args: NeoXArgs, process: Process, logger: logging.Logger, store: dist.Store | None = None
) -> ParallelGroups:
    """Initialises torch.distributed (unless it already is), and creates and connects the groups of `args`.

    It also sets `tf32`. store and errors: as for `distributed.init_process_group`; ConfigError if experts
    would be split over machines.
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


def _check_experts(args: ModelArgs, process: Process) -> None:
    neighbours, ranks = args.expert_parallel_size * args.tp, process.local_world_size
    if args.expert_parallel_size == 1 or args.expert_parallel_across_nodes or process.world_size == ranks:
        return
    if ranks % neighbours:
        raise args.error(
            "expert_parallel_size",
            f"{args.expert_parallel_size} times model_parallel_size {args.cite('model_parallel_size')} are "
            f"{neighbours} ranks, which do not divide the {ranks} of a machine: tokens would travel between machines, "
            "which has been seen to hang; make the product divide a machine's ranks, or set "
            "expert_parallel_across_nodes: true",
        )


def allow_tf32(allowed: bool) -> None:
    """Sets whether GPUs may multiply fp32 matrices in TF32."""
    with warnings.catch_warnings():
        # torch releases that deprecate this name cannot compile after the new one was used.
        warnings.simplefilter("ignore")
        torch.backends.cuda.matmul.allow_tf32 = allowed


def connect(groups: ParallelGroups) -> None:
    """Connects the members of every group of this rank by an all-reduce; all ranks call it together.

    NCCL connects a group at its first collective. Connecting here reports a missing member at start, with the
    name of its group, and not as a timeout of the first step. Only collectives connect: channels between
    pairs of ranks, opened before a pipeline uses them, were reported to slow the pipeline down. Raises
    StartError that names the group and its ranks.
    """
    if groups.world_size == 1:
        return
    groups_by_name = {"world": None, **{axis: handle for axis, handle in groups.handles.items() if handle is not None}}
    if groups.embedding is not None:
        groups_by_name["embedding"] = groups.embedding
    for name, handle in groups_by_name.items():
        try:
            counter = torch.ones((), device=groups.device)
            dist.all_reduce(counter, group=handle)
            count, size = int(counter), dist.get_world_size(handle)
        except RuntimeError as problem:
            ranks = dist.get_process_group_ranks(handle or dist.group.WORLD)
            raise StartError(f"the {name} group, ranks {ranks}, cannot be connected: {problem}") from problem
        assert count == size, f"{count} ranks met in the {name} group of {size}"
