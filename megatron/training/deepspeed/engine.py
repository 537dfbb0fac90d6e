"""The training engine: DeepSpeed behind one small class.

Pipe 0 and 1 use DeepSpeed's plain engine with ZeRO 0-3, pipe > 1 its pipeline engine with ZeRO 0/1. What DeepSpeed
does wrong or refuses is kept away from it: ZeRO 0 with pipelines or 16-bit weights runs on the stage-1 optimizer
(the same numbers; DeepSpeed's own clips wrongly by 15-33 % or refuses), activations between stages are never cut over
tensor ranks (silently wrong under sequence parallelism), and every value that matters is passed explicitly.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.pipe.module import LayerSpec as EmptyStage
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from torch import Tensor, nn

from megatron.checkpointing import restore_rng, rng_state
from megatron.data import Batch
from megatron.model import Model, Stage, for_inference, forward_only, layer_params, reading, shard
from megatron.model.init import initial_value, stage_parameters
from megatron.mpu import DTYPES, HeadInput, ParallelGroups, together_local
from megatron.neox_arguments import NeoXArgs
from megatron.objectives import Objective, answer_sums, label_logprobs
from megatron.tokenizer import Tokenizer
from megatron.training.deepspeed.attach import PlainMpu, attach_deepspeed
from megatron.training.deepspeed.config import deepspeed_config, zero_stage_used
from megatron.training.deepspeed.files import CheckpointEngine
from megatron.training.deepspeed.owned import OwnedParts
from megatron.training.deepspeed.pipeline import PipeStage, TiedPipelineModule, cut_backward
from megatron.training.deepspeed.state import EngineState
from megatron.training.engine import StepResult
from megatron.training.guards import GradientWatch, SpikeGuard
from megatron.training.optimizers import (
    assert_same_groups,
    build_optimizer,
    clip_gradients,
    gradient_norm,
    set_learning_rate,
)
from megatron.training.step_loss import StepLoss


class Engine:
    """A model under training in any layout. Owns the DeepSpeed engine; weights go in and out by layer and name."""

    def __init__(self, args: NeoXArgs, groups: ParallelGroups, stage: Stage, objective: Objective) -> None:
        self.args, self.groups, self.stage, self.objective = args, groups, stage, objective
        self.dtype = DTYPES[args.params_dtype]
        self.zero_stage = zero_stage_used(args)
        self._pipe_shape: torch.Size | None = None
        self.files = CheckpointEngine()
        self.watch = GradientWatch(
            [(name.removeprefix("layers."), p) for name, p in stage.named_parameters() if p.requires_grad],
            groups.device,
        )
        self._loss = StepLoss(objective, groups, self.watch)
        self.spikes = SpikeGuard(args.skip_step_above_sigma) if args.skip_step_above_sigma is not None else None
        optimizer = together_local(groups, lambda: build_optimizer(stage, args, DeepSpeedCPUAdam))
        ordered = [param for group in optimizer.param_groups for param in group["params"]]
        assert_same_groups(optimizer.param_groups, groups)
        attach_deepspeed()
        # DeepSpeed reads it even when told the device.
        os.environ.setdefault("LOCAL_RANK", str(groups.device.index or 0))
        config = deepspeed_config(args)
        says = config.get("dump_state") or "comms_logger" in config
        for log in (deepspeed.utils.logger, *deepspeed.utils.logger.handlers):
            log.setLevel(logging.INFO if says and groups.world_rank == 0 else logging.ERROR)
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._pipe = self._wrap_pipeline(ordered) if groups.size("pipe") > 1 else None
            self._ds = deepspeed.initialize(
                model=stage if self._pipe is None else self._module,
                optimizer=optimizer,
                config=config,
                mpu=PlainMpu(groups) if self._pipe is None else None,
                dist_init_required=False,
            )[0]
        self._ds.checkpoint_engine = self.files
        scaler = getattr(self._ds.optimizer, "loss_scaler", None)
        if isinstance(scaler, DynamicLossScaler):
            # At the least scale it would raise by itself, before the loop has seen as many overflows as NeoX allows.
            scaler.raise_error_at_min_scale = False
        if self.zero_stage > 0:
            self._judge_steps()
        if self.spikes is not None:
            self._guard_steps(optimizer, self.spikes)
        if self._pipe is not None:
            cut_backward(self._ds, stage, ordered)
        self._params = stage_parameters(stage)
        named = {id(item[2]): item for item in self._params}
        trained = [named[id(p)] for p in ordered if id(p) in named]  # the others are placeholders
        size = sum(math.prod(getattr(p, "ds_shape", p.shape)) for _, _, p in self._params)
        self.state = EngineState(self._ds, trained, groups, self.dtype, self.zero_stage, size)
        self.owned = OwnedParts(self._params, self._ds.optimizer, groups, self.zero_stage)
        self.on_gradients: Callable[[], None] | None = None  # asked in every step, between backward and clipping
        # Gives micro-batches (on this rank's device) their `reference`, and `kl.reference`; all ranks ask together.
        self.fill_reference: Callable[[list[Batch]], list[Batch]] | None = None
        if self.dtype != torch.float32:
            self._master_from_init()

    def _wrap_pipeline(self, optimized: list[nn.Parameter]) -> PipeStage:
        groups, own = self.groups, {id(param) for param in self.stage.parameters()}
        pipe = PipeStage(self.stage, self._loss, groups)
        pipe.placeholders = nn.ParameterList([param for param in optimized if id(param) not in own])
        topology = PipeModelDataParallelTopology(
            num_pp=groups.size("pipe"), num_mp=groups.size("tensor"), num_dp=groups.size("data")
        )
        layers: list[Any] = [EmptyStage(nn.Identity) for _ in range(groups.size("pipe"))]
        layers[groups.rank("pipe")] = pipe
        self._module = TiedPipelineModule(layers, topology=topology, partition_method="uniform")
        params = {(layer, name): param for layer, name, param in stage_parameters(self.stage)}
        tied: list[tuple[nn.Parameter, Any]] = []
        if not self.args.no_weight_tying and groups.embedding is not None:
            tied.append((params[0, "word_embeddings.weight"], groups.embedding))
        if self.args.pos_emb == "rpe":
            tied += [(p, groups.group("pipe")) for (_, name), p in params.items() if name == "attention.rpe.weight"]
        for param, _ in tied:
            # Counted once in the gradient norm. Set here because PipelineModule clears the mark of what it is given.
            param.ds_pipe_replicated = not groups.is_first_stage  # type: ignore[attr-defined]
        self._module.tied = [(param, group) for param, group in tied if param.requires_grad]
        return pipe

    # -- steps ---------------------------------------------------------------------------------------------------

    def train_step(self, batches: list[Batch], lr: float) -> StepResult:
        """One optimizer step over this rank's micro-batches of it."""
        batches = self.complete(batches)
        weight = torch.stack([self.objective.weight(batch) for batch in batches]).sum(0)
        if self.groups.group("data") is not None:
            dist.all_reduce(weight, group=self.groups.group("data"))
        self._weight = weight
        self.watch.begin(weight)
        scaler = getattr(self._ds.optimizer, "loss_scaler", None)
        scaler_before = dict(vars(scaler)) if scaler is not None else {}
        # DeepSpeed averages over micro-batches and data ranks; undo both, divide by the step's weight instead.
        scale = len(batches) * self.groups.size("data") / weight.clamp(min=1.0)
        set_learning_rate(self._ds.optimizer, lr)
        self._loss.begin(scale)
        loss = self._pipe_step(batches) if self._pipe is not None else self._plain_step(batches)
        metrics = self._mean_metrics()
        spike = self.spikes is not None and self.spikes.skips
        if self.zero_stage == 0:
            norm, skipped = self._norm, self._skipped
        else:
            norm, skipped = self._ds.get_global_grad_norm(), bool(self._ds.optimizer.overflow)
        untrained = skipped and not bool(weight.any())
        if untrained and scaler is not None:
            vars(scaler).update(scaler_before)  # it took the step for an overflow
        return StepResult(loss, 0.0 if untrained else norm, skipped, spike, metrics, untrained)

    def complete(self, batches: list[Batch]) -> list[Batch]:
        """The micro-batches with what the objective wants to know of them before their forward pass."""
        batches = [batch.to(self.groups.device) for batch in batches]
        if self.fill_reference is not None:
            batches = self.fill_reference(batches)
        if self.objective.couple is not None:
            batches = self.objective.couple(batches, self.scores, self.groups.group("data"))
        return batches

    def _mean_metrics(self) -> dict[str, Tensor]:
        if not self.objective.metrics:
            return {}
        sums, groups = self._loss.metrics, self.groups
        if groups.group("data") is not None:
            dist.all_reduce(sums, group=groups.group("data"))
        if groups.group("pipe") is not None:
            dist.broadcast(sums, src=groups.members["pipe"][-1], group=groups.group("pipe"))
        return self.objective.means(sums)

    def _plain_step(self, batches: list[Batch]) -> Tensor:
        self._ds.train()
        self._total = torch.zeros((), device=self.groups.device)
        for i, batch in enumerate(batches):
            loss = self._ds(None, batch, partial(self._loss.of, batch=batch))
            self._total += loss.detach()
            self._ds.backward(loss)
            if self.zero_stage == 0 and i == len(batches) - 1:
                self._clip_or_drop()
            self._ds.step()
        return self._mean_loss(self._total)

    def _clip_or_drop(self) -> None:
        """What the ZeRO optimizers do in their step: clip, or drop a gradient that is not finite."""
        params = [param for _, _, param in self._params]
        self.watch.judge()
        if self.on_gradients is not None:
            self.on_gradients()
        self._norm = gradient_norm(params, self.groups) + self.watch.verdict
        self._skipped = not bool(self._norm.isfinite())
        if self._skipped:
            for param in params:
                param.grad = None
        elif self.args.gradient_clipping > 0.0:
            clip_gradients(params, self._norm, self.args.gradient_clipping)

    def _mean_loss(self, total: Tensor) -> Tensor:
        """The step's loss from this rank's sum of micro-batch losses, each scaled for DeepSpeed's two means."""
        assert self.args.gradient_accumulation_steps is not None
        mean = total.detach() / (self.args.gradient_accumulation_steps * self.groups.size("data"))
        if self.groups.group("data") is not None:
            dist.all_reduce(mean, group=self.groups.group("data"))
        return mean

    def _judge_steps(self) -> None:
        """Let DeepSpeed's own check of the norm see the verdict of all ranks, without another wait for the device."""
        optimizer, take_step, verdict = self._ds.optimizer, self._ds._take_model_step, self.watch.verdict

        def judged_step(*args: Any, **kwargs: Any) -> None:
            self.watch.judge()
            if self.on_gradients is not None:
                self.on_gradients()
            take_step(*args, **kwargs)

        def on_its_device(norm: Tensor) -> Tensor:
            return norm + verdict.to(norm.device)  # offloaded gradients have theirs on the CPU

        self._ds._take_model_step = judged_step
        if hasattr(optimizer, "scaled_global_norm"):  # stages 1 and 2
            norm = optimizer.scaled_global_norm
            optimizer.scaled_global_norm = lambda *args, **kwargs: on_its_device(norm(*args, **kwargs))
        elif hasattr(optimizer, "_get_norm_groups"):  # stage 3
            norms = optimizer._get_norm_groups
            optimizer._get_norm_groups = lambda: [on_its_device(norm) for norm in norms()]
        else:  # stage 1 in bf16
            grads = optimizer.get_grads_for_norm

            def with_verdict(for_clipping: bool = False) -> Any:
                found = grads(for_clipping=for_clipping)
                return found if for_clipping else ([*found[0], verdict.view(1)], found[1])

            optimizer.get_grads_for_norm = with_verdict

    def _guard_steps(self, optimizer: torch.optim.Optimizer, guard: SpikeGuard) -> None:
        """Ask the guard between backward and update; DeepSpeed goes through the same motions, weights stay."""
        update, take_step = optimizer.step, self._ds._take_model_step

        def guarded_update(closure: Any = None) -> Any:
            return None if guard.skips else update(closure)

        def guarded_step(*args: Any, **kwargs: Any) -> None:
            loss = torch.zeros((), device=self.groups.device)
            if self._pipe is None:
                loss = self._mean_loss(self._total)
            elif self.groups.is_last_stage:
                loss = self._mean_loss(self._ds.total_loss)
            if self.groups.group("pipe") is not None:
                dist.broadcast(loss, src=self.groups.members["pipe"][-1], group=self.groups.group("pipe"))
            guard.decide(float(loss) if bool(self._weight.any()) else math.nan)
            take_step(*args, **kwargs)

        optimizer.step = guarded_update  # type: ignore[method-assign]
        self._ds._take_model_step = guarded_step

    def _pipe_step(self, batches: list[Batch]) -> Tensor:
        assert self._pipe is not None
        self._pipe.batches = iter(batches)
        if self._pipe_shape != batches[0].tokens.shape:
            self._pipe_shape = batches[0].tokens.shape
            self._ds.reset_activation_shape()  # a curriculum: stages tell each other the new shape
        nothing = torch.zeros((), device=self.groups.device)
        return self._ds.train_batch(iter([(nothing, nothing)] * len(batches)))

    def forward_only(
        self,
        batches: list[Batch],
        read: Callable[[HeadInput, Batch], Tensor],
        shape: Callable[[Batch], tuple[int, ...]],
    ) -> list[Tensor]:
        """Read something off hidden states and head of each micro-batch, without gradients; the same on every pipeline
        rank."""
        module = self.stage if self._pipe is not None else self._ds.module
        was_training = module.training
        module.eval()
        try:
            return forward_only(module, batches, self.args, self.groups, read, dtype=self.dtype, shape=shape)
        finally:
            module.train(was_training)

    def token_logprobs(self, batches: list[Batch]) -> list[Tensor]:
        """log p(label) `[batch, seq]` fp32 of each micro-batch; the same on every pipeline and tensor rank."""

        read = partial(label_logprobs, group=self.groups.group("tensor"), columns=self.args.softmax_rows)
        return self.forward_only(batches, read, lambda batch: tuple(batch.tokens.shape))

    def scores(self, batches: list[Batch]) -> list[Tensor]:
        """The sums `[n]` fp32 of `token_logprobs` over each answer of each micro-batch."""
        return [answer_sums(v, b.to(v.device)) for v, b in zip(self.token_logprobs(batches), batches, strict=True)]

    @contextlib.contextmanager
    def inference(
        self, tokenizer: Tokenizer, columns: int | None = None, ends: tuple[int, ...] = ()
    ) -> Iterator[Model]:
        """The model as it is now, to generate and to score with; training goes on as if it had not been.

        columns, ends: as `columns` and `declared_ends` of `Model`. All ranks enter it together. Random generators are
        what they were afterwards.
        """
        args, random = for_inference(self.args), rng_state(self.groups.device)
        lockstep = self.zero_stage == 3
        try:
            with reading(self.stage, args):
                yield Model(args, self.groups, tokenizer, self.stage, self.dtype, columns, lockstep, declared_ends=ends)
        finally:
            restore_rng(random, self.groups.device, "before inference")

    # -- weights -------------------------------------------------------------------------------------------------

    def _master_from_init(self) -> None:
        # DeepSpeed makes fp32 master weights from the rounded 16-bit ones; ours start from the fp32 values.
        specs = layer_params(self.args)
        rank, size = self.groups.rank("tensor"), self.groups.size("tensor")
        for layer, name, param in self._params:
            if not param.requires_grad:
                continue
            spec = next(s for s in specs[layer] if s.name == name)
            whole = initial_value(spec, layer, self.args, self.groups.device)
            safe_set_full_fp32_param(param, shard(whole, spec, rank, size).contiguous())

    @torch.no_grad()
    def set_weights(self, weights: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Give parameters of this stage their values (local part, any float type), fp32 master weights included."""
        for layer, name, param in self._params:
            if name not in weights.get(layer, {}):
                continue
            value = weights[layer][name].to(self.groups.device)
            with self._gathered([param], modifier_rank=0):
                param.data.copy_(value)
            if param.requires_grad:
                safe_set_full_fp32_param(param, value.float().contiguous())

    def read_each(self, read: Callable[[int, str], Tensor]) -> dict[int, dict[str, Tensor]]:
        """A value for every trained parameter of this stage, for `set_weights`; a problem of one rank is raised on
        all."""

        def all_of_them() -> dict[int, dict[str, Tensor]]:
            found: dict[int, dict[str, Tensor]] = {}
            for layer, name, _ in self.state.parts.params:
                found.setdefault(layer, {})[name] = read(layer, name)
            return found

        return together_local(self.groups, all_of_them)

    @torch.no_grad()
    def weights(self, *, master: bool = False, keep: bool = True) -> dict[int, dict[str, Tensor]]:
        """This rank's part of every parameter of its stage, on CPU; fp32 master values of trained ones if asked for.
        All ranks of a data group call it together; one that does not `keep` them only helps to gather."""
        found: dict[int, dict[str, Tensor]] = {}
        for layer, name, param in stage_parameters(self.stage, copies=True):
            with self._gathered([param]):
                has_master = master and self.zero_stage > 0 and param.requires_grad
                value = safe_get_full_fp32_param(param) if has_master else param
                if keep:
                    found.setdefault(layer, {})[name] = value.detach().to("cpu", copy=True)
        return found

    def _gathered(self, params: list[nn.Parameter], modifier_rank: int | None = None) -> Any:
        if self.zero_stage < 3:
            return contextlib.nullcontext()
        return deepspeed.zero.GatheredParameters(params, modifier_rank=modifier_rank)

    @property
    def loss_scale(self) -> float | None:
        """fp16's current loss scale, None in other precisions."""
        return float(self._ds.optimizer.loss_scale) if self.dtype == torch.float16 else None

    def set_progress(self, global_steps: int, global_samples: int, skipped_steps: int) -> None:
        """DeepSpeed's own counters, after a resume."""
        self._ds.global_steps = global_steps
        self._ds.global_samples = global_samples
        self._ds.skipped_steps = skipped_steps

    def close(self) -> None:
        """Release DeepSpeed's hooks and buffers."""
        if deepspeed.comm.comm.comms_logger.enabled:
            if self.groups.world_rank == 0:
                deepspeed.comm.comm.comms_logger.log_all()
            deepspeed.comm.configure(enabled=False)
        self._ds.destroy()
