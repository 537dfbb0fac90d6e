"""Shards weights over data ranks by torch's `fully_shard` (FSDP2), like stages 1 to 3 of ZeRO."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megatron.model import Stage, init_stage
from megatron.model.init import parameters_with_specs
from megatron.model.moe.experts import Experts
from megatron.mpu import ParallelGroups, ParamSpec, is_never_trained, is_precise
from megatron.mpu.torch_versions import clear_forward_order, end_backward, ignore_view_warning
from megatron.neox_arguments import NeoXArgs
from megatron.training.native.shards import ExpertParts, GradientBucket, GradientPass, RowParts, Shard
from megatron.training.offload import offload


class ShardedWeights:
    """Holds a stage's weights sharded by rows over data ranks. It implements `Weights`.

    Trained weights are stored as fp32 master weights, others in the run's dtype.

    A block's weights are gathered, in the run's dtype, before the block runs: in stage 3 for each pass, in
    stages 1 and 2 once per step. Its gradients are summed over data ranks in fp32 as soon as backward has
    left the block. Stage 1 sums them only in the last pass of a pipeline stage; until then each rank holds
    full fp32 gradients. Embedding, last norm and head are gathered together. A module that blocks share, such
    as a table of relative positions, is gathered by itself.

    The few parameters that stay fp32 in a 16-bit run (`ParamSpec.precise`) are replicated on every rank.
    Their gradients are summed after the last backward.

    With `offload_optimizer`, these shards, their gradients and optimizer states are in host memory, also on a
    single data rank. A block's shards are copied to the device before they are gathered, and its gradients to
    the host once they are summed.

    With `zero_hpz_partition_size: n`, weights, gradients and states are sharded over groups of n neighbouring
    data ranks. The ranks of a group gather weights among themselves; gradients are also summed over the
    groups.
    """

    def __init__(
        self, stage: Stage, args: NeoXArgs, groups: ParallelGroups, dtype: torch.dtype, zero_stage: int
    ) -> None:
        self._stage, self._zero_stage, self._has_backward = stage, zero_stage, False
        offloaded = offload(args, "offload_optimizer")
        self._is_offloaded = offloaded is not None
        self.state_device = torch.device("cpu") if self._is_offloaded else groups.device
        placement = OffloadPolicy()
        if offloaded is not None:
            pinned = offloaded.get("pin_memory", True) and groups.device.type == "cuda"
            placement = CPUOffloadPolicy(pin_memory=pinned)
        mesh = _mesh(groups, args.zero_optimization["zero_hpz_partition_size"] if zero_stage == 3 else 1)
        self._group = mesh.get_group(-1)
        self._members = dist.get_process_group_ranks(self._group)
        self._rank, self._size = self.workers = (dist.get_rank(self._group), len(self._members))
        self._parts = RowParts(self._group, self._members, self._rank, groups.device, 1, sharded=True)
        self._experts = ExpertParts(groups, sharded=True)
        expert_mesh = _mesh_of(groups, "expert_data") if groups.size("expert") > 1 else None
        self._first_data_rank = groups.rank("data_context") - self._rank  # data rank of this group's first
        # Inputs keep their dtypes, because attention biases may be fp32.
        policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)

        def shard_module(module: nn.Module, over_mesh: DeviceMesh = mesh) -> None:
            ignored = {param for param in module.parameters() if is_never_trained(param) or self._is_replicated(param)}
            fully_shard(
                module, mesh=over_mesh, reshard_after_forward=zero_stage == 3, mp_policy=policy,
                offload_policy=placement, ignored_params=ignored,
            )  # fmt: skip

        blocks = {spec.index for spec in stage.blocks}

        def shard_layer(layer: int, params: list[nn.Parameter]) -> None:
            if layer in blocks:
                block = stage.layers[str(layer)]
                for experts in (module for module in block.modules() if isinstance(module, Experts)):
                    if expert_mesh is not None:
                        shard_module(experts, expert_mesh)
                for module in shared_modules(stage):  # each by itself, because several blocks use it
                    if not isinstance(module, FSDPModule):
                        shard_module(module)
                shard_module(block)
                block_params = set(block.parameters())
                for param in params:  # free the originals, to which `init_stage` refers until its end
                    if param not in block_params:
                        param.data = param.new_empty(0)

        self._dtype = dtype
        init_stage(stage, args, groups, torch.float32, shard_layer, frozen_dtype=dtype)
        shard_module(stage)
        ignore_view_warning()  # of stages with experts, whose balancing losses are attached to hidden states
        stage.dtype = dtype
        self._modules = [module for module in stage.modules() if isinstance(module, FSDPModule)]
        shared = shared_modules(stage)
        # Not of the stage itself and of shared modules, which several stages of the pipeline may use.
        self._layer_of = {
            module: spec.index
            for spec in stage.blocks
            for module in stage.layers[str(spec.index)].modules()
            if isinstance(module, FSDPModule) and module not in shared
        }
        for module in self._modules:
            # Sum over data ranks instead of averaging: `StepLoss` has divided by the weight of all ranks.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        # Maps each weight to the module that gathers it: the innermost module with this weight, which comes
        # last.
        self._gathers = {param: module for module in self._modules for param in module.parameters()}
        shards = [self._shard(*item, groups) for item in parameters_with_specs(stage, args)]
        self.trained = [shard for shard in shards if shard.param.requires_grad]
        self.frozen = [shard for shard in shards if not shard.param.requires_grad]
        replicated = [shard.param for shard in self.trained if not _is_sharded(shard)]
        self._replicated = GradientBucket(replicated, groups.group("data_context"), groups.device, lambda: None)

    def _shard(self, layer: int, _: str, param: nn.Parameter, spec: ParamSpec, groups: ParallelGroups) -> Shard:
        if not spec.trained or self._is_replicated(param):
            local = param
            if self._is_offloaded and param.requires_grad:
                local = nn.Parameter(param.detach().to(self.state_device, copy=True))
            return Shard(layer, spec, param, local, 0, param.shape, groups.rank("data_context"))
        local = nn.Parameter(_local(param), param.requires_grad)
        if self._experts.is_expert_weight(spec):
            return self._experts.shard(layer, spec, param, local, groups)
        start = min(self._rank * self._parts.rows(param.shape), param.shape[0]) * (param.numel() // param.shape[0])
        return Shard(layer, spec, param, local, start, param.shape, groups.rank("data_context") // self._size)

    def _is_replicated(self, param: Tensor) -> bool:
        return is_precise(param) and self._dtype != torch.float32

    def begin_gradients(self, gradient_pass: GradientPass) -> None:
        self._has_backward = True
        for module in self._modules:
            layer = self._layer_of.get(module)
            if layer is None or layer in gradient_pass.layers:
                last = gradient_pass.ends_step if layer is None else gradient_pass.ends_stage
                module.set_requires_gradient_sync(last or self._zero_stage > 1, recurse=False)
                module.set_reshard_after_backward(last or self._zero_stage == 3, recurse=False)
        self._replicated.begin_micro_batch()

    def end_gradients(self, gradient_pass: GradientPass) -> None:
        if gradient_pass.is_deferred:
            assert isinstance(self._stage, FSDPModule)
            end_backward(self._stage)

    def gradients(self) -> list[Tensor | None]:
        for module in self._modules:  # frozen modules have no backward, after which they would be resharded
            module.reshard()
        if not self._has_backward:  # as on a pipeline stage below the lowest trained layer
            clear_forward_order(self._modules)
        self._has_backward = False
        replicated = self._replicated.reduced()
        return [
            replicated[s.param].to(self.state_device) if s.param in replicated else self._gradient(s)
            for s in self.trained
        ]

    def _gradient(self, shard: Shard) -> Tensor | None:
        return None if shard.param.grad is None else _local(shard.param.grad)

    def clear_gradients(self, shards: Sequence[Shard]) -> None:
        for shard in shards:
            shard.param.grad = None
        self._replicated.clear()

    def gradient_memory(self) -> list[Tensor | None]:
        sharded = [self._gradient(shard) for shard in self.trained if _is_sharded(shard)]
        return [*sharded, self._replicated.flat]

    def close(self) -> None:
        self.clear_gradients(self.trained)
        self._replicated.close()

    @torch.no_grad()
    def publish(self, shards: Sequence[Shard]) -> None:
        # After a forward without a backward, stages 1 and 2 still hold the gathered weights.
        modules = [self._gathers[shard.param] for shard in shards if _is_sharded(shard)]
        for module in dict.fromkeys(modules):
            module.reshard()
        for shard in shards:
            if not _is_sharded(shard) and shard.local is not shard.param:
                shard.param.copy_(shard.local)

    @torch.no_grad()
    def gather(self, shard: Shard, part: Tensor, writer: int | None = None) -> Tensor | None:
        if not _is_sharded(shard):
            return part if writer in (None, self._rank) else None
        return self._parts_of(shard).gather(shard, part, writer)

    def _parts_of(self, shard: Shard) -> RowParts:
        return self._experts if self._experts.is_expert_weight(shard.spec) else self._parts

    def worker_of(self, data_rank: int) -> int | None:
        worker = data_rank - self._first_data_rank
        return worker if 0 <= worker < self._size else None

    def scatter(self, shard: Shard, full: Tensor | None, source: int) -> Tensor:
        if not _is_sharded(shard):
            part = torch.empty_like(shard.param) if full is None else full.contiguous()
            dist.broadcast(part, self._members[source], group=self._group)
            return part.to(shard.local.device)
        return self._parts_of(shard).scatter(shard, full, source)


def _mesh(groups: ParallelGroups, neighbours: int) -> DeviceMesh:
    """Returns the device mesh of data ranks for `fully_shard`. All ranks call it together.

    neighbours: 1: a one-dimensional mesh. n: a two-dimensional one, each row of which has n neighbouring
    ranks that shard one copy of the weights.
    """
    if neighbours in (1, groups.size("data_context")):
        return _mesh_of(groups, "data_context")
    grid = torch.tensor(groups.members["data_context"]).view(-1, neighbours)
    row, column = divmod(groups.rank("data_context"), neighbours)
    copies = dist.new_group(grid[:, column].tolist(), use_local_synchronization=True, group_desc="data copies")
    shards = dist.new_group(grid[row].tolist(), use_local_synchronization=True, group_desc="data shards")
    return DeviceMesh.from_group([copies, shards], groups.device.type, mesh=grid, mesh_dim_names=("copies", "shards"))


def _mesh_of(groups: ParallelGroups, axis: str) -> DeviceMesh:
    """Returns the device mesh of the ranks along `axis`, of which there may be one. All ranks call it
    together."""
    members, handle = list(groups.members[axis]), groups.group(axis)
    if handle is None:
        handle = dist.new_group(members, use_local_synchronization=True, group_desc=axis)
    return DeviceMesh.from_group(handle, groups.device.type, mesh=members)


def _is_sharded(shard: Shard) -> bool:
    return isinstance(shard.param, DTensor)


def _local(value: Tensor) -> Tensor:
    """Returns this rank's rows of a parameter or gradient that `fully_shard` has sharded, sharing its
    memory."""
    assert isinstance(value, DTensor)
    with torch.no_grad():
        return value.to_local()


def shared_modules(stage: Stage) -> list[nn.Module]:
    """Returns the modules that several layers share and that have parameters of their own."""
    layers_of: dict[nn.Module, set[str]] = {}
    for index, layer in stage.layers.items():
        for module in layer.modules():
            layers_of.setdefault(module, set()).add(index)
    return [m for m, layers in layers_of.items() if len(layers) > 1 and any(True for _ in m.parameters(recurse=False))]
