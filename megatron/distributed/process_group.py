"""Initialises the process group, measures its bandwidth, and runs functions on rank 0 or on every rank."""

import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from tqdm import tqdm

from megatron.distributed.rendezvous import Process, StartError
from megatron.distributed.startup_checks import rendezvous_and_check
from megatron.neox_arguments import ConfigError, ModelArgs, NeoXArgs

T = TypeVar("T")
# NVIDIA's driver lists the machine's GPUs here, even if torch cannot use them
_GPUS = Path("/proc/driver/nvidia/gpus")
# Settings of `check_transport`
GB_S_VARIABLE = "NEOX_MIN_ALLREDUCE_GB_S"
_BANDWIDTH_KEY = "min_allreduce_gb_s"
_MIB_ON_GPU, _MIB_ON_CPU = 256, 8
_REPEATS = 3
_SHOWN_VARIABLES = ("NCCL_NET", "FI_PROVIDER", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "GLOO_SOCKET_IFNAME")


class World(Protocol):
    """Gives the number of ranks of the run, and this rank's number and device. `mpu.ParallelGroups` is a
    World."""

    @property
    def world_rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def device(self) -> torch.device: ...


class _AroundBars(logging.StreamHandler):
    """A log handler that hides tqdm's progress bars while it writes a line to the same terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        # Without bars tqdm's lock is not taken, because in a forked process it may be locked for ever
        has_bars = bool(getattr(tqdm, "_instances", ()))
        with tqdm.external_write_mode(file=self.stream) if has_bars else nullcontext():
            super().emit(record)


def configure_logging(rank: int) -> logging.Logger:
    """Returns the run's logger, which writes plain lines to stdout. Rank 0 logs INFO and above, other ranks
    only warnings and errors."""
    logger = logging.getLogger("megatron")
    logger.handlers = [_AroundBars(sys.stdout)]
    logger.handlers[0].setFormatter(logging.Formatter("%(message)s"))
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.propagate = False
    return logger


def init_process_group(
    args: NeoXArgs, process: Process, logger: logging.Logger, store: dist.Store | None = None
) -> torch.device:
    """Initialises torch.distributed if it is not initialised yet, and returns this rank's device.

    store: the store that `rendezvous_and_check` returned; None: this function calls `rendezvous_and_check`.

    With `distributed_backend: nccl`, raises ConfigError if torch sees none of the machine's GPUs, or if the
    machine has fewer GPUs than ranks.
    """
    backend = _backend(args, logger)
    device = _gpu(args, process) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # DeepSpeed reads this variable even if it is given the device
    os.environ.setdefault("LOCAL_RANK", str(process.local_rank))
    if not dist.is_initialized():
        # `device_id` is not passed: with it, all ranks of the run would split off every further group
        # together (ncclCommSplit), which takes minutes at a thousand ranks.
        dist.init_process_group(
            backend,
            store=store or rendezvous_and_check(args, process, logger) or dist.HashStore(),
            rank=process.rank,
            world_size=process.world_size,
            timeout=timedelta(minutes=args.first_step_limit_mins),
        )
    return device


def _gpu(args: ModelArgs, process: Process) -> torch.device:
    """Returns the GPU whose index is this rank's local rank, or the only GPU if the rank sees just one.

    Some launchers show each rank only its own GPU (srun --gpus-per-task, --gpu-bind, wrappers of MPI). Raises
    ConfigError if the rank sees several GPUs but none with its index.
    """
    count = torch.cuda.device_count()
    if count > 1 and process.local_rank >= count:
        raise args.error(
            "distributed_backend",
            f"nccl needs one GPU per rank, but rank {process.rank} (local rank {process.local_rank} of "
            f"{process.local_world_size} on its machine) sees only {count} GPUs; start {count} ranks on this machine, "
            "or let each rank see only its own GPU",
        )
    return torch.device("cuda", process.local_rank if count > 1 else 0)


def _backend(args: ModelArgs, logger: logging.Logger) -> str:
    """Returns the backend to use, "nccl" or "gloo", and logs the choice if it differs from
    `distributed_backend`.

    If nccl is configured but the machine has no GPU, gloo is used, because the configuration files of
    GPT-NeoX always set nccl. Raises ConfigError if nccl is configured and torch sees none of the machine's
    GPUs.
    """
    backend, has_gpu = args.distributed_backend, torch.cuda.is_available()
    if backend == "auto":
        backend = "nccl" if has_gpu else "gloo"
        logger.info(f"distributed_backend: auto chose {backend}")
    elif backend == "nccl" and not has_gpu:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        if _GPUS.is_dir() and not hidden:
            raise args.error(
                "distributed_backend", "nccl needs a GPU, but torch sees none of this machine's GPUs; run `python "
                "deepy.py doctor` to find out why (to train on CPUs, set distributed_backend: gloo)",
            )  # fmt: skip
        backend = "gloo"
        logger.info("distributed_backend: using gloo instead of nccl: no GPU is visible here, so the run uses CPUs")
    return backend


def on_rank_zero(world: World, work: Callable[[], T]) -> T:
    """Runs `work` on rank 0 and returns its result on every rank. If `work` raises an exception, every rank
    raises it. All ranks call this function together."""
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
    """Runs `work` on every rank and returns the results of all ranks, in rank order. If `work` fails on some
    ranks, every rank raises the exception of the lowest failing rank."""
    return run_on_all_ranks_of(None, world.world_size, work)


def run_on_all_ranks_of(group: dist.ProcessGroup | None, size: int, work: Callable[[], T]) -> list[T]:
    """Runs `work` on every rank of a group and returns the results of its ranks, in order.

    If `work` fails on some ranks, every rank of the group raises the exception of the lowest failing rank.

    group: None: all ranks of the run. size: number of ranks of the group.
    """
    if size == 1:
        return [work()]
    try:
        local_outcome: tuple[object, object] = (work(), None)
    except Exception as problem:  # raised on all ranks below
        local_outcome = (None, problem)
    outcomes: list[tuple[object, object]] = [local_outcome] * size
    dist.all_gather_object(outcomes, local_outcome, group=group)
    for _, raised in outcomes:
        if isinstance(raised, Exception):
            raise raised
    return [result for result, _ in outcomes]  # type: ignore[misc]


def run_on_each_rank(world: World, work: Callable[[], T]) -> T:
    """Runs `work` on every rank and returns this rank's result. If `work` fails on some ranks, every rank
    raises the exception of the lowest failing rank."""
    results: list[T] = []
    run_on_all_ranks(world, lambda: results.append(work()))
    return results[0]


def check_transport(args: NeoXArgs, world: World, process: Process, logger: logging.Logger) -> None:
    """Measures the bandwidth of an all-reduce over all ranks before a run. All ranks call it together.

    It measures only if a minimum is set (`min_allreduce_gb_s`, or NEOX_MIN_ALLREDUCE_GB_S in the
    environment), or if the run uses GPUs of several machines. Without a minimum it only logs the result.

    Raises StartError on every rank if the bandwidth is below the minimum, ConfigError if the minimum is not a
    number.
    """
    if world.world_size == 1:
        return
    several = process.local_world_size < process.world_size
    # Rank 0's minimum holds for all ranks, even if their environments differ
    bound, place = on_rank_zero(world, lambda: _bound(args))
    if bound is None and not (several and world.device.type == "cuda"):
        return
    mebibytes = _MIB_ON_GPU if world.device.type == "cuda" else _MIB_ON_CPU
    bandwidth = bus_bandwidth(world, mebibytes * 2**20)
    backend = dist.get_backend()
    summary = (
        f"all-reduce of {mebibytes} MiB over {world.world_size} ranks ({backend}): {bandwidth:.2f} GB/s bus bandwidth"
    )
    if bound is None or bandwidth >= bound:
        logger.info(summary + ("" if bound is None else f"; the minimum is {bound:g} ({place})"))
        return
    environment = ", ".join(f"{name}={os.environ.get(name, '(unset)')}" for name in _SHOWN_VARIABLES)
    raise StartError(
        f"{place}: {_BANDWIDTH_KEY}: the network is slower than the minimum of {bound:g} GB/s: {summary}; "
        f"{environment}. NCCL may be using TCP because the plugin of the fast network (AWS Libfabric, InfiniBand) was "
        "not loaded: NCCL_DEBUG=INFO logs which network it uses (NET/...). To start anyway, lower this minimum"
    )


def bus_bandwidth(world: World, size: int) -> float:
    """Returns the bus bandwidth in GB/s of the fastest of a few all-reduces of `size` bytes.

    For n ranks it is size / time x 2(n-1)/n, the busbw of nccl-tests. The result is the same on all ranks.
    """
    values = torch.zeros(size // 4, device=world.device)
    seconds = torch.tensor(float("inf"), dtype=torch.float64)
    for time_it in (False, *[True] * _REPEATS):
        _wait_for_device(world)
        start = time.perf_counter()
        dist.all_reduce(values)
        _wait_for_device(world)
        if time_it:
            seconds.clamp_(max=time.perf_counter() - start)
    slowest = seconds.to(world.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    del values
    if world.device.type == "cuda":
        torch.cuda.empty_cache()  # leaves this memory to the model
    return size / float(slowest) * 2 * (world.world_size - 1) / world.world_size / 1e9


def _wait_for_device(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def _bound(args: NeoXArgs) -> tuple[float | None, str]:
    """Returns the minimum bandwidth in GB/s (None: no minimum) and where it is set. The key
    `min_allreduce_gb_s` takes precedence over the environment variable."""
    if args.min_allreduce_gb_s is not None:
        return args.min_allreduce_gb_s, args.origin(_BANDWIDTH_KEY)
    text = os.environ.get(GB_S_VARIABLE, "")
    if not text.strip():
        return None, ""
    try:
        bound = float(text)
    except ValueError:
        bound = 0.0
    if not 0 < bound < float("inf"):
        raise ConfigError(
            [f"{GB_S_VARIABLE}={text!r} in the environment: expected a number of GB/s above 0; correct it or unset it"]
        )
    return bound, f"{GB_S_VARIABLE} in the environment"
