"""Implements the training engine that runs DeepSpeed.

`pipe_parallel_size` 0 and 1 use DeepSpeed's engine without pipelines and ZeRO 0 to 3. Larger sizes use its
pipeline engine and ZeRO 0 or 1. Features that DeepSpeed computes wrongly or refuses are not used:
- ZeRO 0 with pipelines or 16-bit weights runs on the stage-1 optimizer and gives the same numbers.
  DeepSpeed's stage 0 would clip wrongly by 15 to 33 %, or refuse.
- Activations between stages are never sharded over tensor ranks, which is silently wrong with sequence
  parallelism.
"""

import contextlib
import io
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import version
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.tensor_fragment import fragment_address
from deepspeed.utils.timer import NoopTimer
from torch import Tensor, nn

from megatron.checkpointing import OpenCheckpoint, load_tensors
from megatron.data import Batch
from megatron.model import Stage, init_stage
from megatron.model.init import initial_part, parameters_with_specs, stage_parameters
from megatron.model.quantized import quantized_memory, take_quantized
from megatron.mpu import DTYPES, ParallelGroups, is_never_trained
from megatron.neox_arguments import NeoXArgs
from megatron.objectives import Objective
from megatron.training.deepspeed.attach import attach_deepspeed, name_device, plain_mpu, shard_at_once
from megatron.training.deepspeed.config import deepspeed_config, zero_stage_used
from megatron.training.deepspeed.hooks import guard_steps, judge_steps
from megatron.training.deepspeed.optimizer_parts import OptimizerParts, owned_parameters
from megatron.training.deepspeed.optimizers import build_sharded_optimizer, fitting_state, on_cpu_adam
from megatron.training.deepspeed.pipeline import PipeStage, truncate_backward, wrap_pipeline
from megatron.training.deepspeed.private_names import check_deepspeed
from megatron.training.engine import Engine, HostCopy, OnGradients, Parts, State, StepResult
from megatron.training.optimizers import clip_gradients, gradient_norm, leave_out, set_learning_rate, state_tensors
from megatron.training.weight_copies import copy_name, quantized_copies

_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class DeepSpeedEngine(Engine):
    """The `Engine` that runs DeepSpeed, in any parallel layout."""

    name = "deepspeed"

    def __init__(self, args: NeoXArgs, groups: ParallelGroups, stage: Stage, objective: Objective) -> None:
        self.args, self.groups, self._stage, self.objective = args, groups, stage, objective
        self.dtype = DTYPES[args.params_dtype]
        self.zero_stage = zero_stage_used(args)
        self._pipe_shape: torch.Size | None = None
        attach_deepspeed()
        name_device(groups.device)
        config = deepspeed_config(args)
        is_verbose = config.get("dump_state") or "comms_logger" in config
        for log in (deepspeed.utils.logger, *deepspeed.utils.logger.handlers):
            log.setLevel(logging.INFO if is_verbose and groups.world_rank == 0 else logging.ERROR)
        mpu = plain_mpu(groups) if groups.size("pipe") == 1 else None
        take_over = shard_at_once(config, mpu) if self.zero_stage == 3 else None
        init_stage(stage, args, groups, self.dtype, take_over, precise=False)  # its trained weights have one dtype
        trained_params = {name.removeprefix("layers."): p for name, p in stage.named_parameters() if p.requires_grad}
        self._watch_losses(list(trained_params))
        self.watch.watch(list(trained_params.values()))
        self._on_gradients: OnGradients | None = None
        self._params = stage_parameters(stage)
        optimizer = build_sharded_optimizer(stage, args, groups)
        ordered = [param for group in optimizer.param_groups for param in group["params"]]
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._pipe: PipeStage | None = None
            if groups.size("pipe") > 1:
                self._pipe, module = wrap_pipeline(stage, self._loss, groups, args, ordered)
            self._mark()
            self._ds = deepspeed.initialize(
                model=stage if self._pipe is None else module,
                optimizer=optimizer,
                config=config,
                mpu=mpu,
                dist_init_required=False,
            )[0]
        self._scaler = self._ds.optimizer.loss_scaler if self.dtype == torch.float16 else None
        if isinstance(self._scaler, DynamicLossScaler):
            # Else it would raise at its smallest scale, before the loop has counted the overflows NeoX
            # allows.
            self._scaler.raise_error_at_min_scale = False
        if self.spikes is not None:
            guard_steps(self._ds, optimizer, self.spikes, self._loss_so_far)
        if self.zero_stage > 0:  # installed after the guard, so that the verdict is set when the guard runs
            judge_steps(self._ds, self.watch.verdict, self._judge)
        for param in stage.parameters():
            if is_never_trained(param):  # DeepSpeed casts whole modules; these must be fp32
                param.data = param.data.float()
        if self._pipe is not None:
            self._ds.timers = NoopTimer()  # DeepSpeed's timers leak two CUDA events a step unless it prints them
            truncate_backward(self._ds, stage, ordered)
        items = {id(item[2]): item for item in self._params}
        trained = [items[id(p)] for p in ordered if id(p) in items]  # the others are placeholders
        owned = owned_parameters(stage, args, groups, self.zero_stage)
        self._parts = OptimizerParts(trained, owned, self._ds.optimizer, groups, self.dtype, self.zero_stage)
        if self.dtype != torch.float32:
            self._master_from_init()

    @staticmethod
    def check(args: NeoXArgs) -> None:
        check_deepspeed()
        deepspeed_config(args)

    @staticmethod
    def notes(args: NeoXArgs) -> list[str]:
        stage_1 = "ZeRO 0 with pipelines or 16-bit weights runs on the stage-1 optimizer (same numbers)"
        stage_notes = [stage_1] if zero_stage_used(args) != args.zero_stage else []
        if args.state_blocks and args.mamba_selective_fp32_params and args.params_dtype != "fp32":
            masters = f"A_log and D have fp32 masters, and are rounded to {args.params_dtype} where they are read"
            stage_notes.append(f"mamba_selective_fp32_params: {masters}; engine: native keeps them in fp32")
        return [*stage_notes, "optimizer: DeepSpeedCPUAdam (AdamW on the CPU)"] if on_cpu_adam(args) else stage_notes

    def _mark(self) -> None:
        """Set the attributes by which DeepSpeed's gradient norm counts each parameter once. Call it after
        PipelineModule, which clears them."""
        for _, _, param, spec in parameters_with_specs(self.stage, self.args):
            param.tensor_model_parallel = spec.axis is not None and self.groups.size("tensor") > 1  # type: ignore[attr-defined]
            param.ds_pipe_replicated = not spec.is_first_copy(self.groups)  # type: ignore[attr-defined]

    # -- steps -----------------------------------------------------------------------------------------------

    def train_step(self, batches: list[Batch], lr: float, on_gradients: OnGradients | None = None) -> StepResult:
        self._on_gradients = on_gradients
        batches = self.complete(batches)
        self._count_micro_batches(len(batches))
        weight = self._begin_losses(batches)
        scaler_before = {} if self._scaler is None else dict(vars(self._scaler))
        # DeepSpeed averages over micro-batches and data ranks. Undo both, and divide by the step's weight.
        scale = self.loss_factor(len(batches)) / weight.clamp(min=1.0)
        set_learning_rate(self._ds.optimizer, lr)
        self._loss.begin(scale)
        # DeepSpeed averages the gradients of balancing losses over data ranks too. It applies the mean over
        # micro-batches and the loss scale only to the loss that it gets, so they are applied here.
        self._begin_balance(batches, (self._loss_scale or 1.0) / len(batches))
        loss = self._pipe_step(batches) if self._pipe is not None else self._plain_step(batches)
        spike = self.spikes is not None and self.spikes.skips
        norm: Tensor | float | None
        skipped: Tensor | bool
        untrained: Tensor | bool
        if self.zero_stage == 0:
            skipped, untrained = ~self._norm.isfinite(), ~weight.any()
            norm = torch.where(untrained, 0.0, self._norm)
        else:  # DeepSpeed has waited for the device already
            norm, skipped = self._ds.get_global_grad_norm(), bool(self._ds.optimizer.overflow)
            untrained = skipped and not bool(weight.any())
            if untrained:
                norm = 0.0
            if untrained and self._scaler is not None:
                vars(self._scaler).update(scaler_before)  # undo: DeepSpeed counted this step as an overflow
        left_out = skipped | untrained | spike
        if not isinstance(left_out, Tensor):
            left_out = torch.full((), left_out, device=self.groups.device)
        self._end_step(left_out)
        finding = self.watch.end(skipped, untrained)
        return StepResult(
            loss, norm, skipped, spike, self._mean_metrics(), untrained, self._loss_scale, finding, self._loss.rows
        )  # fmt: skip

    def loss_factor(self, micro_batches: int) -> int:
        return micro_batches * self.groups.size("data")

    def _count_micro_batches(self, number: int) -> None:
        """Tell DeepSpeed how many micro-batches this step has, which may differ from step to step."""
        if number != self._ds.gradient_accumulation_steps():
            rows = self._ds.train_micro_batch_size_per_gpu() * self.groups.size("data")
            self._ds.set_train_batch_size(number * rows)
            self._ds.micro_steps = 0  # DeepSpeed takes a step if this is a multiple of the number

    @property
    def _loss_scale(self) -> float | None:
        return float(self._ds.optimizer.loss_scale) if self.dtype == torch.float16 else None

    def _plain_step(self, batches: list[Batch]) -> Tensor:
        self._ds.train()
        self._total = torch.zeros((), device=self.groups.device)
        for i, batch in enumerate(batches):
            loss = self._ds(None, batch, partial(self._loss.scaled_loss, batch=batch))
            self._total += loss.detach()
            self._ds.backward(loss)
            if self.zero_stage == 0 and i == len(batches) - 1:
                self._clip_or_drop()
            self._ds.step()
        return self._mean_loss(self._total)

    def _judge(self) -> None:
        """Between backward and update, check gradients for NaN and Inf on all ranks, and pass them to
        callbacks."""
        self.watch.judge()
        if self._on_gradients is not None:
            self._on_gradients(self._parts.gradients(self._loss_scale or 1.0))

    def _clip_or_drop(self) -> None:
        """Clip gradients, or drop them if one is not finite. With ZeRO, DeepSpeed's optimizers do this
        themselves."""
        self._judge()
        sharded: list[nn.Parameter] = []
        replicated: list[nn.Parameter] = []
        for _, _, param in self._params:
            (sharded if param.tensor_model_parallel else replicated).append(param)  # type: ignore[attr-defined]
        self._norm = gradient_norm(sharded, replicated, self.groups) + self.watch.verdict
        if self.args.gradient_clipping > 0.0:
            clip_gradients([*sharded, *replicated], self._norm, self.args.gradient_clipping)
        leave_out(self._ds.optimizer, [*sharded, *replicated], ~self._norm.isfinite())

    def _loss_so_far(self) -> float:
        """Returns the step's loss before its update, the same on every rank.

        It is NaN for a step that is skipped anyway, because no token is trained or a value is not finite.
        """
        loss = torch.zeros((), device=self.groups.device)
        if self._pipe is None or self.groups.is_last_stage:
            loss = self._mean_loss(self._total if self._pipe is None else self._ds.total_loss)
        return float(self.groups.from_last_stage(loss) + self.watch.verdict)

    def _mean_loss(self, total: Tensor) -> Tensor:
        """Returns the step's loss. total: this rank's sum of micro-batch losses.

        Each of them is scaled for DeepSpeed's means over micro-batches and data ranks, which are applied
        here.
        """
        mean = total.detach() / (self._ds.gradient_accumulation_steps() * self.groups.size("data"))
        return self.groups.sum(mean, "data")

    def _pipe_step(self, batches: list[Batch]) -> Tensor:
        assert self._pipe is not None
        self._pipe.batches = iter(batches)
        if self._pipe_shape != batches[0].tokens.shape:
            self._pipe_shape = batches[0].tokens.shape
            self._ds.reset_activation_shape()  # with a curriculum stages tell each other the new shape
        dummy = torch.zeros((), device=self.groups.device)
        return self._ds.train_batch(iter([(dummy, dummy)] * len(batches)))

    # -- weights ---------------------------------------------------------------------------------------------

    def _master_from_init(self) -> None:
        # DeepSpeed makes fp32 master weights from rounded 16-bit ones. Set them to the fp32 initial values.
        for layer, _, param, spec in parameters_with_specs(self.stage, self.args):
            if param.requires_grad:
                for start, rows in initial_part(spec, layer, self.args, self.groups):
                    self._parts.set_master(param, start * rows[0].numel(), rows)

    @torch.no_grad()
    def set_weights(self, weights: Mapping[int, Mapping[str, Tensor]]) -> None:
        weights = take_quantized(self.stage, weights)
        for layer, name, param in self._params:
            if name not in weights.get(layer, {}):
                continue
            value = weights[layer][name].to(self.groups.device)
            with self._gathered([param], modifier_rank=0):
                param.data.copy_(value)
            if param.requires_grad:
                self._parts.set_master(param, 0, value)

    @torch.no_grad()
    def weights(self, *, master: bool = False) -> dict[int, dict[str, Tensor]]:
        layer_weights: dict[int, dict[str, Tensor]] = {}
        for layer, name, param in stage_parameters(self.stage, copies=True):
            with self._gathered([param]):
                has_master = master and self.zero_stage > 0 and param.requires_grad
                value = safe_get_full_fp32_param(param) if has_master else param
                layer_weights.setdefault(layer, {})[name] = value.detach().to("cpu", copy=True)
        return layer_weights

    def _gathered(self, params: list[nn.Parameter], modifier_rank: int | None = None) -> Any:
        if self.zero_stage < 3:
            return contextlib.nullcontext()
        return deepspeed.zero.GatheredParameters(params, modifier_rank=modifier_rank)

    # -- checkpoints -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def gather_weights(
        self, writer_of: Mapping[int, int], copy: HostCopy, name_filter: Callable[[str], bool] | None = None
    ) -> Iterator[tuple[int, dict[str, Tensor]]]:
        params = stage_parameters(self.stage, copies=True)
        for layer, writer in writer_of.items():
            is_writer, tensors = writer == self.groups.rank("data"), {}
            for param_layer, name, param in params:
                if param_layer == layer and (name_filter is None or name_filter(name)):
                    with self._gathered([param]):
                        if is_writer:
                            tensors[name] = copy(param)
            if is_writer:
                yield layer, tensors

    def gather_state(self, writer_of: Mapping[int, int], copy: HostCopy) -> Iterator[tuple[int, dict[str, State]]]:
        return self._parts.gather(writer_of, copy)

    def restore_state(self, read: Callable[[int, str], State]) -> None:
        self._parts.restore(read)

    def model_state(self) -> dict[str, Any]:
        """Returns DeepSpeed's entries of the file `mp_rank_RR_model_states.pt`, `loss_scaler` and
        `spike_window`.

        They hold no weights, and the optimizer's state only without ZeRO. `loss_scaler` is {} except in fp16.
        """
        state = self._ds._common_checkpoint_state(None, self.zero_stage > 0, False)
        scaler = {key: getattr(self._scaler, key) for key in _SCALER if hasattr(self._scaler, key)}
        window = self.spikes.state() if self.spikes is not None else []
        return {**state, "loss_scaler": scaler, "spike_window": window}

    def load_model_state(self, state: Mapping[str, Any]) -> None:
        super().load_model_state(state)
        self._ds.global_steps, self._ds.global_samples = state["iteration"], state["consumed_samples"]
        self._ds.skipped_steps = state["skipped_steps"]
        for key, value in state.get("loss_scaler", {}).items():
            if hasattr(self._scaler, key):
                setattr(self._scaler, key, value)

    def layout_state(self) -> dict[str, Any] | None:
        """Returns the content of this rank's file `*zero_pp_rank_D_mp_rank_RR_optim_states.pt`; None without
        ZeRO."""
        if self.zero_stage == 0:
            return None
        return {
            "optimizer_state_dict": self._ds.optimizer.state_dict(),
            "ds_config": self._ds.config,
            "ds_version": version("deepspeed"),
        }

    def load_layout_state(self, state: Mapping[str, Any], checkpoint: OpenCheckpoint, name: str) -> None:
        """Restore this rank's optimizer state and fp32 master weights from a checkpoint of the same layout.

        Without ZeRO it is in `state`, the model file; with ZeRO in the checkpoint's file `name`.
        """
        optimizer = self._ds.optimizer
        if self.zero_stage == 0:
            optimizer.load_state_dict(fitting_state(state["optimizer"], optimizer))
            return
        safe = (fragment_address, ZeroStageEnum, LossScaler, DynamicLossScaler)
        saved = load_tensors(checkpoint.file(name), extra_safe=safe)["optimizer_state_dict"]
        base = "optimizer_state_dict" if self.zero_stage == 3 else "base_optimizer_state"
        everyone: list[Any] = [None] * self.groups.size("data")
        everyone[self.groups.rank("data")] = {**saved, base: fitting_state(saved[base], optimizer.optimizer)}
        optimizer.load_state_dict(
            state_dict_list=everyone,
            load_optimizer_states=True,
            load_from_fp32_weights=True,
            checkpoint_folder=None,
            load_serial=None,
            param_shapes=self._ds._get_zero_param_shapes(),
        )

    def tensors(self) -> dict[str, list[Tensor]]:
        params = [getattr(param, "ds_tensor", param) for param in self.stage.parameters()]
        params += quantized_memory(self.stage)
        optimizer = getattr(self._ds.optimizer, "optimizer", self._ds.optimizer)
        masters = [param for group in optimizer.param_groups for param in group["params"]]
        gradients = [param.grad for param in (*self.stage.parameters(), *masters) if param.grad is not None]
        states = [*masters, *state_tensors(optimizer.state)]
        return {"weights": params, "gradients": gradients, "optimizer states": states}

    def weight_copies(self) -> dict[str, Tensor]:
        copies = quantized_copies(self.stage, self.args, self.groups)
        if self.zero_stage == 3:  # all others are sharded
            return copies
        for layer, _, param, spec in parameters_with_specs(self.stage, self.args):
            start = spec.expert_rows(self.groups)[0] * math.prod(param.shape[1:])
            copies[copy_name(layer, spec, self.groups, start, param.numel())] = param
        return copies

    def sharded_weights(self) -> Parts:
        return self._parts.weights()

    def sharded_states(self) -> dict[str, Parts]:
        return self._parts.states()

    def close(self) -> None:
        if deepspeed.comm.comm.comms_logger.enabled:
            if self.groups.world_rank == 0:
                deepspeed.comm.comm.comms_logger.log_all()
            deepspeed.comm.configure(enabled=False)
        self._ds.destroy()
