"""Creates and connects the process groups that a configuration asks for."""

import logging
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron.distributed import Process, StartError, init_process_group
from megatron.mpu.groups import ParallelGroups, build_groups
from megatron.neox_arguments import ModelArgs, NeoXArgs
from megatron.neox_arguments.validation.model import head_exchange_problem


def init_model_parallel(
    args: NeoXArgs, process: Process, logger: logging.Logger, store: dist.Store | None = None
) -> ParallelGroups:
    """Initialises torch.distributed (unless it already is), and creates and connects the process groups of
    `args`.

    Also applies the key `tf32`. Raises ConfigError if expert parallelism would span machines without
    `expert_parallel_across_nodes: true`, and the errors of `distributed.init_process_group`.

    store: passed to `distributed.init_process_group`; None: it creates one.
    """
    check_experts(args, process)
    allow_tf32(args.tf32)
    device = init_process_group(args, process, logger, store)
    groups = configured_groups(args, device)
    connect(groups)
    return groups


def configured_groups(args: NeoXArgs, device: torch.device) -> ParallelGroups:
    """Creates the process groups of `args`, which has the world size. All ranks call it together."""
    return build_groups(
        pipe=args.pp, data=args.data_parallel_size, context=args.context_parallel_size, tensor=args.tp, device=device,
        expert=args.expert_parallel_size, ulysses=args.ulysses_size, is_v_pipeline=args.is_v_pipeline,
    )  # fmt: skip


def settle_context(args: NeoXArgs, process: Process, log: Callable[[str], None]) -> NeoXArgs:
    """Returns the configuration with a chosen `context_parallel_type`, if it is `auto` and rows are shared.

    It is ulysses if context ranks are on one machine and the heads can be shared out to them, else allgather.
    The choice is logged, and context ranks that are on several machines.
    """
    ranks, key = args.context_parallel_size * args.tp, "context_parallel_type"
    if args.context_parallel_size == 1:
        return args
    machine = process.local_world_size
    spans = process.world_size > machine and machine % ranks != 0
    if spans:
        log(
            f"context_parallel_size {args.context_parallel_size} x model_parallel_size {args.tp} = {ranks} ranks are "
            f"not on one machine of {machine}; what they exchange in every block crosses the network"
        )
    if args.context_parallel_type != "auto":
        return args
    reason = "context ranks are on several machines" if spans else None
    reason = reason or (head_exchange_problem(args, args.context_parallel_size) if args.attends else None)
    choice = "ulysses" if reason is None else "allgather"
    log(f"{key}: {choice} (auto{'' if reason is None else f': {reason}'})")
    return args.settle(key, choice)


def check_experts(args: ModelArgs, process: Process) -> None:
    """Raises ConfigError if experts would span machines without `expert_parallel_across_nodes: true`."""
    neighbours, ranks = args.expert_parallel_size * args.tp, process.local_world_size
    if args.expert_parallel_size == 1 or args.expert_parallel_across_nodes or process.world_size == ranks:
        return
    if ranks % neighbours:
        raise args.error(
            "expert_parallel_size",
            f"{args.expert_parallel_size} times model_parallel_size {args.cite('model_parallel_size')} is "
            f"{neighbours} ranks, which does not divide the {ranks} ranks of a machine. Tokens would be sent to "
            "experts between machines, and such runs have hung. Choose an expert_parallel_size whose product divides "
            "the ranks of a machine, or set expert_parallel_across_nodes: true to allow it",
        )


def allow_tf32(allowed: bool) -> None:
    """Sets whether GPUs may multiply fp32 matrices in TF32."""
    with warnings.catch_warnings():
        # The newer setting is avoided: once it is used, torch releases that deprecate this one cannot
        # compile.
        warnings.simplefilter("ignore")
        torch.backends.cuda.matmul.allow_tf32 = allowed


def connect(groups: ParallelGroups) -> None:
    """Connects the members of each of this rank's process groups by one all-reduce. All ranks call it
    together.

    NCCL connects a group at its first collective. Doing that at start reports a missing member by the name of
    its group, instead of a timeout in the first step. Point-to-point channels are not opened here: opening
    them before a pipeline uses them was reported to slow it down. Raises StartError with the group's name and
    ranks.
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
            raise StartError(
                f"the processes of the {name} group, ranks {ranks}, cannot connect to each other: {problem}"
            ) from problem
        assert count == size, (
            f"only {count} ranks took part in the first all-reduce of the {name} group of {size} ranks"
        )
