"""Implements the native engine, which trains with torch alone, in any parallel layout."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.checkpointing import AVERAGE, MASTER, CheckpointError, OpenCheckpoint
from megatron.data import Batch
from megatron.model import Stage
from megatron.model.init import stage_parameters
from megatron.model.quantized import quantized_memory, take_quantized
from megatron.mpu import DTYPES, ParallelGroups
from megatron.neox_arguments import ConfigError, ModelArgs, NeoXArgs
from megatron.objectives import Objective
from megatron.training.engine import Engine, HostCopy, OnGradients, Parts, State, StepResult
from megatron.training.native.fully_sharded import ShardedWeights
from megatron.training.native.limits import idle_keys, layout_problems, limits, native_only_feature
from megatron.training.native.loss_scaler import LossScaler
from megatron.training.native.pipeline import Pipeline
from megatron.training.native.pipeline_schedule import schedule_problems
from megatron.training.native.shards import GradientPass, ReplicatedWeights, Shard, Weights
from megatron.training.native.update import Update
from megatron.training.offload import offload_problems, offloads_optimizer
from megatron.training.optimizers import state_tensors
from megatron.training.weight_copies import copy_name, quantized_copies


class NativeEngine(Engine):
    """The `Engine` that uses autograd, torch's `fully_shard` and a torch optimizer.

    The host does not wait for the device between two logged steps, except with `skip_step_above_sigma`, which
    reads each step's loss, and with `offload_optimizer`, which needs gradients and their norm on the host.
    """

    name = "native"

    def __init__(self, args: NeoXArgs, groups: ParallelGroups, stage: Stage, objective: Objective) -> None:
        self.args, self.groups, self._stage, self.objective = args, groups, stage, objective
        self.dtype = DTYPES[args.params_dtype]
        self.zero_stage = args.zero_stage if groups.size("data_context") > 1 or offloads_optimizer(args) else 0
        self.shards: Weights
        if self.zero_stage > 0:
            self.shards = ShardedWeights(stage, args, groups, self.dtype, self.zero_stage)
        else:
            self.shards = ReplicatedWeights(stage, args, groups, self.dtype)
        trained = self.shards.trained
        # Taken now, because a stage has other parameter objects while its weights are gathered.
        shard_of = {shard.param: shard for shard in (*trained, *self.shards.frozen)}
        self._shard_of = [(layer, name, shard_of[p]) for layer, name, p in stage_parameters(stage, copies=True)]
        copies = [(i, shard.spec, shard.spec.stages(groups)) for i, shard in enumerate(trained)]
        ordered = sorted(copies, key=lambda copy: not copy[1].tied)  # in one order on all stages
        self._copies = [(i, group) for i, _, group in ordered if group is not None]
        self._pipeline = Pipeline(stage, args, groups, self.dtype)
        self._scaler = LossScaler(args, groups.device) if self.dtype == torch.float16 else None
        self._watch_losses([f"{s.layer}.{s.name}" for s in trained])
        self._update = Update(self.shards, stage, args, groups, self.watch)

    @staticmethod
    def check(args: NeoXArgs) -> None:
        feature = native_only_feature(args)
        fix = "write engine: deepspeed, or remove it"
        if feature is not None:
            fix = f"remove it, or change {feature}, which DeepSpeed does not support"
        problems = [f"{args.origin(limit.key)}: {limit.key} {limit.reason}; {fix}" for limit in limits(args)]
        problems += [*offload_problems(args), *layout_problems(args), *schedule_problems(args)]
        if problems:
            raise ConfigError(problems)

    @staticmethod
    def notes(args: ModelArgs) -> list[str]:
        idle = idle_keys(args)
        return [f"zero_optimization: the native engine ignores {', '.join(idle)}"] if idle else []

    # -- steps -----------------------------------------------------------------------------------------------

    def train_step(self, batches: list[Batch], lr: float, on_gradients: OnGradients | None = None) -> StepResult:
        batches = self.complete(batches)
        weight = self._begin_losses(batches)
        scale = torch.ones((), device=self.groups.device) if self._scaler is None else self._scaler.scale.clone()
        self._loss.begin(scale / weight.clamp(min=1.0))
        if not self._stage.training:
            self._stage.train()
        self._update.begin_step()
        self._begin_balance(batches, scale / (len(batches) * self.groups.size("data")))
        loss = self._pipeline.run(batches, self._loss.scaled_loss, self._begin_gradients, self.shards.end_gradients)
        loss /= scale
        self.finish_update()  # of weights that this step has not used
        gradients = self._summed_over_stages(self.shards.gradients())
        if self._scaler is not None:
            torch._foreach_div_([g for g in gradients if g is not None], scale.to(self.shards.state_device))
        norm = self._update.judge(gradients)
        if on_gradients is not None:
            on_gradients(self._parts(gradients))
        self.groups.from_last_stage(self.groups.sum(loss, "data"))
        if self.spikes is not None:
            self.spikes.decide(float(loss + self.watch.verdict))
        spike = self.spikes is not None and self.spikes.skips
        untrained = ~weight.any()
        skipped = ~norm.isfinite()
        if not spike:
            self._update.step(gradients, norm, skipped, lr)
        else:
            self.shards.clear_gradients(self.shards.trained)
        if self._scaler is not None:
            self._scaler.update(skipped, untrained)
        self._end_step(skipped | untrained | spike)
        finding = self.watch.end(skipped, untrained)
        norm = torch.where(untrained, 0.0, norm)
        new_scale = None if self._scaler is None else self._scaler.scale.clone()
        metrics, rows = {**self._mean_metrics(), **self._update.metrics}, self._loss.rows
        return StepResult(loss, norm, skipped, spike, metrics, untrained, new_scale, finding, rows)

    def _begin_gradients(self, gradient_pass: GradientPass) -> None:
        self.shards.begin_gradients(gradient_pass)
        self.finish_update()  # of weights that no forward has used, before their gradients arrive

    def _summed_over_stages(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Sum the gradients of weights of which several pipeline stages hold a copy, such as tied embeddings.

        gradients: one for each trained shard. A stage may have none for its copy, but the others need it.
        """
        for i, group in self._copies:
            gradient = gradients[i]
            gradient = torch.zeros_like(self.shards.trained[i].local) if gradient is None else gradient
            summed = gradient.to(self.groups.device)
            dist.all_reduce(summed, group=group)
            gradients[i] = summed.to(self.shards.state_device)
        return gradients

    def finish_update(self) -> None:
        self._update.finish()

    # -- weights ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def set_weights(self, weights: Mapping[int, Mapping[str, Tensor]]) -> None:
        weights, shards = take_quantized(self.stage, weights), [*self.shards.trained, *self.shards.frozen]
        for shard in shards:
            if shard.name in weights.get(shard.layer, {}):
                shard.local.copy_(shard.slice_of(weights[shard.layer][shard.name]))
        self.shards.publish(shards)

    @torch.no_grad()
    def weights(self, *, master: bool = False) -> dict[int, dict[str, Tensor]]:
        self.finish_update()
        layer_weights: dict[int, dict[str, Tensor]] = {}
        for layer, name, shard in self._shard_of:
            dtype = torch.float32 if master and shard.local.requires_grad else shard.dtype(self.dtype)
            full = self.shards.gather(shard, shard.local.detach().to(dtype))
            assert full is not None
            layer_weights.setdefault(layer, {})[name] = full.to("cpu", copy=True)
        return layer_weights

    def _average(self, shard: Shard) -> Tensor | None:
        """Returns the average of a weight, which is the weight itself before the first step.

        None without `ema_decay`."""
        if self.args.ema_decay is None:
            return None
        return self._update.averages.get(shard.local, shard.local.detach())

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        self.finish_update()
        self._exchange_averages()
        try:
            yield
        finally:
            self._exchange_averages()

    @torch.no_grad()
    def _exchange_averages(self) -> None:
        """Exchange weights and their averages, one weight at a time."""
        for weight, average in self._update.averages.items():
            value = weight.detach().clone()
            weight.copy_(average)
            average.copy_(value)
        self.shards.publish(self.shards.trained)

    def weight_copies(self) -> dict[str, Tensor]:
        self.finish_update()
        copies = quantized_copies(self._stage, self.args, self.groups)
        for shard in (*self.shards.trained, *self.shards.frozen):
            if shard.local.numel() == 0:  # more ranks than rows
                continue
            name = copy_name(shard.layer, shard.spec, self.groups, shard.start, shard.local.numel())
            copies[name] = shard.local
            if self.zero_stage == 0 and shard.local is not shard.param:
                copies[f"{name}, {self.args.params_dtype}"] = shard.param
        return copies

    # -- checkpoints -----------------------------------------------------------------------------------------

    def gather_weights(
        self, writer_of: Mapping[int, int], copy: HostCopy, name_filter: Callable[[str], bool] | None = None
    ) -> Iterator[tuple[int, dict[str, Tensor]]]:
        for layer, worker, writes in self._written_layers(writer_of):
            tensors: dict[str, Tensor] = {}
            for shard_layer, name, shard in self._shard_of:
                if shard_layer == layer and (name_filter is None or name_filter(name)):
                    full = self.shards.gather(shard, shard.local.detach().to(shard.dtype(self.dtype)), worker)
                    if full is not None:
                        tensors[name] = copy(full)
            if writes:
                yield layer, tensors

    def gather_state(self, writer_of: Mapping[int, int], copy: HostCopy) -> Iterator[tuple[int, dict[str, State]]]:
        """Yields (layer, optimizer state by parameter name) for each layer that this data rank writes.

        At any time a rank holds one such layer at most, and one full parameter on its device.
        """
        for layer, worker, writes in self._written_layers(writer_of):
            states = {s.name: self._full_state(s, worker, copy) for s in self.shards.trained if s.layer == layer}
            if writes:
                yield layer, states

    def _written_layers(self, writer_of: Mapping[int, int]) -> Iterator[tuple[int, int, bool]]:
        """Yields (layer, number of the worker that writes it, whether that is this rank) for each layer to
        write.

        Layers whose writer is not in this rank's group of workers are left out. The last step's update is
        completed first.
        """
        self.finish_update()
        for layer, writer in writer_of.items():
            worker = self.shards.worker_of(writer)
            if worker is not None:
                yield layer, worker, worker == self.shards.workers[0]

    def _full_state(self, shard: Shard, worker: int, copy: HostCopy) -> State:
        """Returns the optimizer state of a parameter's tensor-parallel part, gathered over data ranks.

        Only the data rank with the number `worker` gets it; others get {}.
        """
        is_worker, full = worker == self.shards.workers[0], {}
        state = self._update.state.get(shard.local, {})
        parts = {MASTER: shard.local.detach()} if self.dtype != torch.float32 else {}
        parts |= {AVERAGE: average} if (average := self._average(shard)) is not None else {}
        parts |= {key: value for key, value in state.items() if isinstance(value, Tensor) and value.dim() > 0}
        for key, part in parts.items():
            value = self.shards.gather(shard, part, worker)
            if is_worker:
                assert value is not None
                full[key] = copy(value)
        if is_worker and "step" in state:
            full["step"] = copy(state["step"])
        return full

    @torch.no_grad()
    def restore_state(self, read: Callable[[int, str], State]) -> None:
        self.finish_update()
        self._update.averages.clear()
        for shard in self.shards.trained:
            state = dict(read(shard.layer, shard.name))
            if (average := state.pop(AVERAGE, None)) is not None:
                self._update.averages[shard.local] = shard.slice_of(average).to(
                    shard.local.device, torch.float32, copy=True
                )
            if state:
                self._update.state[shard.local] = {
                    key: value.to(shard.local.device, torch.float32, copy=True)
                    if key == "step"
                    else shard.slice_of(value).to(shard.local.device, copy=True)
                    for key, value in state.items()
                }

    def model_state(self) -> dict[str, Any]:
        window = self.spikes.state() if self.spikes is not None else []
        scaler = {} if self._scaler is None else self._scaler.state()
        # GPT-NeoX's files have the first two entries; weights and moments are in separate files.
        return {"module": None, "optimizer": None, "loss_scaler": scaler, "spike_window": window}

    def load_model_state(self, state: Mapping[str, Any]) -> None:
        super().load_model_state(state)
        if self._scaler is not None:
            self._scaler.restore(state.get("loss_scaler", {}))

    def load_layout_state(self, state: Mapping[str, Any], checkpoint: OpenCheckpoint, name: str) -> None:
        raise CheckpointError(
            f"{checkpoint.path}: its optimizer state is in DeepSpeed's format, which the native engine cannot read; "
            "resume with engine: deepspeed, or set no_load_optim: true to resume with the weights only"
        )

    def tensors(self) -> dict[str, list[Tensor]]:
        parts = [self.tensors_of(shard) for shard in (*self.shards.trained, *self.shards.frozen)]
        weights, states = ([t for part in parts for t in part[name]] for name in ("weights", "optimizer states"))
        gradients = [gradient for gradient in self.shards.gradient_memory() if gradient is not None]
        return {
            "weights": [*weights, *quantized_memory(self._stage)], "gradients": gradients, "optimizer states": states
        }  # fmt: skip

    def chunk_of(self, stage: int) -> int:
        """Returns which of this rank's chunks a pipeline stage is."""
        return self._pipeline.chunk_of[stage]

    def tensors_of(self, shard: Shard) -> dict[str, list[Tensor]]:
        """Returns the memory that one parameter takes between steps, without its gradient."""
        is_sharded = self.zero_stage > 0
        masters = [] if is_sharded or shard.local is shard.param else [shard.local]
        states = state_tensors({shard.local: self._update.state.get(shard.local, {})})
        averages = [self._update.averages[shard.local]] if shard.local in self._update.averages else []
        weights: list[Tensor] = [shard.local if is_sharded else shard.param]
        return {"weights": weights, "optimizer states": [*masters, *states, *averages]}

    def _parts(self, tensors: list[Tensor | None]) -> Parts:
        """Returns those of `tensors` that count on this rank, so that each element counts once over all
        ranks.

        tensors: one for each trained shard; None for a shard that has none. Each comes with (layer, name).
        """
        pairs = zip(self.shards.trained, tensors, strict=True)
        return [((s.layer, s.name), t.detach()) for s, t in pairs if t is not None and s.is_first_copy(self.groups)]

    def sharded_weights(self) -> Parts:
        self.finish_update()
        return self._parts([shard.local for shard in self.shards.trained])

    def sharded_states(self) -> dict[str, Parts]:
        self.finish_update()
        states = [dict(self._update.state.get(shard.local, {})) for shard in self.shards.trained]
        for shard, state in zip(self.shards.trained, states, strict=True):
            if (average := self._average(shard)) is not None:
                state[AVERAGE] = average
        keys = [key for state in states for key, value in state.items() if key != "step"]
        return {key: self._parts([state.get(key) for state in states]) for key in dict.fromkeys(keys)}

    def close(self) -> None:
        self.finish_update()
        self._update.close()
        self.shards.close()
