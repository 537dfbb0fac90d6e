"""Checkpoints of a run: how it starts, goes on and is saved, in every layout.

Files and formats belong to `megatron.checkpointing`; here ranks agree, and the engine's state goes in and out.
"""

from __future__ import annotations

import fcntl
import json
import logging
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megatron.checkpointing import (
    CheckpointError,
    DamagedError,
    FileRecord,
    Layout,
    Manifest,
    begin,
    check_model,
    layer_file,
    list_checkpoints,
    load_weights,
    local_layer_state,
    model_file,
    model_keys,
    publish,
    read_manifest,
    restore_rng,
    rng_state,
    step_of,
    sum_bias_masters,
    torch_adam_state,
    verify,
    write_bytes,
    zero_adam_state,
    zero_file,
)
from megatron.data import data_fingerprint, data_seed
from megatron.mpu import ParallelGroups, on_rank_zero, together, together_local
from megatron.neox_arguments import NeoXArgs
from megatron.tokenizer import Tokenizer
from megatron.training.engine import Engine
from megatron.training.forward_check import LOGITS, check_forward, fixed_logits
from megatron.training.schedules import Schedule, resumed_schedule
from megatron.training.sources import Source


@dataclass
class Progress:
    """How far a run is. skipped: steps whose update the optimizer refused; consumed_tokens: fewer than those of all
    samples when a curriculum cuts them."""

    iteration: int = 0
    consumed_samples: int = 0
    skipped: int = 0
    consumed_tokens: int = 0


class Checkpointer:
    """Saves and restores one run. All ranks call every method together; what one rank raises, all raise."""

    def __init__(
        self,
        args: NeoXArgs,
        groups: ParallelGroups,
        engine: Engine,
        schedule: Schedule,
        tokenizer: Tokenizer,
        train_order: Mapping[str, Any],
        source: Source,
        logger: logging.Logger,
    ) -> None:
        self.args, self.groups, self.engine, self.schedule = args, groups, engine, schedule
        self.tokenizer, self.source, self.logger = tokenizer, source, logger
        self.run_id = on_rank_zero(groups, lambda: uuid.uuid4().hex)
        self.data: Mapping[str, Any] = on_rank_zero(groups, lambda: data_fingerprint(args))
        # Equal numbers of samples over whole epochs mean the same shuffled order, with the same data and seed.
        split = args.split.replace(" ", "")
        self.order = {**train_order, "seq_length": args.seq_length, "split": split}
        if data_seed(args) != args.seed:
            self.order["data_seed"] = data_seed(args)
        self.saved_at: int | None = None
        self._lock: Any = None
        # NeoX's numbering of mp_rank files: pipeline and tensor ranks together.
        self.model_rank = groups.rank("pipe") * groups.size("tensor") + groups.rank("tensor")
        self.layout = Layout(
            pipe=groups.size("pipe"),
            data=groups.size("data"),
            tensor=groups.size("tensor"),
            zero_stage=engine.zero_stage,
            precision=args.params_dtype,
            world_size=groups.world_size,
        )

    # -- saving --------------------------------------------------------------------------------------------------

    def save(self, progress: Progress) -> None:
        """Write `<save>/global_stepN` and let `latest` name it; nothing visible changes until it is whole."""
        save = self.args.save
        assert save is not None
        if self.saved_at == progress.iteration:
            return
        self._check_space(Path(save))
        with self._no_half_checkpoint(Path(save) / "begin"):
            temporary = on_rank_zero(self.groups, lambda: begin(save, progress.iteration))
        weights = self.engine.weights(keep=self.groups.rank("data") == 0)
        extra: dict[str, Any] = {}
        if self.args.checkpoint_validation_with_forward_pass:
            extra[LOGITS] = fixed_logits(self.engine, self.args)
        with self._no_half_checkpoint(temporary):
            records = together(self.groups, lambda: self._write(temporary, weights, extra, progress))
        manifest = Manifest(
            run_id=self.run_id,
            iteration=progress.iteration,
            consumed_samples=progress.consumed_samples,
            layout=self.layout,
            model=model_keys(self.args),
            seed=self.args.seed,
            tokenizer=self.tokenizer.fingerprint(),
            data={"files": self.data, "order": self.order},
            versions={name: version(name) for name in ("torch", "deepspeed")},
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            config=json.loads(self.args.to_json())["given"],
            optimizer=not self.args.no_save_optim,
            files={record.name: record for per_rank in records for record in per_rank},
        )
        keep, configs = self.args.keep_last_n_checkpoints, self.args.config_files
        with self._no_half_checkpoint(temporary):
            iteration = progress.iteration
            path = on_rank_zero(self.groups, lambda: publish(temporary, save, iteration, manifest, configs, keep))
        self.saved_at = progress.iteration
        self.logger.info(f"saved checkpoint {path}")

    @contextmanager
    def _no_half_checkpoint(self, temporary: Path) -> Iterator[None]:
        """What cannot be written leaves nothing behind, and the earlier checkpoints as they were."""
        try:
            yield
        except (OSError, CheckpointError) as problem:
            if self.groups.world_rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            reason = getattr(problem, "strerror", None) or str(problem).splitlines()[0]
            raise CheckpointError(
                f"{temporary.parent}: the checkpoint could not be written ({reason}); earlier ones are untouched"
            ) from problem

    def _check_space(self, save: Path) -> None:
        """Refuse to begin a checkpoint that will not fit; what is there stays untouched."""
        optimizer = not self.args.no_save_optim
        needed = sum(together(self.groups, lambda: self.engine.state.checkpoint_bytes(optimizer)))

        def check() -> None:
            save.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(save).free
            if free < needed:
                raise CheckpointError(
                    f"{save}: a checkpoint takes about {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free; "
                    "make room, or set keep_last_n_checkpoints"
                )

        on_rank_zero(self.groups, check)

    def lock(self) -> None:
        """Keep `save` for this run while its process lives. Raises CheckpointError when another run has it."""
        if self.args.save is not None:
            together(self.groups, self._take_lock)

    def _take_lock(self) -> None:
        if self.groups.world_rank == 0:
            self._lock = _lock(Path(self.args.save or ""))

    def _write(
        self, path: Path, weights: Mapping[int, Mapping[str, Any]], extra: Mapping[str, Any], progress: Progress
    ) -> list[FileRecord]:
        """extra: entries of the mp_rank file that only all ranks together can make."""
        files, groups = self.engine.files, self.groups
        files.records = []
        tensor_rank, tensor_size = groups.rank("tensor"), groups.size("tensor")
        if groups.rank("data") == 0:
            for layer in self._own_layers():
                state = local_layer_state(
                    layer, weights.get(layer, {}), self.args, tensor_rank=tensor_rank, tensor_size=tensor_size
                )
                files.save(state, str(path / layer_file(layer, tensor_rank)))
            files.save({**self._model_state(progress), **extra}, str(path / model_file(self.model_rank)))
        if self.engine.zero_stage > 0 and not self.args.no_save_optim:
            name = zero_file(groups.rank("data"), self.model_rank, self.args.params_dtype == "bf16")
            files.save(self.engine.state.zero_state(), str(path / name))
        if groups.world_rank == 0:
            (path / "tokenizer").mkdir()
            for name, content in self.tokenizer.files().items():
                files.records.append(write_bytes(content, path / "tokenizer" / name, f"tokenizer/{name}"))
        return files.records

    def _own_layers(self) -> list[int]:
        """Layers with parameters that this stage writes; a tied copy of the embedding is the first stage's."""
        kinds = {spec.index: spec.kind for spec in self.engine.stage.specs}
        return [i for i, kind in kinds.items() if kind != "head" or self.args.no_weight_tying]

    def _model_state(self, progress: Progress) -> dict[str, Any]:
        args = self.args
        return {
            **self.engine.state.model_state(),
            **({"optimizer": None} if args.no_save_optim else {}),
            "lr_scheduler": self.schedule.state_dict(progress.iteration),
            "iteration": progress.iteration,
            "consumed_samples": progress.consumed_samples,
            "consumed_tokens": progress.consumed_tokens,
            "skipped_steps": progress.skipped,
            "args": {
                "num_layers": args.num_layers,
                "hidden_size": args.hidden_size,
                "num_attention_heads": args.num_attention_heads,
                "max_position_embeddings": args.max_position_embeddings,
                "make_vocab_size_divisible_by": args.make_vocab_size_divisible_by,
                "padded_vocab_size": args.padded_vocab_size,
                "tokenizer_type": args.tokenizer_type,
                "model_parallel_size": args.model_parallel_size,
            },
            "spike_window": self.engine.spikes.state() if self.engine.spikes is not None else [],
            **({} if args.no_save_rng else rng_state(self.groups.device)),
        }

    # -- starting and going on -----------------------------------------------------------------------------------

    def resume(self) -> Progress:
        """Start as the configuration says: go on from `save` if it holds this run, else from `load`, else afresh."""
        args = self.args
        self.lock()
        source, goes_on = self.source.path, self.source.goes_on
        if source is None:
            self.logger.info("starting from freshly initialised weights")
            return Progress()
        if args.finetune and not goes_on:
            manifest = self._verified(source)
            self._load_weights(source, manifest)
            self._check_forward(source, manifest)
            self.logger.info(f"fine-tuning the weights of {source}, from iteration 0")
            return Progress()
        while True:
            try:
                progress = self._restore(source, goes_on)
                break
            except DamagedError as problem:
                earlier = self._earlier(source) if args.load_fallback else None
                if earlier is None:
                    raise
                self.logger.warning(f"{problem}; load_fallback: trying {earlier}")
                source = earlier
        self.logger.info(f"going on from {source}, iteration {progress.iteration}")
        return progress

    def _earlier(self, path: Path) -> Path | None:
        before = [p for p in list_checkpoints(path.parent) if step_of(p) < step_of(path)]
        return before[-1] if before else None

    def _verified(self, path: Path) -> Manifest | None:
        """The manifest after checking every file against it, the work shared out over ranks."""
        manifest = read_manifest(path)
        names = sorted(manifest.files) if manifest is not None else []
        own = names[self.groups.world_rank :: self.groups.world_size]
        together(self.groups, lambda: verify(path, own) if own else None)
        return manifest

    def _load_weights(self, path: Path, manifest: Manifest | None) -> None:
        if manifest is not None:
            check_model(manifest.model, self.args, str(path))
        layers = {spec.index for spec in self.engine.stage.specs if spec.kind != "head" or self.args.no_weight_tying}
        if not self.args.no_weight_tying and self.groups.is_last_stage:
            layers.add(0)
        loaded = together_local(
            self.groups,
            lambda: load_weights(
                path,
                self.args,
                layers=sorted(layers),
                tensor_rank=self.groups.rank("tensor"),
                tensor_size=self.groups.size("tensor"),
            ),
        )
        self.engine.set_weights(loaded)

    def _restore(self, path: Path, goes_on: bool) -> Progress:
        args = self.args
        manifest = self._verified(path)
        self._check_run(path, manifest, goes_on)
        self._load_weights(path, manifest)
        takes_optimizer = self._takes_optimizer(path, manifest, goes_on)
        if takes_optimizer:
            self._check_layout(path, manifest)
        rank = self.model_rank if (path / model_file(self.model_rank)).exists() else 0
        state = together_local(self.groups, lambda: self.engine.files.load(str(path / model_file(rank))))
        if manifest is None:
            if "consumed_samples" in state:  # ours, which never are without
                raise DamagedError(f"{path}: damaged: manifest.json (missing); load another `iteration`")
            check_model(state.get("args", {}), args, str(path))
            self.logger.info(f"{path} has no manifest, as GPT-NeoX's: its files are not verified")
        iteration = int(state.get("iteration", state.get("global_steps", 0)))
        if takes_optimizer:
            self._resume_schedule(state.get("lr_scheduler"), str(path))
            together_local(self.groups, lambda: self._load_optimizer(path, state, manifest))
        self._check_forward(path, manifest)
        if not args.no_load_rng:
            restore_rng(state, self.groups.device, str(path / model_file(rank)))
        consumed = manifest.consumed_samples if manifest is not None else iteration * (args.train_batch_size or 0)
        skipped = int(state.get("skipped_steps", 0))
        self.engine.set_progress(iteration, consumed, skipped)
        if self.engine.spikes is not None:
            self.engine.spikes.restore(state.get("spike_window", []))
        if goes_on:
            self.saved_at = iteration
            if manifest is not None:
                self.run_id = manifest.run_id
                changed = _changed(manifest.config, json.loads(args.to_json())["given"]) if manifest.config else []
                if changed:
                    self.logger.info(f"keys changed since that checkpoint: {'; '.join(changed)}")
        tokens = int(state.get("consumed_tokens", consumed * args.seq_length))
        return Progress(iteration, consumed, skipped, tokens)

    def _takes_optimizer(self, path: Path, manifest: Manifest | None, goes_on: bool) -> bool:
        """Whether the optimizer's state is loaded. Raises CheckpointError when the run needs it and it is not there."""
        args = self.args
        if args.no_load_optim or manifest is None or manifest.optimizer:
            return not args.no_load_optim
        if 0 < manifest.iteration < args.train_iters:  # else it was still empty, or is not needed any more
            other = "restart: true to begin again" if goes_on else "finetune: true to begin at iteration 0"
            raise CheckpointError(
                f"{path}: was saved without the optimizer's state (no_save_optim: true); set no_load_optim: true to go "
                f"on with a fresh optimizer, or {other}"
            )
        return False

    def _resume_schedule(self, saved: Mapping[str, Any] | None, where: str) -> None:
        configured = self.schedule
        self.schedule = resumed_schedule(configured, saved, self.args, where)
        if self.schedule != configured:
            self.logger.info(f"use_checkpoint_lr_scheduler: {self.schedule.describe()}")

    def _check_forward(self, path: Path, manifest: Manifest | None) -> None:
        if self.args.checkpoint_validation_with_forward_pass:
            check_forward(self.engine, self.args, self.groups, path, manifest, self.logger.info)

    def _check_run(self, path: Path, manifest: Manifest | None, goes_on: bool) -> None:
        """Refuse to go on from another run, or on other data."""
        if manifest is None:
            return
        check_model(manifest.model, self.args, str(path))
        what = "`save` holds another run" if goes_on else "cannot resume"
        if manifest.seed != self.args.seed:
            fix = "change seed or save, or set restart: true" if goes_on else "change seed, or set finetune: true"
            raise CheckpointError(f"{path}: {what}: seed {manifest.seed} there, {self.args.seed} here; {fix}")
        if not self.args.allow_changed_data:
            changed = _changed(manifest.data["files"], self.data) + _changed(manifest.data["order"], self.order)
            if changed:
                raise CheckpointError(
                    f"{path}: {what}: the training data or its order is not what it was trained on: "
                    f"{'; '.join(changed)}; set allow_changed_data: true to go on with the new data"
                )
        if manifest.tokenizer is not None and manifest.tokenizer != self.tokenizer.fingerprint():
            raise CheckpointError(f"{path}: was trained with another tokenizer; set vocab_file to the one it was")

    def _check_layout(self, path: Path, manifest: Manifest | None) -> None:
        """Optimizer state is read where the layout is the one it was written in."""
        if manifest is None:
            return  # GPT-NeoX: the files themselves say, see _load_optimizer
        saved, now = manifest.layout, self.layout
        keys = ["pipe", "tensor", "zero_stage", "precision"] + (["data"] if now.zero_stage > 0 else [])
        other = [f"{key} {getattr(saved, key)} there, {getattr(now, key)} here" for key in keys]
        other = [text for key, text in zip(keys, other, strict=True) if getattr(saved, key) != getattr(now, key)]
        if other:
            raise CheckpointError(
                f"{path}: optimizer state of another layout ({'; '.join(other)}); "
                "use that layout, or set no_load_optim: true to go on with the weights alone"
            )

    def _load_optimizer(self, path: Path, state: dict[str, Any], manifest: Manifest | None) -> None:
        """This rank's optimizer state, ours or GPT-NeoX's."""
        engine, where = self.engine, str(path)
        name = zero_file(self.groups.rank("data"), self.model_rank, self.args.params_dtype == "bf16")
        if manifest is not None:
            if engine.zero_stage == 0:
                engine.state.load_optimizer_state(state["optimizer"])
            else:
                engine.state.load_optimizer_state(engine.files.load(str(path / name))["optimizer_state_dict"])
            return
        if (path / name).exists() and engine.zero_stage in (1, 2):
            saved = engine.files.load(str(path / name))["optimizer_state_dict"]
            if self.args.gpt_j_residual and self.groups.size("tensor") > 1:
                first = self.groups.rank("pipe") * self.groups.size("tensor")
                ranks = [
                    engine.files.load(
                        str(path / zero_file(self.groups.rank("data"), first + i, self.args.params_dtype == "bf16"))
                    )["optimizer_state_dict"]
                    for i in range(self.groups.size("tensor"))
                ]
                saved = sum_bias_masters(ranks, self.groups.rank("tensor"), where)
            base_groups, sizes = engine.state.zero_partitions()
            engine.state.load_optimizer_state(zero_adam_state(saved, base_groups, sizes, where))
            return
        if engine.zero_stage == 3:
            raise CheckpointError(
                f"{where}: optimizer state of GPT-NeoX is not read into ZeRO 3; "
                "use zero_optimization.stage 0, 1 or 2, or set no_load_optim: true"
            )
        # ZeRO 0: state by parameter, which flat partitions can take too.
        engine.state.set_adam_state(torch_adam_state(state.get("optimizer"), engine.state.parameter_shapes(), where))


def _lock(save: Path) -> Any:
    """An open, locked file; the lock ends with the process, however it ends."""
    try:
        save.mkdir(parents=True, exist_ok=True)
        file = (save / ".lock").open("w")
    except OSError as problem:
        raise CheckpointError(f"{save}: cannot be written ({problem.strerror}); set another save") from problem
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as problem:
        text = f"{save}: another run is writing there; wait for it to end, or set another save"
        raise CheckpointError(text) from problem
    except OSError as problem:
        text = f"{save}: its file system takes no locks ({problem.strerror}), so two runs could mix; set another save"
        raise CheckpointError(text) from problem
    return file


def _changed(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two mappings, in words."""
    found = []
    for key in sorted({*saved, *now}):
        before, after = saved.get(key), now.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            found += [f"{key} {text}" for text in _changed(before, after)]
        elif before != after:
            found.append(f"{key} was {before}, is {after}")
    return found
