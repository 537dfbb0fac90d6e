"""Holds a stage's weights on a data rank, in full or sharded, and sums gradients over data ranks."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.model import Stage, init_stage
from megatron.model.init import initial_part, parameters_with_specs
from megatron.mpu import ParallelGroups, ParamSpec
from megatron.mpu.torch_versions import all_gather_single
from megatron.neox_arguments import NeoXArgs


@dataclass(frozen=True, eq=False)
class Shard:
    """This data rank's part of one parameter.

    layer, spec: the parameter's entry in the weight map.
    param: the parameter in the module.
    local: the elements that this rank holds: fp32 if trained (the optimizer updates them), else in the run's
        dtype.
    start: index of the first of these elements in the flattened tensor-parallel part of the parameter.
    shape: of the tensor-parallel part, with the experts of all ranks.
    replica: this rank's number, from 0, among the data ranks that hold the same elements.
    """

    layer: int
    spec: ParamSpec
    param: nn.Parameter
    local: nn.Parameter
    start: int
    shape: torch.Size
    replica: int

    @property
    def name(self) -> str:
        """The name of the parameter in the weight map."""
        return self.spec.name

    def is_first_copy(self, groups: ParallelGroups) -> bool:
        """Returns whether this rank's copy of the elements is the one that counts, if each counts on one rank
        only."""
        is_counted = self.spec.axis is not None or groups.rank("tensor") == 0
        return is_counted and self.replica == 0 and self.spec.is_first_copy(groups)

    def dtype(self, run_dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype of this parameter in checkpoints."""
        return torch.float32 if not self.spec.trained or self.spec.precise else run_dtype

    def slice_of(self, full: Tensor) -> Tensor:
        """Returns this shard's elements of `full`, a tensor for the parameter's whole tensor-parallel
        part."""
        return full.reshape(-1).narrow(0, self.start, self.local.numel()).view(self.local.shape)


class GradientPass(NamedTuple):
    """A pass of a micro-batch through a pipeline stage that computes gradients.

    layers: NeoX indices of the stage's layers. ends_stage, ends_step: it is the step's last such pass of this
    stage, or of this rank. is_deferred: it computes weight gradients that a backward has left for later.
    """

    layers: frozenset[int]
    ends_stage: bool
    ends_step: bool
    is_deferred: bool


class Weights(Protocol):
    """The weights and gradients of a stage on this data rank.

    trained, frozen: the shards of trained and frozen parameters, each parameter once, in the order of the
        stage.
    workers: (this rank's number, size) of the group of data ranks that divide work on full values among
        themselves.
    state_device: device of `local` of the trained shards, of their gradients and of optimizer states: the
        CPU, if these are offloaded.
    """

    trained: list[Shard]
    frozen: list[Shard]
    workers: tuple[int, int]
    state_device: torch.device

    def begin_gradients(self, gradient_pass: GradientPass) -> None:
        """Prepare for a pass that computes gradients. Call it before each."""

    def end_gradients(self, gradient_pass: GradientPass) -> None:
        """Take the gradients of a pass. Call it after each."""

    def gradients(self) -> list[Tensor | None]:
        """Returns the step's gradient for each shard in `trained`, summed over data ranks.

        Call it after the last backward. Gradients are fp32; with `fused_update` they have the dtype that
        backward gave them. None: no gradient.
        """

    def clear_gradients(self, shards: Sequence[Shard]) -> None:
        """Release the gradients of these shards, after their update."""

    def gradient_memory(self) -> list[Tensor | None]:
        """Returns the tensors that hold gradients on this rank, for memory reports; None for one that is
        missing."""

    def close(self) -> None:
        """Free the gradients, and remove the hooks from the parameters; those of `fully_shard` stay."""

    def publish(self, shards: Sequence[Shard]) -> None:
        """Make the next forward use the updated values in `local` of these shards."""

    def gather(self, shard: Shard, part: Tensor, writer: int | None = None) -> Tensor | None:
        """Returns a full tensor, put together from the `part` of each data rank. All of them call it
        together.

        part: a value for each element of `shard.local`, such as its moments. writer: number of the worker
        that gets the full tensor, while others get None; None: all get it.
        """

    def scatter(self, shard: Shard, full: Tensor | None, source: int) -> Tensor:
        """Returns this rank's part, the elements of `shard.local`, of the full tensor that one worker has.

        full: the tensor on the worker with the number `source`; None on others. All ranks call it together.
        """

    def worker_of(self, data_rank: int) -> int | None:
        """Returns the worker number of a data rank; None if that rank is not in this rank's group of
        workers."""


class RowParts:
    """Gathers and scatters weights whose rows are split over the ranks of a group.

    A weight's rows form `blocks` consecutive blocks of equal length. Rank r holds rows of block r % blocks.
    If `sharded`, the ranks with the same block split its rows, and the last of them may hold fewer; else each
    holds the whole block.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, members: Sequence[int], rank: int, device: torch.device, blocks: int,
        sharded: bool,
    ) -> None:  # fmt: skip
        self._group, self._members, self._rank, self._device = group, members, rank, device
        self.blocks, self.replicas, self._sharded = blocks, len(members) // blocks, sharded

    def rows(self, shape: torch.Size) -> int:
        """Returns the number of rows that each rank sends of a weight; a rank that holds fewer pads them."""
        rows = shape[0] // self.blocks
        return -(-rows // self.replicas) if self._sharded else rows

    def gather(self, shard: Shard, part: Tensor, writer: int | None) -> Tensor | None:
        """Returns the full tensor from the `part` of each rank; only on rank `writer`, or on all if that is
        None."""
        row = shard.shape.numel() // shard.shape[0]
        sent = torch.zeros(self.rows(shard.shape) * row, dtype=part.dtype, device=self._device)
        sent[: part.numel()].copy_(part.reshape(-1))
        if writer is None:
            gathered = torch.empty(len(self._members) * sent.numel(), dtype=part.dtype, device=self._device)
            all_gather_single(gathered, sent, group=self._group)
            if self.blocks == 1:
                return gathered[: shard.shape.numel()].view(shard.shape)
            parts = list(gathered.view(len(self._members), sent.numel()))
        else:
            received = [torch.empty_like(sent) for _ in self._members] if writer == self._rank else None
            dist.gather(sent, received, dst=self._members[writer], group=self._group)
            if received is None:
                return None
            parts = received
        size = shard.shape.numel() // self.blocks
        parts = parts if self._sharded else parts[: self.blocks]
        values = [torch.cat(parts[block :: self.blocks])[:size] for block in range(self.blocks)]
        return (values[0] if self.blocks == 1 else torch.cat(values)).view(shard.shape)

    def scatter(self, shard: Shard, full: Tensor | None, source: int) -> Tensor:
        """Returns this rank's part, the elements of `shard.local`, of the tensor `full` that rank `source`
        has."""
        size = self.rows(shard.shape) * (shard.shape.numel() // shard.shape[0])
        part, parts = torch.empty(size, device=self._device), None
        if full is not None:
            parts = []
            for i in range(self.replicas):
                for values in full.reshape(self.blocks, -1):
                    own_values = values[i * size if self._sharded else 0 :][:size]
                    parts.append(F.pad(own_values, (0, size - len(own_values))).contiguous())
        dist.scatter(part, parts, src=self._members[source], group=self._group)
        return part[: shard.local.numel()].view(shard.local.shape).to(shard.local.device)


class ExpertParts(RowParts):
    """Gathers and scatters expert weights. Expert parallelism gives each data rank a block of their rows.

    sharded: the data ranks with the same experts split the rows of their block.
    """

    def __init__(self, groups: ParallelGroups, sharded: bool) -> None:
        axis = "data_context"
        group, members, rank = groups.group(axis), groups.members[axis], groups.rank(axis)
        super().__init__(group, members, rank, groups.device, groups.size("expert"), sharded)

    def is_expert_weight(self, spec: ParamSpec) -> bool:
        """Returns whether expert parallelism splits this parameter."""
        return self.blocks > 1 and spec.experts is not None

    def shard(
        self, layer: int, spec: ParamSpec, param: nn.Parameter, local: nn.Parameter, groups: ParallelGroups
    ) -> Shard:
        """Returns this rank's shard of an expert weight. local: the elements that this rank holds."""
        shape, replica = torch.Size(spec.local_shape(groups.size("tensor"))), groups.rank("expert_data")
        start = spec.expert_rows(groups)[0]
        if self._sharded:
            start, replica = start + min(replica * self.rows(shape), shape[0] // self.blocks), 0
        return Shard(layer, spec, param, local, start * (shape.numel() // shape[0]), shape, replica)


class ReplicatedWeights:
    """Holds all weights of a stage on every data rank. It implements `Weights`.

    16-bit weights also have fp32 master weights and fp32 gradients. Gradients are added to one flat fp32
    buffer per layer as they arrive. In a pipeline stage's last backward each buffer is summed over data ranks
    while backward continues with the layers below. With deferred weight gradients it is summed while the rank
    continues with its other stages. There are no buffers with `fused_update`, or if a single data rank trains
    in fp32.
    """

    def __init__(self, stage: Stage, args: NeoXArgs, groups: ParallelGroups, dtype: torch.dtype) -> None:
        init_stage(stage, args, groups, dtype)
        self.state_device = groups.device
        axis = "data_context"
        self._group, self._members, self._rank = groups.group(axis), groups.members[axis], groups.rank(axis)
        self.workers, self._experts = (self._rank, groups.size(axis)), ExpertParts(groups, sharded=False)
        self._has_masters = dtype != torch.float32
        shards = [self._shard(*item, args, groups) for item in parameters_with_specs(stage, args)]
        self.trained = [shard for shard in shards if shard.param.requires_grad]
        self.frozen = [shard for shard in shards if not shard.param.requires_grad]
        self._buckets: list[GradientBucket] = []
        self._views: dict[nn.Parameter, Tensor] = {}
        self._works: list[dist.Work] = []
        self._layers: list[int] = []  # of the buckets
        self._due = deque[int]()  # buckets to sum as soon as they are full, in this order on every data rank
        self._launched = set[int]()
        self._fused = args.fused_update is True
        if (self._has_masters or self._group is not None) and not self._fused:
            # Backward comes to the last layer first; a tied head counts as layer 0, to which backward comes
            # last. With expert parallelism, gradients of experts are summed over other groups of ranks.
            keys = {(shard.layer, self._experts.is_expert_weight(shard.spec)) for shard in self.trained}
            for layer, is_expert in sorted(keys, reverse=True):
                params = [
                    s.param
                    for s in self.trained
                    if (s.layer, self._experts.is_expert_weight(s.spec)) == (layer, is_expert)
                ]
                group = groups.group("expert_data") if is_expert else self._group
                bucket = GradientBucket(params, group, groups.device, self._reduce_ready)
                self._buckets.append(bucket)
                self._layers.append(layer)
                self._views.update(zip(params, bucket.views, strict=True))

    def _shard(
        self, layer: int, _: str, param: nn.Parameter, spec: ParamSpec, args: NeoXArgs, groups: ParallelGroups
    ) -> Shard:
        local = param
        if self._has_masters and param.requires_grad:
            local = nn.Parameter(torch.empty_like(param, dtype=torch.float32))
            for start, rows in initial_part(spec, layer, args, groups):
                local.data[start : start + len(rows)].copy_(rows)
        if self._experts.is_expert_weight(spec):
            return self._experts.shard(layer, spec, param, local, groups)
        return Shard(layer, spec, param, local, 0, param.shape, self._rank)

    def begin_gradients(self, gradient_pass: GradientPass) -> None:
        assert gradient_pass.ends_stage or not self._fused, "gradients of micro-batches would be added in 16 bits"
        for i, layer in enumerate(self._layers):
            if layer in gradient_pass.layers:
                self._buckets[i].begin_micro_batch()
                if gradient_pass.ends_stage:
                    self._due.append(i)

    def end_gradients(self, gradient_pass: GradientPass) -> None:
        while self._due:
            self._reduce(self._due.popleft())

    def _reduce_ready(self) -> None:
        # Buffers are summed in the same order on every rank, whatever the order of each rank's backward.
        while self._due and self._buckets[self._due[0]].is_full:
            self._reduce(self._due.popleft())

    def _reduce(self, i: int) -> None:
        bucket = self._buckets[i]
        self._launched.add(i)
        bucket.zero_empty()
        if bucket.group is not None:
            work = dist.all_reduce(bucket.flat, group=bucket.group, async_op=True)
            assert work is not None
            self._works.append(work)

    def gradients(self) -> list[Tensor | None]:
        if not self._buckets:
            return [shard.param.grad for shard in self.trained]
        for i in range(len(self._buckets)):  # of layers without a pass: a tied head, or below the lowest trained layer
            if i not in self._launched:
                self._reduce(i)
        for work in self._works:
            work.wait()
        self._works.clear()
        self._launched.clear()
        return [self._views[shard.param] for shard in self.trained]

    def clear_gradients(self, shards: Sequence[Shard]) -> None:
        for shard in shards:
            shard.param.grad = None
        for bucket in self._buckets:
            bucket.clear()

    def gradient_memory(self) -> list[Tensor | None]:
        return [*(shard.param.grad for shard in self.trained), *(bucket.flat for bucket in self._buckets)]

    def close(self) -> None:
        self.clear_gradients(self.trained)
        self._views.clear()
        for bucket in self._buckets:
            bucket.close()

    @torch.no_grad()
    def publish(self, shards: Sequence[Shard]) -> None:
        with_masters = [shard for shard in shards if shard.local is not shard.param]
        if with_masters:
            torch._foreach_copy_([shard.param for shard in with_masters], [shard.local for shard in with_masters])

    def gather(self, shard: Shard, part: Tensor, writer: int | None = None) -> Tensor | None:
        if self._experts.is_expert_weight(shard.spec):
            return self._experts.gather(shard, part, writer)
        return part if writer in (None, self._rank) else None

    def worker_of(self, data_rank: int) -> int | None:
        return data_rank

    def scatter(self, shard: Shard, full: Tensor | None, source: int) -> Tensor:
        if self._experts.is_expert_weight(shard.spec):
            return self._experts.scatter(shard, full, source)
        part = torch.empty_like(shard.local) if full is None else full.contiguous()
        if self._group is not None:
            dist.broadcast(part, self._members[source], group=self._group)
        return part


class GradientBucket:
    """Holds the fp32 gradients of some parameters in one flat buffer, summed over a step's micro-batches.

    group: of the ranks over which gradients are summed. on_arrival: called each time a gradient has been
    added.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        group: dist.ProcessGroup | None,
        device: torch.device,
        on_arrival: Callable[[], None],
    ) -> None:
        self.group, self._params = group, params
        sizes = [param.numel() for param in params]
        self.flat = torch.zeros(sum(sizes), device=device)
        parts = self.flat.split(sizes)
        self.views = [part.view(param.shape) for param, part in zip(params, parts, strict=True)]
        self._empty = [True] * len(sizes)  # nothing has been added in this step
        self._missing, self._on_arrival = len(sizes), on_arrival
        hooks = [partial(self._take, i) for i in range(len(sizes))]
        self._hooks = [p.register_post_accumulate_grad_hook(hook) for p, hook in zip(params, hooks, strict=True)]

    def begin_micro_batch(self) -> None:
        self._missing = len(self.views)

    @property
    def is_full(self) -> bool:
        """Whether the gradients of all parameters have been added in this micro-batch."""
        return self._missing == 0

    def _take(self, i: int, param: Tensor) -> None:
        if param.grad is None:  # it is left for later (`DeferredGradients`)
            return
        if self._empty[i]:
            self.views[i].copy_(param.grad)
            self._empty[i] = False
        else:
            self.views[i].add_(param.grad)
        param.grad = None
        self._missing -= 1
        self._on_arrival()

    def zero_empty(self) -> None:
        """Set gradients that no micro-batch of this step has given to zero; other data ranks may have
        values."""
        for i, view in enumerate(self.views):
            if self._empty[i]:
                view.zero_()

    def reduced(self) -> dict[nn.Parameter, Tensor]:
        """Sum the gradients over the ranks of `group`, and return them by parameter."""
        self.zero_empty()
        if self.group is not None and self._params:
            dist.all_reduce(self.flat, group=self.group)
        return dict(zip(self._params, self.views, strict=True))

    def clear(self) -> None:
        self._empty = [True] * len(self.views)

    def close(self) -> None:
        """Remove the hooks from the parameters, and free the buffer."""
        for hook in self._hooks:
            hook.remove()
        self.views, self.flat = [], self.flat.new_empty(0)
