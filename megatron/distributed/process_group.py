"""Joining the process group, and work that one rank does for all."""

import logging
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from tqdm import tqdm

from megatron.distributed.rendezvous import Process
from megatron.distributed.startup_checks import rendezvous_and_check
from megatron.neox_arguments import NeoXArgs

T = TypeVar("T")
# Where NVIDIA's driver lists what it found, whatever torch makes of it
_GPUS = Path("/proc/driver/nvidia/gpus")


class World(Protocol):
    """All ranks of the run, as one of them sees it; `mpu.ParallelGroups` is one."""

    @property
    def world_rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def device(self) -> torch.device: ...


class _AroundBars(logging.StreamHandler):
    """Lines on a terminal that has progress bars: these are taken away for the line, and drawn again below
    it."""

    def emit(self, record: logging.LogRecord) -> None:
        # Without bars also without tqdm's lock, which a fork may have left taken
        drawn = bool(getattr(tqdm, "_instances", ()))
        with tqdm.external_write_mode(file=self.stream) if drawn else nullcontext():
            super().emit(record)


def configure_logging(rank: int) -> logging.Logger:
    """The run's logger: plain lines on stdout from rank 0, warnings of the other ranks on theirs."""
    logger = logging.getLogger("megatron")
    logger.handlers = [_AroundBars(sys.stdout)]
    logger.handlers[0].setFormatter(logging.Formatter("%(message)s"))
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.propagate = False
    return logger


def init_process_group(
    args: NeoXArgs, process: Process, logger: logging.Logger, store: dist.Store | None = None
) -> torch.device:
    """Initialise torch.distributed, unless it already is, for all ranks of `args`. The device of this rank.

    store: what `rendezvous_and_check` gave, where a command lets ranks meet before each machine fetches what
    it needs. Raises ConfigError when `distributed_backend: nccl` meets GPUs of this machine that torch does
    not see, or fewer of them than ranks.
    """
    backend = _backend(args, logger)
    device = _gpu(args, process) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # DeepSpeed reads it even when told the device
    os.environ.setdefault("LOCAL_RANK", str(process.local_rank))
    if not dist.is_initialized():
        # Without `device_id`: with it every further group would be split off by all ranks of the world
        # together (ncclCommSplit), which at a thousand ranks takes minutes.
        dist.init_process_group(
            backend,
            store=store or rendezvous_and_check(args, process, logger) or dist.HashStore(),
            rank=process.rank,
            world_size=process.world_size,
            timeout=timedelta(minutes=args.first_step_timeout_mins),
        )
    return device


def _gpu(args: NeoXArgs, process: Process) -> torch.device:
    """The GPU of this rank: that of its number on this machine, or the only one it sees, where the starter
    shows each task its own (srun --gpus-per-task, --gpu-bind, wrappers of MPI)."""
    count = torch.cuda.device_count()
    if count > 1 and process.local_rank >= count:
        raise args.error(
            "distributed_backend",
            f"nccl needs a GPU for each rank: rank {process.rank} is number {process.local_rank} of "
            f"{process.local_world_size} on its machine and sees {count}; start {count} ranks there, or show each "
            "its own GPU",
        )
    return torch.device("cuda", process.local_rank if count > 1 else 0)


def _backend(args: NeoXArgs, logger: logging.Logger) -> str:
    """nccl or gloo. All files of GPT-NeoX say nccl: where there is no GPU that is gloo, and said."""
    backend, has_gpu = args.distributed_backend, torch.cuda.is_available()
    if backend == "auto":
        backend = "nccl" if has_gpu else "gloo"
        logger.info(f"distributed_backend: auto chose {backend}")
    elif backend == "nccl" and not has_gpu:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        if _GPUS.is_dir() and not hidden:
            raise args.error(
                "distributed_backend", "nccl, but torch sees none of this machine's GPUs: `python deepy.py doctor` "
                "says why (distributed_backend: gloo trains on CPUs)",
            )  # fmt: skip
        backend = "gloo"
        logger.info("distributed_backend: nccl is gloo here: this machine shows no GPU, training runs on its CPUs")
    return backend


def on_rank_zero(world: World, work: Callable[[], T]) -> T:
    """Do something on rank 0 and give every rank its result; what it raises is raised on every rank."""
    if world.world_size == 1:
        return work()
    outcome: list[object] = [None, None]
    if world.world_rank == 0:
        try:
            outcome[0] = work()
        except Exception as problem:  # handed to all ranks, which would otherwise wait for ever
            outcome[1] = problem
    dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[1], Exception):
        raise outcome[1]
    return outcome[0]  # type: ignore[return-value]


def run_on_all_ranks(world: World, work: Callable[[], T]) -> list[T]:
    """Do something on every rank and give every rank all results, by rank; the first problem is raised on
    all."""
    return run_on_all_ranks_of(None, world.world_size, work)


def run_on_all_ranks_of(group: dist.ProcessGroup | None, size: int, work: Callable[[], T]) -> list[T]:
    """Do as `run_on_all_ranks` over the `size` ranks of a group; group None: all ranks of the run."""
    if size == 1:
        return [work()]
    local_outcome: tuple[object, object] = (None, None)
    try:
        local_outcome = (work(), None)
    except Exception as problem:  # raised on all ranks below
        local_outcome = (None, problem)
    outcomes: list[tuple[object, object]] = [local_outcome] * size
    dist.all_gather_object(outcomes, local_outcome, group=group)
    for _, raised in outcomes:
        if isinstance(raised, Exception):
            raise raised
    return [result for result, _ in outcomes]  # type: ignore[misc]


def run_on_each_rank(world: World, work: Callable[[], T]) -> T:
    """Do something on every rank; every rank keeps its own result, the first problem is raised on all."""
    kept: list[T] = []
    run_on_all_ranks(world, lambda: kept.append(work()))
    return kept[0]
