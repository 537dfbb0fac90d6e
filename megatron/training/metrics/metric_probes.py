"""Defines probes: objects that measure additional metrics in logged steps, as tensors on the device."""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.mpu import ParallelGroups
from megatron.training.optimizers import norm_dtype


class Probe(Protocol):
    """Measures additional metrics in each logged step. All ranks call it together."""

    def values(self) -> tuple[list[str], Tensor]:
        """Returns (names of metrics, tensor `[names]` of their values), without waiting for the device."""
        ...


def sum_over_ranks(values: Tensor, groups: ParallelGroups) -> Tensor:
    """Sum a tensor in place over all ranks of the run, and return it."""
    if groups.world_size > 1:
        dist.all_reduce(values)
    return values


def sum_of_squares(parts: list[Tensor], device: torch.device) -> Tensor:
    """Returns the sum of squares of all elements of `parts`, an fp64 scalar on `device`.

    The parts are on one device, which computes the norm of each in its `norm_dtype`.
    """
    if not parts:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch._foreach_norm(parts, 2, norm_dtype(parts[0].device))
    return torch.stack(norms).to(device).double().square().sum()
