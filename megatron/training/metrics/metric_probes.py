"""Probes measure further metrics in a logged step; their values are still on the device."""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.mpu import ParallelGroups


class Probe(Protocol):
    """Measures metrics in steps that are logged; all ranks call it together."""

    def values(self) -> tuple[list[str], Tensor]:
        """Returns names of metrics and their values `[names]`, without a wait for the device."""
        ...


def sum_over_ranks(values: Tensor, groups: ParallelGroups) -> Tensor:
    """Sum values in place over all ranks of the world."""
    if groups.world_size > 1:
        dist.all_reduce(values)
    return values


def sum_of_squares(parts: list[Tensor], device: torch.device) -> Tensor:
    """Returns the sum of squares as an fp64 scalar on `device`; each part's norm is computed in fp32."""
    if not parts:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(parts, 2, torch.float32)).to(device).double().square().sum()
