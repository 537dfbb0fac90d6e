"""An engine of bare torch, one process, fp32: all that loop, evaluation and checkpoints may ask of any."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.checkpointing import OpenCheckpoint
from megatron.data import Batch
from megatron.model import Stage, forward_only, init_stage
from megatron.model.init import stage_parameters
from megatron.mpu import DTYPES, ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.objectives import Objective, label_logprobs, response_sums
from megatron.training import optimizers
from megatron.training.engine import HostCopy, OnGradients, Parts, State, StepLoss, StepResult
from megatron.training.nonfinite_guard import GradientWatch, most_skips


class BareEngine:
    """`Engine` by autograd and a torch optimizer."""

    name = "bare"
    zero_stage = 0

    def __init__(self, args: NeoXArgs, groups: ParallelGroups, stage: Stage, objective: Objective) -> None:
        assert groups.world_size == 1
        self.args, self.groups, self.stage, self.objective = args, groups, stage, objective
        self.dtype = DTYPES[args.params_dtype]
        init_stage(stage, args, groups, self.dtype)
        self._params = stage_parameters(stage)
        self._trained = [param for _, _, param in self._params if param.requires_grad]
        named_params = [(f"{layer}.{name}", param) for layer, name, param in self._params if param.requires_grad]
        self._watch = GradientWatch([name for name, _ in named_params], groups.device, most_skips(args))
        self._watch.watch([param for _, param in named_params])
        self._loss = StepLoss(objective, groups, self._watch)
        self._optimizer = optimizers.build_optimizer(optimizers.parameter_groups(stage, args), args)
        self._fill: Callable[[list[Batch]], list[Batch]] | None = None

    @staticmethod
    def check(args: NeoXArgs) -> None:
        assert args.params_dtype == "fp32"

    @staticmethod
    def notes(args: NeoXArgs) -> list[str]:
        return ["engine: bare torch"]

    def train_step(self, batches: list[Batch], lr: float, on_gradients: OnGradients | None = None) -> StepResult:
        batches, objective, watch, micro_batches = self.complete(batches), self.objective, self._watch, len(batches)
        weight = torch.stack([objective.weight(batch) for batch in batches]).sum(0)
        watch.begin(weight)
        total = torch.zeros(())
        self._loss.begin(micro_batches / weight.clamp(min=1.0))
        for batch in batches:
            loss = self.stage(None, batch, partial(self._loss.scaled_loss, batch=batch))
            (loss / micro_batches).backward()
            total += loss.detach()
        watch.judge()
        if on_gradients is not None:
            on_gradients([((layer, name), p.grad) for layer, name, p in self._params if p.grad is not None])
        norm = optimizers.gradient_norm([], self._trained, self.groups) + watch.verdict
        skipped, untrained = ~norm.isfinite(), ~weight.any()
        optimizers.clip_gradients(self._trained, norm, self.args.gradient_clipping)
        optimizers.leave_out(self._optimizer, self._trained, skipped)
        optimizers.set_learning_rate(self._optimizer, lr)
        self._optimizer.step()
        self._optimizer.zero_grad()
        means = objective.means(self._loss.metrics) if objective.metrics else {}
        finding = watch.end(skipped, untrained)
        return StepResult(total / micro_batches, norm, skipped, False, means, untrained, None, finding)

    def use_reference(self, fill: Callable[[list[Batch]], list[Batch]] | None) -> None:
        self._fill = fill

    def complete(self, batches: list[Batch]) -> list[Batch]:
        batches = self._fill(batches) if self._fill is not None else batches
        make = self.objective.step_baselines
        return batches if make is None else make(batches, self.scores, None)

    def forward_only(
        self, batches: list[Batch], read: Callable[..., Tensor], shape: Callable[[Batch], tuple[int, ...]]
    ) -> list[Tensor]:
        self.stage.eval()
        outputs = forward_only(self.stage, batches, self.args, self.groups, read, dtype=self.dtype, shape=shape)
        self.stage.train()
        return outputs

    def token_logprobs(self, batches: list[Batch]) -> list[Tensor]:
        read = partial(label_logprobs, group=None, columns=self.args.softmax_rows)
        return self.forward_only(batches, read, lambda batch: tuple(batch.tokens.shape))

    def scores(self, batches: list[Batch]) -> list[Tensor]:
        return [response_sums(v, b) for v, b in zip(self.token_logprobs(batches), batches, strict=True)]

    @torch.no_grad()
    def set_weights(self, weights: Mapping[int, Mapping[str, Tensor]]) -> None:
        for layer, name, param in self._params:
            if name in weights.get(layer, {}):
                param.copy_(weights[layer][name])

    def weights(self, *, master: bool = False) -> dict[int, dict[str, Tensor]]:
        weights_by_layer: dict[int, dict[str, Tensor]] = {}
        for layer, name, param in stage_parameters(self.stage, copies=True):
            weights_by_layer.setdefault(layer, {})[name] = param.detach().clone()
        return weights_by_layer

    def gather_weights(
        self, writer_of: Mapping[int, int], copy: HostCopy, name_filter: Callable[[str], bool] | None = None
    ) -> Iterator[tuple[int, dict[str, Tensor]]]:
        params = [
            item for item in stage_parameters(self.stage, copies=True) if name_filter is None or name_filter(item[1])
        ]
        for layer in writer_of:
            yield layer, {name: copy(param) for param_layer, name, param in params if param_layer == layer}

    def gather_state(self, writer_of: Mapping[int, int], copy: HostCopy) -> Iterator[tuple[int, dict[str, State]]]:
        for layer in writer_of:
            states = {
                name: self._optimizer.state[param] for param_layer, name, param in self._params if param_layer == layer
            }
            yield layer, {name: {key: copy(value) for key, value in state.items()} for name, state in states.items()}

    def restore_state(self, read: Callable[[int, str], State]) -> None:
        for layer, name, param in self._params:
            self._optimizer.state[param] = {key: value.clone() for key, value in read(layer, name).items()}

    def model_state(self) -> dict[str, Any]:
        return {"loss_scaler": {}, "spike_window": []}

    def load_model_state(self, state: Mapping[str, Any]) -> None:
        pass  # fp32, and no guard against spikes

    def layout_state(self) -> dict[str, Any] | None:
        return None

    def load_layout_state(self, state: Mapping[str, Any], checkpoint: OpenCheckpoint, name: str) -> None:
        raise AssertionError("all its state is kept by parameter")

    def tensors(self) -> dict[str, list[Tensor]]:
        params = list(self.stage.parameters())
        gradients = [param.grad for param in params if param.grad is not None]
        states = optimizers.state_tensors(self._optimizer.state)
        return {"weights": list[Tensor](params), "gradients": gradients, "optimizer states": states}

    def sharded_weights(self) -> Parts:
        return [((layer, name), param.detach()) for layer, name, param in self._params]

    def sharded_states(self) -> dict[str, Parts]:
        return {
            key: [((layer, name), self._optimizer.state[param][key]) for layer, name, param in self._params]
            for key in ("exp_avg", "exp_avg_sq")
            if self._optimizer.state
        }

    def close(self) -> None:
        self._optimizer.state.clear()
