"""Loads what a run starts or resumes from, in every parallel layout. `writer.py` saves checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpointing import (
    AVERAGE,
    MASTER,
    CheckpointError,
    ConfigChange,
    DamagedError,
    Manifest,
    NeoXOptimizer,
    OpenCheckpoint,
    OptimizerFiles,
    check_model,
    describe_changes,
    describe_layout,
    has_score_head,
    load_weights,
    model_file,
    read_manifest,
    responsible_key,
    restore_rng,
    verify_finite,
    zero_file,
)
from megatron.checkpointing.adapters import adapter_model
from megatron.checkpointing.huggingface import has_hf_score, load_hf_weights, vocab_size_from_hf
from megatron.distributed import on_rank_zero, run_on_all_ranks, run_on_each_rank
from megatron.model import layer_params, named_params, shared_params, trained_parameters
from megatron.model.init import stage_parameters
from megatron.model.quantized import take_quantized
from megatron.model.weight_map import adapter_params, base_params
from megatron.mpu import DTYPES, ParamSpec
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.addresses import without_secrets
from megatron.training.checkpoint.base_weights import base_source, begin_adapters, describe_base
from megatron.training.checkpoint.forward_check import check_forward
from megatron.training.checkpoint.local_saves import LocalSaves
from megatron.training.checkpoint.run_parts import Origin, RunParts, TrainingProgress, zero_tokens
from megatron.training.checkpoint.same_run import (
    changed_keys,
    check_parent,
    check_precision,
    check_same_run,
    moments_of,
    restarts_data,
)
from megatron.training.checkpoint.source import CheckpointSource, check_averaged, or_earlier
from megatron.training.schedules import resumed_schedule

_Load = Callable[..., dict[int, dict[str, Tensor]]]


def _load_hf_base(path: Path, args: NeoXArgs, **options: Any) -> dict[int, dict[str, Tensor]]:
    return load_hf_weights(path, args.replace(lora=None), **options)


def _words(source: CheckpointSource) -> str:
    return "freshly initialised weights" if source.path is None else f"the weights of {source.path}"


class CheckpointLoader:
    """Loads the weights and the state from which a run starts or resumes.

    All ranks call every method together; an exception on one rank is raised on all. origin: facts about the
    run's start, valid once `resume` has returned. adapters_begin: the run started with fresh adapters, not
    with trained ones.
    """

    def __init__(self, run: RunParts, local: LocalSaves | None = None) -> None:
        """local: where the run's own copies are, if `run.source` may be one of them."""
        self.local = local
        self.run, self.args, self.groups, self.engine, self.logger = run, run.args, run.groups, run.engine, run.logger
        self.source, self.origin, self.adapters_begin = run.source, Origin(run.schedule), False

    def resume(self) -> TrainingProgress:
        """Load the run's state from `save` if it holds this run, else what `load` names; else use fresh
        weights.

        Returns the run's progress.
        """
        args = self.args
        source, goes_on = self.source.path, self.source.goes_on
        check_averaged(args, self.source)
        if source is None:
            self.logger.info("starting from freshly initialised weights")
            if args.lora is not None:
                self._begin_adapters(self.source)
            return self._beginning()
        if self.source.is_hf:
            self._load_weights(source, None, load_hf_weights, begins=True)
            self.logger.info(vocab_size_from_hf(source, args, self.run.tokenizer.vocab_size)[1])
            self.logger.info(f"starting from the weights of {source}, of HuggingFace")
            return self._beginning()
        its_manifest = read_manifest(source)
        imported = (
            its_manifest is not None and not its_manifest.data and not its_manifest.optimizer
        )  # weights without a run
        if imported or (args.finetune and not goes_on):
            self._check_parent(source)
            checkpoint = self._verified(source, averaged=args.load_ema)
            if not self._load_weights(source, checkpoint, begins=True) and not args.load_ema:
                self._check_forward(checkpoint)
            kind = "averaged weights" if args.load_ema else "weights"
            self.logger.info(f"fine-tuning the {kind} of {source}, from iteration 0")
            return self._beginning()
        if (fallback := self.source.fallback) is not None:
            return self._resume_copy(source, fallback)
        source, progress = or_earlier(args, source, lambda path: self._restore(path, goes_on))
        self.logger.info(f"going on from {source}, iteration {progress.iteration}")
        return progress

    def _resume_copy(self, path: Path, fallback: CheckpointSource) -> TrainingProgress:
        """Go on from the copy `path` on this machine; if it is damaged, from the last checkpoint."""
        try:
            progress = self._restore(path, goes_on=True)
        except DamagedError as problem:
            if not fallback.goes_on:  # the run began elsewhere, at another place in its data
                raise DamagedError(f"{problem}, or delete {path} on all machines to begin anew") from problem
            self.logger.warning(f"{problem}; local_save: trying {fallback.path}")
            self.source = fallback
            return self.resume()
        self.logger.info(f"going on from {path}, iteration {progress.iteration}")
        return progress

    def _beginning(self) -> TrainingProgress:
        return TrainingProgress(method_state=self.run.method.initial_state())

    def load_weights_of(self, source: CheckpointSource) -> None:
        """Load the weights of another source, such as a reference model's, before `resume`.

        A source without path stands for fresh weights, which the engine already has.
        """
        if source.path is not None and source.is_hf:
            self._load_weights(source.path, None, load_hf_weights)
        elif source.path is not None:
            self._load_weights(source.path, self._verified(source.path, averaged=self.args.load_ema))

    def _verified(self, path: Path, optimizer: bool = False, averaged: bool = False) -> OpenCheckpoint:
        """Returns the checkpoint, after checking its files. The ranks share the work.

        Every file must match the manifest, and weights must be finite; with `optimizer` also the optimizer's
        state. averaged: as in `OpenCheckpoint`.
        """
        checkpoint = run_on_each_rank(self.groups, lambda: OpenCheckpoint(path, averaged=averaged))
        manifest, sharers = checkpoint.manifest, list(range(self.groups.world_size))
        names = sorted(manifest.files) if manifest is not None else sorted(p.name for p in path.glob("layer_*"))
        if self.local is not None and self._is_copy(path):
            names = self.local.collect(path, (spec.index for spec in self.engine.stage.specs))
            sharers = self.local.machine_ranks
        checkpoint.verify(names, self.groups, sharers)
        local_names = names[sharers.index(self.groups.world_rank) :: len(sharers)]
        run_on_all_ranks(self.groups, lambda: verify_finite(path, local_names, optimizer or averaged))
        return checkpoint

    def _is_copy(self, path: Path) -> bool:
        return path == self.source.path and self.source.fallback is not None

    def _load_weights(
        self, path: Path, checkpoint: OpenCheckpoint | None, load: _Load = load_weights, begins: bool = False
    ) -> bool:
        """Load the weights at `path`; return whether the model got a fresh score head.

        checkpoint: the opened checkpoint; None for a HuggingFace folder. begins: the run starts here, so a
        reward model may take the weights of a language model and a fresh score head.
        With `lora`, a checkpoint without adapters gets fresh ones. For a checkpoint that holds only adapters,
        their base weights are loaded first.
        """
        manifest = None if checkpoint is None else checkpoint.manifest
        if self.args.lora is None:
            return self._load_params(path, checkpoint, load, begins)
        if manifest is not None and manifest.model.get("lora") is not None:
            base = manifest.base
            if base is not None:
                base_weights = base_source(self.args, base, self.groups, path)
                self._load_base(base_weights, begins=True)
                self._record_base(base_weights)
                self.logger.info(f"{path}: loading its adapters, on top of {_words(base_weights)}")
            elif self.args.lora["save"] == "adapter":
                text = f"adapter would drop the base weights in {path}, which are saved nowhere else; write both"
                raise self.args.error("lora.save", text)
            return self._load_params(path, checkpoint, params=None if base is None else adapter_params(self.args))
        source = CheckpointSource(path, False, is_hf=load is load_hf_weights)
        new_head = self._load_base(source, begins)
        self._begin_adapters(source)
        return new_head

    def _load_base(self, source: CheckpointSource, begins: bool) -> bool:
        """Load the base weights of adapters; return whether the model got a fresh score head.

        A source without path stands for fresh weights, which the engine already has. begins: as in
        `_load_weights`.
        """
        if source.path is None:
            return False
        if source.is_hf:
            return self._load_params(source.path, None, _load_hf_base, begins)
        return self._load_params(source.path, self._verified(source.path), begins=begins, params=base_params(self.args))

    def _begin_adapters(self, source: CheckpointSource) -> None:
        begin_adapters(self.engine)
        self.adapters_begin = True
        self._record_base(source)

    def _record_base(self, source: CheckpointSource) -> None:
        if self.args.lora is not None and self.args.lora["save"] == "adapter" and self.args.save is not None:
            self.origin = replace(self.origin, base=describe_base(self.args, source, self.groups))

    def _load_params(
        self,
        path: Path,
        checkpoint: OpenCheckpoint | None,
        load: _Load = load_weights,
        begins: bool = False,
        params: Mapping[int, Sequence[ParamSpec]] | None = None,
    ) -> bool:
        """Load weights from files; return whether the model got a fresh score head.

        load: reads the files. begins: as in `_load_weights`. params: the parameters to load, by layer, if the
        files hold only a part of the model; None: all.
        """
        manifest = None if checkpoint is None else checkpoint.manifest
        new_head = begins and bool(self.args.score_head)
        new_head = new_head and not on_rank_zero(
            self.groups, lambda: has_hf_score(path) if self.source.is_hf else has_score_head(path, self.args)
        )
        if manifest is not None:
            check_model(adapter_model(manifest), self.args, str(path), new_head)
            if self.args.mtp_num_layers is None and (unread := manifest.model.get("mtp_num_layers")):
                text = f"its {unread} blocks for multi-token prediction are left out, as mtp_num_layers is not set"
                self.logger.info(f"{path}: {text}")
        layers = {spec.index for spec in self.engine.stage.specs if spec.kind != "head" or self.args.no_weight_tying}
        if self.groups.is_last_stage and (not self.args.no_weight_tying or self.engine.stage.predictions):
            layers.add(0)
        if new_head:
            layers -= {self.args.num_layers + 4}
            self.logger.info(
                f"{path}: its output layer is not loaded; the score head gets fresh values (normal, init_method_std "
                f"{self.args.init_method_std})"
            )

        def read(layer_indices: list[int]) -> dict[int, dict[str, Tensor]]:
            loaded = load(
                checkpoint or path,
                self.args,
                layers=layer_indices,
                tensor_rank=self.groups.rank("tensor"),
                tensor_size=self.groups.size("tensor"),
                new_head=new_head,
                **({} if params is None else {"params": params}),
            )
            return take_quantized(self.engine.stage, loaded)

        def read_all() -> dict[int, dict[str, Tensor]]:
            if not self.args.quantized:
                return read(sorted(layers))
            return {layer: values for index in sorted(layers) for layer, values in read([index]).items()}

        weights = run_on_each_rank(self.groups, read_all)
        if begins:
            self.origin = replace(self.origin, zero_tokens=zero_tokens(weights, self.groups.rank("tensor")))
        self.engine.set_weights(weights)
        if manifest is None and load is load_weights:
            self.logger.info(f"{path}: {describe_layout(path, self.args)}")
        return new_head

    def _restore(self, path: Path, goes_on: bool) -> TrainingProgress:
        args = self.args
        if not goes_on:
            self._check_parent(path)
        loads_optimizer = not self._leaves_out(args.no_load_optim, goes_on)
        checkpoint = self._verified(path, optimizer=loads_optimizer)
        manifest = checkpoint.manifest
        self._check_run(path, manifest, goes_on)
        self._load_weights(path, checkpoint)
        takes_optimizer = loads_optimizer and self._takes_optimizer(path, manifest, goes_on)
        if takes_optimizer:
            self._check_layout(checkpoint)
        rank = self.run.model_rank if (path / model_file(self.run.model_rank)).exists() else 0
        state = run_on_each_rank(self.groups, lambda: checkpoint.model_state(rank))
        if manifest is None:
            if "consumed_samples" in state:  # one of our checkpoints, which always have a manifest
                raise DamagedError(f"{path}: damaged: manifest.json (missing); load another `iteration`")
            check_model(state.get("args", {}), args, str(path))
            self.logger.info(f"{path} has no manifest.json, as GPT-NeoX's checkpoints, so its files are not verified")
        if args.ema_decay is not None and not takes_optimizer:
            text = "averages are in the optimizer's state, which is not loaded; they begin with the weights"
            self.logger.warning(f"ema_decay: {path}: {text}")
        iteration = int(state.get("iteration", state.get("global_steps", 0)))
        scaler: dict[str, float] = {}
        if takes_optimizer:
            user_config = manifest.config if manifest is not None else {}
            self._resume_schedule(state.get("lr_scheduler"), str(path), user_config)
            if manifest is None:
                neox_optimizer = run_on_each_rank(self.groups, lambda: NeoXOptimizer(path, args))
                self._load_by_parameter(neox_optimizer)
                scaler = neox_optimizer.scaler()
            elif files := OptimizerFiles(checkpoint):
                self._load_by_parameter(files)
                scaler = state.get("loss_scaler", {})
            else:  # a checkpoint of an earlier version, or of 8-bit Adam
                name = zero_file(self.groups.rank("data_context"), self.run.model_rank, args.params_dtype == "bf16")
                run_on_each_rank(self.groups, lambda: self.engine.load_layout_state(state, checkpoint, name))
        self._check_forward(checkpoint)
        if not self._leaves_out(args.no_load_rng, goes_on):
            restore_rng(state, self.groups.device, str(path / model_file(rank)))
        consumed = manifest.consumed_samples if manifest is not None else iteration * (args.train_batch_size or 0)
        consumed = 0 if restarts_data(args, goes_on) else consumed
        skipped = int(state.get("skipped_steps", 0))
        counters = {"iteration": iteration, "consumed_samples": consumed, "skipped_steps": skipped}
        window = state.get("spike_window", [])
        self.engine.load_model_state({**counters, "loss_scaler": scaler, "spike_window": window})
        self._load_scaling(checkpoint, state)
        if goes_on:
            self.origin = replace(self.origin, saved_at=None if self._is_copy(path) else iteration)
            if manifest is not None:
                self.origin = replace(self.origin, run_id=manifest.run_id)
                changed = changed_keys(manifest.config, args.public_values) if manifest.config else []
                if changed:
                    self.logger.info(without_secrets(f"keys changed since that checkpoint: {'; '.join(changed)}"))
        tokens = int(state.get("consumed_tokens", consumed * args.seq_length))
        return TrainingProgress(
            iteration, consumed, skipped, tokens, dict(state.get("row_tokens", {})),
            method_state=self.run.method.load_state(state), callback_states=state.get("callbacks", {}),
        )  # fmt: skip

    def _load_scaling(self, checkpoint: OpenCheckpoint, state: Mapping[str, Any]) -> None:
        """Load the scales of FP8, which are equal on all ranks with the same layers.

        If the split into pipeline stages has changed, they are collected from all model files. state: content
        of this rank's model file.
        """
        scaling = self.engine.stage.delayed_scaling
        if scaling is None:
            return
        saved = dict(state.get("delayed_scaling", {}))
        if not scaling.products.keys() <= saved.keys():
            states = run_on_each_rank(self.groups, checkpoint.model_states)
            for file_state in states.values():
                saved |= file_state.get("delayed_scaling", {})
        scaling.load(saved)
        unknown = len(scaling.products.keys() - saved.keys())
        if unknown:
            self.logger.info(f"{checkpoint.path} has no FP8 scales for {unknown} linears; the first step makes them")

    def _check_parent(self, path: Path) -> None:
        """If this run is a branch, check that it begins from the checkpoint it was made for, and log it."""
        parent = self.args.branched_from
        if parent is not None:
            on_rank_zero(self.groups, lambda: check_parent(self.args, path))
            place = f"step {parent['iteration']} of {parent['run']}"
            self.logger.info(f"branch of {place}, manifest {parent['digest'][:12]}; data {parent['data']}")

    def _leaves_out(self, setting: bool, goes_on: bool) -> bool:
        """Returns whether to leave a part of the state out, which no_load_optim or no_load_rng asks for.

        A branch that resumes from its own checkpoints leaves nothing out.
        """
        resumes_branch = goes_on and self.args.branched_from is not None and not self.args.compat_no_save_optim
        return setting and not resumes_branch

    def _takes_optimizer(self, path: Path, manifest: Manifest | None, goes_on: bool) -> bool:
        """Returns whether the checkpoint has an optimizer's state to load.

        Raises CheckpointError if the run needs it but the checkpoint has none.
        """
        args = self.args
        if manifest is None or manifest.optimizer:
            return True
        if 0 < manifest.iteration < args.train_iters:  # else the state was still empty, or is not needed any more
            remedy = "restart: true to start anew" if goes_on else "finetune: true to start at iteration 0"
            raise CheckpointError(
                f"{path} was saved without the optimizer's state (compat_no_save_optim, or no_save_optim of earlier "
                f"versions); set no_load_optim: true to go on with a fresh optimizer, or {remedy}"
            )
        return False

    def _resume_schedule(self, saved: Mapping[str, Any] | None, path: str, user_config: Mapping[str, Any]) -> None:
        configured = self.run.schedule
        schedule = resumed_schedule(configured, saved, self.args, path, user_config)
        self.origin = replace(self.origin, schedule=schedule)
        if schedule != configured:
            self.logger.info(f"use_checkpoint_lr_scheduler: {schedule.describe()}")

    def _check_forward(self, checkpoint: OpenCheckpoint) -> None:
        if self.args.checkpoint_validation_with_forward_pass:
            check_forward(self.engine, checkpoint, self.logger.info)

    def _check_run(self, path: Path, manifest: Manifest | None, goes_on: bool) -> None:
        """Raise CheckpointError if the checkpoint is of another run, or of a run on other data."""
        if manifest is None:
            return

        def check() -> None:
            record = self.run.data_record(manifest.consumed_samples)
            check_same_run(self.args, path, manifest, goes_on, record, self.run.tokenizer)

        on_rank_zero(self.groups, check)

    def _check_layout(self, checkpoint: OpenCheckpoint) -> None:
        """Raise CheckpointError if the optimizer's state in the checkpoint does not fit this run.

        It must fit in precision and type of optimizer. State that is not kept per parameter must also have
        been saved in this run's parallel layout.
        """
        path, manifest = checkpoint.path, checkpoint.manifest
        if manifest is None:
            check_precision(path, self.run.layout.precision)
            return
        saved, now = manifest.layout, self.run.layout
        keys = {"precision": responsible_key(("fp16", "bf16", "precision"), self.args, manifest.config)}
        if not OptimizerFiles(path):
            keys |= {
                "pipe": "pipe_parallel_size",
                "tensor": "model_parallel_size",
                "zero_stage": "zero_optimization.stage",
            }
        changes = [
            ConfigChange(key, getattr(now, name), getattr(saved, name))
            for name, key in keys.items()
            if getattr(saved, name) != getattr(now, name)
        ]
        saved_type = (manifest.config.get("optimizer") or {}).get("type", "Adam")
        if manifest.config and moments_of(saved_type) != moments_of(self.args.optimizer["type"]):
            changes.append(ConfigChange("optimizer.type", self.args.optimizer["type"], saved_type))
        if not OptimizerFiles(path) and 0 < now.zero_stage and saved.data != now.data:
            changes.append(ConfigChange("num_gpus", f"{now.data} data-parallel ranks", str(saved.data)))
        if changes:
            raise CheckpointError(
                f"{describe_changes(changes, self.args, f'the run of {path}')}: its optimizer state fits the saved "
                "values only; restore them, or set no_load_optim: true to resume with the weights only"
            )

    def _check_trained(self, files: OptimizerFiles | NeoXOptimizer) -> None:
        """Raise CheckpointError unless the saved optimizer state is of exactly the parameters that this run
        trains."""
        specs, shared = layer_params(self.args), shared_params(self.args)
        saved = {(layer, name) for layer, name in files.names(specs) if shared.get(name, layer) == layer}
        now = trained_parameters(self.args)
        for names, place in ((now - saved, "here"), (saved - now, "there")):
            if names:
                examples = ", ".join(f"{layer}.{name}" for layer, name in sorted(names)[:3])
                remaining = f" and {len(names) - 3} more" if len(names) > 3 else ""
                raise CheckpointError(
                    f"trainable ({self.args.origin('trainable')}): this run trains other parameters than the run of "
                    f"{files.path}: {examples}{remaining} are trained {place} only; restore trainable, or set "
                    "no_load_optim: true to resume from its weights with a fresh optimizer"
                )

    def _load_by_parameter(self, files: OptimizerFiles | NeoXOptimizer) -> None:
        """Load this rank's part of the optimizer's state: moments, step counts and fp32 master weights.

        Moments are converted to the run's `optimizer_state_dtype`.
        """
        if not self._is_copy(files.path):  # whose keys are the same, and of which rank 0 has only a part
            on_rank_zero(self.groups, lambda: self._check_trained(files))
        tensor_rank, tensor_size = self.groups.rank("tensor"), self.groups.size("tensor")
        specs, dtype, converted = named_params(self.args), DTYPES[self.args.optimizer_state_dtype], set[torch.dtype]()

        def read(layer: int, name: str) -> dict[str, Tensor]:
            return files.read(layer, specs[layer, name], tensor_rank, tensor_size)

        def moments(layer: int, name: str) -> dict[str, Tensor]:
            state = {key: value for key, value in read(layer, name).items() if key != MASTER}
            if self.args.ema_decay is None:
                state.pop(AVERAGE, None)
            adam = {key: value for key, value in state.items() if key in ("exp_avg", "exp_avg_sq")}
            converted.update(value.dtype for value in adam.values() if value.dtype != dtype)
            return state | {key: value.to(dtype) for key, value in adam.items()}

        run_on_each_rank(self.groups, lambda: self.engine.restore_state(moments))
        has_averages = isinstance(files, OptimizerFiles) and files.has_averages
        if has_averages != (self.args.ema_decay is not None):
            text = "its averages are dropped" if has_averages else "it has none, so averages begin with its weights"
            self.logger.warning(f"ema_decay: {files.path}: {text}")
        for saved in converted:
            rounding = "" if saved.itemsize < dtype.itemsize else ", rounded to nearest"
            names = [str(moment_dtype).removeprefix("torch.") for moment_dtype in (saved, dtype)]
            self.logger.info(
                f"optimizer_state_dtype: moments of {files.path} are {names[0]}, converted to {names[1]}{rounding}"
            )
        if self.args.params_dtype != "fp32":
            masters: dict[int, dict[str, Tensor]] = {}
            trained = [item for item in stage_parameters(self.engine.stage) if item[2].requires_grad]

            def read_masters() -> None:
                for layer, name, _ in trained:
                    masters.setdefault(layer, {})[name] = read(layer, name)[MASTER]

            run_on_each_rank(self.groups, read_masters)
            self.engine.set_weights(masters)
