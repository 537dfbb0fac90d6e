"""Measures utilisation, memory and power of every rank's GPU by NVML: minimum, mean and maximum over
ranks."""

import logging
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.distributed import run_on_all_ranks
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs

METRICS = ("utilization", "memory_gib", "power_watts")
"""The metrics of a GPU: percentage of the driver's last sample period in which a kernel ran, GiB in use by
all processes, and watts."""


def gpu_uuid(device: torch.device) -> str | None:
    """Returns the UUID by which NVML knows a CUDA device, whatever CUDA_VISIBLE_DEVICES is; None on a CPU."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else None


class Nvml:
    """Reads the metrics of one GPU by NVML. Raises RuntimeError that says why NVML cannot be used."""

    def __init__(self, uuid: str | None) -> None:
        if uuid is None:
            raise RuntimeError("there is no NVIDIA GPU")
        try:
            import pynvml
        except ImportError as problem:
            raise RuntimeError("pynvml is not installed: pip install 'neox[nvml]'") from problem
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            self._read()
        except pynvml.NVMLError as problem:  # no driver, a part of a GPU (MIG), a device that does not tell
            raise RuntimeError(f"NVML: {problem}") from problem

    def _read(self) -> list[float]:
        used_gib = self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used / 2**30
        watts = self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000.0
        return [float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu), used_gib, watts]

    def sample(self) -> list[float]:
        """Returns the values of `METRICS`, or NaN if the driver does not answer. It does not raise, because
        other ranks wait for the values."""
        try:
            return self._read()
        except self._nvml.NVMLError:
            return [math.nan] * len(METRICS)


class DeviceMetrics:
    """Computes `device/<metric>_{min,mean,max}` over all ranks."""

    def __init__(self, nvml: Nvml, groups: ParallelGroups) -> None:
        self._nvml, self._groups = nvml, groups

    def values(self) -> tuple[list[str], Tensor]:
        """Returns (names, values `[names]`) with the minimum, mean and maximum of each metric over all ranks'
        GPUs, sampled now. All ranks call it together."""
        local_sample = torch.tensor(self._nvml.sample())
        if self._groups.device.type == "cuda":
            local_sample = local_sample.pin_memory().to(self._groups.device, non_blocking=True)
        samples = [local_sample]
        if self._groups.world_size > 1:
            samples = [torch.empty_like(local_sample) for _ in range(self._groups.world_size)]
            dist.all_gather(samples, local_sample)
        ranks = torch.stack(samples)
        names = [f"device/{metric}_{kind}" for kind in ("min", "mean", "max") for metric in METRICS]
        return names, torch.cat([ranks.amin(0), ranks.mean(0), ranks.amax(0)])


def build_device_metrics(args: NeoXArgs, groups: ParallelGroups, logger: logging.Logger) -> DeviceMetrics | None:
    """Returns GPU metrics if `log_device_metrics` is true, or auto and every rank can read its GPU; else
    None.

    All ranks call it together. Raises ConfigError if the key is true and a rank cannot read its GPU.
    """
    if args.log_device_metrics is False:
        return None
    opened: list[Nvml] = []

    def begin() -> str | None:
        try:
            opened.append(Nvml(gpu_uuid(groups.device)))
        except RuntimeError as problem:
            return str(problem)
        return None

    missing = [
        f"rank {rank}: {reason}" for rank, reason in enumerate(run_on_all_ranks(groups, begin)) if reason is not None
    ]
    if missing and args.log_device_metrics is True:
        raise args.error("log_device_metrics", f"true, but GPU metrics cannot be read: {missing[0]}; set auto or false")
    logger.info(f"log_device_metrics: auto: {'on' if not missing else f'off, {missing[0]}'}")
    return None if missing else DeviceMetrics(opened[0], groups)
