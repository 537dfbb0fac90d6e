"""Defines probes: objects that measure additional metrics in logged steps, as tensors on the device."""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.mpu import ParallelGroups


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
    """Returns the sum of squares of all elements of `parts`, an fp64 scalar on `device`. The norm of each
    part is computed in fp32."""
    if not parts:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(parts, 2, torch.float32)).to(device).double().square().sum()
