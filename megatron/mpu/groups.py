"""Process groups as one frozen object, with one named axis per kind of parallelism."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
import torch.distributed as dist

AXES = ("pipe", "data", "context", "tensor")
"""The axes of the rank grid, slowest-varying first: consecutive ranks share a tensor group, as in NeoX and
DeepSpeed."""
FOLDED = ("data_context", "expert", "expert_data", "context_heads", "context_keys")
"""Axes made of those of the grid. Ranks of a `data_context` group hold the same weights: gradients are summed
over them, and ZeRO shards over them. Expert parallelism divides this axis into two. Ranks of an `expert`
group hold different experts of one model. Ranks of an `expert_data` group hold the same experts.
The context axis, too, is divided into two. Neighbours in a `context_heads` group exchange heads for columns
(Ulysses). Ranks of a `context_keys` group gather keys, or hand them round."""


@dataclass(frozen=True)
class ParallelGroups:
    """This rank's coordinates in the parallel layout, and its process groups. Axes are those of `AXES` and
    `FOLDED`.

    sizes: number of ranks along each axis.
    ranks: this rank's coordinate on each axis.
    handles: process group of each axis; None if the axis has one member.
    members: global ranks of each axis's group, in axis order.
    embedding: group of the first and last pipeline stage (for tied embeddings, and for hidden states that go
        round with virtual stages); None on middle stages, or if one rank holds both.
    world_rank, world_size: global rank of this process, and number of all processes.
    is_v_pipeline: the first pipeline rank also holds the last stage.
    """

    sizes: Mapping[str, int]
    ranks: Mapping[str, int]
    handles: Mapping[str, dist.ProcessGroup | None]
    members: Mapping[str, tuple[int, ...]]
    device: torch.device
    embedding: dist.ProcessGroup | None = None
    world_rank: int = 0
    world_size: int = 1
    is_v_pipeline: bool = False

    def size(self, axis: str) -> int:
        """Returns the number of ranks along `axis`, such as "tensor"."""
        return self.sizes[axis]

    def rank(self, axis: str) -> int:
        """Returns this process's coordinate along `axis`, such as "tensor"."""
        return self.ranks[axis]

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Returns the process group along `axis`, such as "tensor"; None if the axis has one rank."""
        return self.handles[axis]

    def sum(self, x: torch.Tensor, axis: str) -> torch.Tensor:
        """Sums `x` in place over the ranks along `axis`, and returns it."""
        if self.handles[axis] is not None:
            dist.all_reduce(x, group=self.handles[axis])
        return x

    def max(self, x: torch.Tensor, axis: str) -> torch.Tensor:
        """Replaces `x` by its elementwise maximum over the ranks along `axis`, and returns it."""
        if self.handles[axis] is not None:
            dist.all_reduce(x, dist.ReduceOp.MAX, group=self.handles[axis])
        return x

    def from_last_stage(self, x: torch.Tensor) -> torch.Tensor:
        """Overwrites `x` with the last pipeline stage's `x`, and returns it."""
        if self.handles["pipe"] is not None:
            dist.broadcast(x, src=self.members["pipe"][self._last_stage_rank], group=self.handles["pipe"])
        return x

    @property
    def _last_stage_rank(self) -> int:
        return 0 if self.is_v_pipeline else self.size("pipe") - 1

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the first pipeline stage, which has the embedding."""
        return self.rank("pipe") == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the last pipeline stage, which has the output layer."""
        return self.rank("pipe") == self._last_stage_rank

    def with_replicated_experts(self) -> ParallelGroups:
        """Returns these groups without expert parallelism, for a model that has all experts on every rank of
        `data_context`."""
        return replace(
            self,
            sizes=MappingProxyType({**self.sizes, "expert": 1, "expert_data": self.sizes["data_context"]}),
            ranks=MappingProxyType({**self.ranks, "expert": 0, "expert_data": self.ranks["data_context"]}),
            handles=MappingProxyType({**self.handles, "expert": None, "expert_data": self.handles["data_context"]}),
            members=MappingProxyType(
                {**self.members, "expert": (self.world_rank,), "expert_data": self.members["data_context"]}
            ),
        )

    def barrier(self) -> None:
        """Waits until all ranks have called it; does nothing in a single process."""
        if self.world_size > 1:
            dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)

    @staticmethod
    def single(device: str | torch.device = "cpu") -> ParallelGroups:
        """Returns the groups of a run with one process, which needs no torch.distributed."""
        return ParallelGroups(
            sizes=MappingProxyType(dict.fromkeys((*AXES, *FOLDED), 1)),
            ranks=MappingProxyType(dict.fromkeys((*AXES, *FOLDED), 0)),
            handles=MappingProxyType(dict.fromkeys((*AXES, *FOLDED))),
            members=MappingProxyType(dict.fromkeys((*AXES, *FOLDED), (0,))),
            device=torch.device(device),
        )


def _group_of(ranks: Sequence[int], name: str) -> dist.ProcessGroup:
    return dist.new_group(list(ranks), use_local_synchronization=True, group_desc=name)


def build_groups(
    *,
    pipe: int,
    data: int,
    tensor: int,
    device: torch.device,
    context: int = 1,
    expert: int = 1,
    ulysses: int = 1,
    is_v_pipeline: bool = False,
) -> ParallelGroups:
    """Creates this rank's process group for each axis. All ranks call it together, after init_process_group.

    pipe, data, context, tensor: number of ranks along each axis; their product must be the world size.
    expert: number of neighbouring data and context ranks over which experts are sharded; it must divide
        `data * context`.
    ulysses: number of neighbouring context ranks that exchange heads; it must divide `context`.
    is_v_pipeline: the first pipeline rank holds the first stage and the last.

    A rank creates only the groups that it belongs to. All ranks create equally many groups, because torch
    numbers groups to name them. Raises ValueError if the sizes do not fit.
    """
    sizes = dict(zip(AXES, (pipe, data, context, tensor), strict=True))
    world_size, world_rank = dist.get_world_size(), dist.get_rank()
    if math.prod(sizes.values()) != world_size:
        raise ValueError(
            f"the parallel sizes {sizes} multiply to {math.prod(sizes.values())} ranks, but the run has {world_size}; "
            "start as many ranks as the product, or change the sizes"
        )
    if context % ulysses:
        raise ValueError(f"{ulysses} ranks that exchange heads do not divide {context} context ranks; choose a divisor")
    copies = data * context
    if copies % expert:
        raise ValueError(
            f"expert_parallel_size {expert} does not divide the number of data- and context-parallel ranks, {copies}; "
            "choose a divisor"
        )
    if world_size == 1:
        return ParallelGroups.single(device)
    grid = torch.arange(world_size).view(*sizes.values())
    coordinate = [int(i) for i in (grid == world_rank).nonzero()[0]]
    ranks = dict(zip(AXES, coordinate, strict=True))
    members: dict[str, tuple[int, ...]] = {}
    for position, axis in enumerate(AXES):
        index = tuple(coordinate[:position] + coordinate[position + 1 :])
        members[axis] = tuple(grid.movedim(position, -1)[index].tolist())
    ranks["data_context"] = ranks["data"] * context + ranks["context"]
    members["data_context"] = tuple(grid[ranks["pipe"], :, :, ranks["tensor"]].flatten().tolist())
    replica, expert_rank = divmod(ranks["data_context"], expert)
    sizes |= {"data_context": copies, "expert": expert, "expert_data": copies // expert}
    ranks |= {"expert": expert_rank, "expert_data": replica}
    members["expert"] = members["data_context"][replica * expert :][:expert]
    members["expert_data"] = members["data_context"][expert_rank::expert]
    ring, heads_rank = divmod(ranks["context"], ulysses)
    sizes |= {"context_heads": ulysses, "context_keys": context // ulysses}
    ranks |= {"context_heads": heads_rank, "context_keys": ring}
    members["context_heads"] = members["context"][ring * ulysses :][:ulysses]
    members["context_keys"] = members["context"][heads_rank::ulysses]
    handles: dict[str, dist.ProcessGroup | None] = {}
    for axis in (*AXES, *FOLDED):  # axes with the same ranks share one group
        same_ranks = next((name for name in handles if members[name] == members[axis]), None)
        new = _group_of(members[axis], axis) if sizes[axis] > 1 and same_ranks is None else None
        handles[axis] = new if same_ranks is None else handles[same_ranks]
    embedding = None
    if pipe > 1 and not is_v_pipeline:
        ends = {members["pipe"][0], members["pipe"][-1]}
        handle = _group_of(sorted(ends) if world_rank in ends else [world_rank], "embedding")
        embedding = handle if world_rank in ends else None
    return ParallelGroups(
        sizes=MappingProxyType(sizes),
        ranks=MappingProxyType(ranks),
        handles=MappingProxyType(handles),
        members=MappingProxyType(members),
        device=device,
        embedding=embedding,
        world_rank=world_rank,
        world_size=world_size,
        is_v_pipeline=is_v_pipeline and pipe > 1,
    )
