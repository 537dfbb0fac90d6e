"""Whether ranks are connected as fast as they should be: TCP in the place of a fabric costs a run a factor of
17."""

import logging
import os
import time

import torch
import torch.distributed as dist

from megatron.distributed.process_group import World, on_rank_zero
from megatron.distributed.rendezvous import Process, StartError
from megatron.neox_arguments import ConfigError, NeoXArgs

VARIABLE = "NEOX_MIN_ALLREDUCE_GB_S"
_KEY = "min_allreduce_gb_s"
_MIB_ON_GPU, _MIB_ON_CPU = 256, 8
_TIMES = 3
_VARIABLES = ("NCCL_NET", "FI_PROVIDER", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "GLOO_SOCKET_IFNAME")


def check_transport(args: NeoXArgs, world: World, process: Process, logger: logging.Logger) -> None:
    """Measures the bandwidth of an all-reduce over all ranks before a run. All ranks call it together.

    It measures if a minimum is set (`min_allreduce_gb_s`), or if GPUs are on several machines. Without a
    minimum it only logs the result. Raises StartError on every rank if the bandwidth is below the minimum,
    ConfigError if the minimum is not a number.
    """
    if world.world_size == 1:
        return
    several = process.local_world_size < process.world_size
    # One for all, whatever the variable says elsewhere
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
        logger.info(summary + ("" if bound is None else f", at least {bound:g} asked for ({place})"))
        return
    environment = ", ".join(f"{name}={os.environ.get(name, '(unset)')}" for name in _VARIABLES)
    raise StartError(
        f"{place}: {_KEY}: {bound:g} GB/s asked for; {summary}; {environment}; NCCL may use TCP because the fabric's "
        "plugin (AWS Libfabric, InfiniBand) was not loaded: NCCL_DEBUG=INFO shows its choice (NET/...); to start "
        "anyway, lower this bound"
    )


def bus_bandwidth(world: World, size: int) -> float:
    """Returns the bus bandwidth in GB/s of the fastest of a few all-reduces of `size` bytes.

    It is the same on all ranks: size/time x 2(n-1)/n, the busbw of nccl-tests."""
    values = torch.zeros(size // 4, device=world.device)
    seconds = torch.tensor(float("inf"), dtype=torch.float64)
    for time_it in (False, *[True] * _TIMES):
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
        torch.cuda.empty_cache()  # not one byte less for the model
    return size / float(slowest) * 2 * (world.world_size - 1) / world.world_size / 1e9


def _wait_for_device(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def _bound(args: NeoXArgs) -> tuple[float | None, str]:
    """Returns the required GB/s (None: no minimum) and where it is set. The key takes precedence over the
    environment variable."""
    if args.min_allreduce_gb_s is not None:
        return args.min_allreduce_gb_s, args.origin(_KEY)
    text = os.environ.get(VARIABLE, "")
    if not text.strip():
        return None, ""
    try:
        bound = float(text)
    except ValueError:
        bound = 0.0
    if not 0 < bound < float("inf"):
        raise ConfigError(
            [f"{VARIABLE}={text!r} in the environment is not a number of GB/s; set a number above 0, or unset it"]
        )
    return bound, f"{VARIABLE} in the environment"
