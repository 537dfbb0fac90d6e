"""What a log step measures beside the loss: each probe hands over values that are still on the device."""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.mpu import ParallelGroups


class Probe(Protocol):
    """Asked at steps that are logged, by all ranks together."""

    def values(self) -> tuple[list[str], Tensor]:
        """Names of metrics and their values `[names]`; no wait for the device."""
        ...


def sum_over_ranks(values: Tensor, groups: ParallelGroups) -> Tensor:
    """In place, over the world; nothing for one process."""
    if groups.world_size > 1:
        dist.all_reduce(values)
    return values


def sum_of_squares(parts: list[Tensor], device: torch.device) -> Tensor:
    """fp64 scalar on `device`; each part's norm in fp32."""
    if not parts:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(parts, 2, torch.float32)).to(device).double().square().sum()
