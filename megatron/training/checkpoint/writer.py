"""Writes the checkpoints of a run, in the file formats of `megatron.checkpointing`."""

import math
import platform
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megatron.checkpointing import (
    EPHEMERAL,
    CheckpointError,
    FileRecord,
    Manifest,
    NonFiniteStateError,
    Retention,
    begin_checkpoint,
    layer_file,
    local_layer_state,
    model_file,
    model_keys,
    optimizer_file,
    publish,
    read_latest,
    readable_size,
    replace_file,
    rng_state,
    step_tag,
    zero_file,
)
from megatron.checkpointing.adapters import check_peft_names, export_peft, family_below, open_adapter
from megatron.checkpointing.families.convert import hf_config
from megatron.checkpointing.huggingface import HF_SUBFOLDER, export_hf, run_companion_files, unwritten_blocks
from megatron.checkpointing.huggingface.carried_tensors import CARRIED, carried_writer
from megatron.checkpointing.layout import LOGITS, is_optimizer_file
from megatron.checkpointing.manifest import MANIFEST
from megatron.checkpointing.object_store import ObjectStore, fetch_checkpoint, keep_manifest_only
from megatron.checkpointing.remote_staging import object_store_of
from megatron.distributed import on_rank_zero, run_on_all_ranks
from megatron.model.init import stage_parameters
from megatron.model.weight_map import adapter_params, is_adapter, layer_params
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.process import StopRequested, look_for_stop, stop_signal
from megatron.process.progress import ProgressBar
from megatron.training.checkpoint.async_writer import BackgroundWriter
from megatron.training.checkpoint.forward_check import fixed_logits
from megatron.training.checkpoint.host_copies import host_copies, lacks_memory
from megatron.training.checkpoint.pieces import (
    check_free_disk,
    empty_folder,
    is_hf_due,
    is_state_per_parameter,
    layers_unless,
    lock_folder,
    serialised,
    write_states,
)
from megatron.training.checkpoint.run_parts import Origin, RunParts, TrainingProgress
from megatron.training.metrics.run_metadata import local_sizes

_NEOX_ARGS = (  # keys that GPT-NeoX compares when it loads
    "num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings", "make_vocab_size_divisible_by",
    "padded_vocab_size", "tokenizer_type", "model_parallel_size",
)  # fmt: skip


def lock_save(args: NeoXArgs, groups: ParallelGroups) -> Any:
    """Reserve the folder `save` for this run; returns the lock, which holds while it lives in the process.

    All ranks call it before they look for a checkpoint: a run that ends meanwhile would leave a later
    one. Raises CheckpointError on all ranks if another run writes to the folder.
    """
    locks: list[Any] = []
    if args.save is not None:
        is_locking = groups.world_rank == 0
        run_on_all_ranks(groups, lambda: locks.append(lock_folder(Path(args.save_dir or ""))) if is_locking else None)
    return locks


class CheckpointWriter:
    """Saves the checkpoints of one run. All ranks call every method together; an exception on one is raised
    on all.

    With `async_save` training continues as soon as a copy is in host memory. There is one such copy at a
    time.
    """

    def __init__(self, run: RunParts, lock: Any = None) -> None:
        """lock: from `lock_save`."""
        args, groups, source = run.args, run.groups, run.source
        self.run, self.args, self.groups, self.engine, self.logger = run, args, groups, run.engine, run.logger
        self.schedule = run.schedule
        self.callback_states: Callable[[], Mapping[str, Mapping[str, Any]]] = dict  # set once there are callbacks
        self.before_save: list[Callable[[], None]] = []  # of callbacks; each raises if nothing may be saved
        self.run_id = on_rank_zero(groups, lambda: uuid.uuid4().hex)
        folder = None if source.path is None else source.path if source.is_hf else source.path / HF_SUBFOLDER
        # The companion files of an imported model are kept, and written again when it is exported.
        self.carried = run_companion_files(folder, run.tokenizer.files(), args)
        writes = folder is not None and groups.world_rank == 0
        self.carried_tensors = carried_writer(folder, source.is_hf) if writes and folder is not None else None
        exports = args.save_hf is not None or args.save_best is not None or args.push_to_hub
        if exports or run.method.exports_weights(args):
            # Raises for a model that HuggingFace's format cannot hold, or adapters that peft's format cannot.
            on_rank_zero(
                groups,
                lambda: hf_config(args) if args.lora is None else check_peft_names(args, family_below(args.load)),
            )
        self.saved_at: int | None = None
        self.gave_up_export = False  # on rank 0
        self._lock = lock
        self._logged: set[str] = set()
        self.base: Mapping[str, Any] | None = None
        self._bar: ProgressBar | None = None
        self._writer = BackgroundWriter(groups) if args.save is not None and args.async_save else None
        self._copies = host_copies(groups.device)
        self._temporary = Path()
        self._store: ObjectStore | None = object_store_of(args)
        if self._store is not None:
            run_on_all_ranks(groups, self._clear_staging)

    def _clear_staging(self) -> None:
        """Delete the files that an interrupted save has left on this machine's disk."""
        for leftover in Path(self.args.save_dir or "").glob(f".tmp_{step_tag(0)[:-1]}*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def go_on_from(self, origin: Origin) -> None:
        """Take schedule, run id and base weights from the start of the run, so that saves continue that run.

        origin: from `CheckpointLoader`.
        """
        self.schedule, self.saved_at, self.base = origin.schedule, origin.saved_at, origin.base
        self.run_id = origin.run_id or self.run_id

    def save(self, progress: TrainingProgress, *, in_background: bool = True, ephemeral: bool = False) -> None:
        """Write `<save>/global_stepN`, visible once it is complete, and make the file `latest` name it.

        in_background: with `async_save`, return after copying the state; `wait`, or the next `save`,
            completes the write.
        ephemeral: the next save deletes this checkpoint.
        """
        args, save = self.args, self.args.save_dir
        assert save is not None
        self.wait()
        if self.saved_at == progress.iteration:
            on_rank_zero(self.groups, lambda: self._export_missing(progress.iteration))
            return
        for check in self.before_save:
            check()
        in_background = self._check_space(Path(save)) and in_background
        with self._no_half_checkpoint(Path(save) / "begin"):
            self._temporary = temporary = on_rank_zero(self.groups, lambda: self._begin(save, progress.iteration))
            if self._store is not None:  # each machine has a folder of its own
                run_on_all_ranks(self.groups, lambda: temporary.mkdir(parents=True, exist_ok=True))
        manifest, configs, states = self.manifest(progress), args.public_config_files, self.states(progress, ephemeral)
        keep = Retention(args.keep_last_n_checkpoints, args.keep_checkpoints_every, args.keep_best_n_checkpoints)

        def finish(records: list[list[FileRecord]]) -> None:
            files = {record.name: record for per_rank in records for record in per_rank}
            complete = replace(manifest, files=files)
            path = publish(temporary, save, manifest.iteration, complete, configs, keep, self._store, self.say_once)
            self.logger.info(f"saved checkpoint {path if self._store is None else f'{self._store.url}/{path.name}'}")
            if is_hf_due(self.args, manifest.iteration):
                self._export(path)

        if in_background:
            assert self._writer is not None
            start_time, copied, held = time.monotonic(), list(states), self._copies.held
            note = f" (from {readable_size(held)} of page-locked memory, which later saves use again)" if held else ""
            self.logger.info(
                f"copied a checkpoint in {time.monotonic() - start_time:.2f} s; it is written while steps go on{note}"
            )
            self._writer.start(lambda: self._write(temporary, iter(copied)), finish)
        else:
            with self._no_half_checkpoint(temporary), self._progress():
                records = run_on_all_ranks(self.groups, lambda: self._write(temporary, states))
                on_rank_zero(self.groups, lambda: finish(records))
        self._say_unlocked(platform.node(), self._copies.problem)  # problems of other ranks are logged by the next save
        self.saved_at = progress.iteration

    def say_once(self, text: str) -> None:
        """Log a warning, unless it was logged before."""
        if text not in self._logged:
            self._logged.add(text)
            self.logger.warning(text)

    def _export_missing(self, iteration: int) -> None:
        """Export this iteration's checkpoint to HuggingFace's format, if a stop signal interrupted that."""
        path = Path(self.args.save_dir or "") / step_tag(iteration)
        is_missing = self._store is None and not (path.parent / HF_SUBFOLDER / path.name).exists()
        if is_missing and is_hf_due(self.args, iteration) and not stop_signal():
            self._export(path)

    def _export(self, path: Path) -> None:
        """Convert the checkpoint `path`, layer by layer, to HuggingFace's format in `<save>/huggingface`."""
        folder: Path | str = path.parent / HF_SUBFOLDER / path.name
        try:
            if self._store is not None:  # the files of the ranks are only in the object store
                fetch_checkpoint(self._store, path.name, path, lambda name: not is_optimizer_file(name))
            self._write_hf(path, folder, look=look_for_stop)
            if self._store is not None:
                folder = self._send_hf(Path(folder))
                keep_manifest_only(path)
        except StopRequested as stop:
            self.gave_up_export = True
            self.logger.info(f"save_hf: {folder} is not written, {stop} ends the run; {path} can be converted later")
            return
        except CheckpointError as problem:
            raise CheckpointError(f"save_hf: {problem}") from problem
        self.logger.info(f"saved {folder} in HuggingFace's format")

    def _write_hf(
        self,
        path: Path,
        folder: Path | str,
        notes: Mapping[str, bytes] | None = None,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        """Write the checkpoint `path` as a HuggingFace folder; with `lora`, its adapters in peft's format.

        notes: content of additional files by name. look: called before each layer; its exception ends the
        export, which then leaves no files.
        """
        if self.args.lora is not None:
            export_peft(open_adapter(path), folder, notes=notes, run_args=self.args)
        else:
            export_hf(path, self.args, folder, check=False, notes=notes, progress=partial(layers_unless, look))
            if (note := unwritten_blocks(folder, self.args)) is not None:
                self.logger.info(note)

    def save_hf_model(self, folder: Path, progress: TrainingProgress, notes: Mapping[str, bytes]) -> None:
        """Write the current model to `folder` in HuggingFace's format, with additional files.

        notes: content of the additional files by name. The complete folder replaces an earlier one. A write
        in the background is completed first.
        """
        self.wait()
        for check in self.before_save:
            check()
        parent_folder = folder.parent / f".tmp_{folder.name}_weights"
        temporary, manifest = parent_folder / step_tag(progress.iteration), self.manifest(progress)

        def finish(records: list[list[FileRecord]]) -> None:
            files = {record.name: record for per_rank in records for record in per_rank}
            replace_file(temporary / MANIFEST, replace(manifest, files=files).to_json().encode())
            self._write_hf(temporary, folder, notes)
            shutil.rmtree(parent_folder)

        with self._no_half_checkpoint(parent_folder):
            on_rank_zero(self.groups, lambda: empty_folder(parent_folder, temporary))
            records = run_on_all_ranks(self.groups, lambda: self._write(temporary, self._model_states()))
            on_rank_zero(self.groups, lambda: finish(records))

    def _send_hf(self, folder: Path) -> str:
        """Upload an exported folder to the object store, delete it here, and return its URL."""
        assert self._store is not None
        store = ObjectStore(f"{self._store.url}/{HF_SUBFOLDER}", self._store.patience)
        store.send_folder(folder, folder.name)
        shutil.rmtree(folder)
        return f"{store.url}/{folder.name}"

    def _begin(self, save: str, iteration: int) -> Path:
        temporary = begin_checkpoint(save, iteration)
        if self._store is not None:
            self._store.begin(step_tag(iteration))
        return temporary

    @property
    def writing(self) -> bool:
        """Whether this rank is still writing its part of a save in the background."""
        return self._writer is not None and self._writer.busy

    @property
    def failed(self) -> bool:
        """Whether a write in the background has failed; `wait` then raises its exception."""
        return self._writer is not None and self._writer.problem is not None

    def wait(self) -> None:
        """Wait until the last `save` is complete on disk. Raises CheckpointError if it could not be
        written."""
        if self._writer is None:
            return
        with self._no_half_checkpoint(self._temporary), self._progress():
            try:
                self._writer.wait()
            except Exception:
                self.saved_at = None
                raise

    def manifest(self, progress: TrainingProgress) -> Manifest:
        """Returns the manifest of a checkpoint at this progress, without its files. All ranks call it."""
        loss = math.nan if progress.validation_loss is None else progress.validation_loss
        return Manifest(
            run_id=self.run_id,
            iteration=progress.iteration,
            consumed_samples=progress.consumed_samples,
            layout=self.run.layout,
            model=model_keys(self.args),
            seed=self.args.seed,
            tokenizer=self.run.tokenizer.fingerprint(),
            data={
                **self.run.data_record(progress.consumed_samples),
                **self.run.method.data_record(progress.method_state),
            }
            if self.groups.world_rank == 0
            else {},
            versions={name: version(name) for name in ("torch", "deepspeed")},
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            config=self.args.public_values,
            settled=self.run.settled,
            optimizer=not self.args.compat_no_save_optim,
            validation_loss=None if not math.isfinite(loss) else loss,
            engine=self.engine.name,
            base=self.base,
        )

    @contextmanager
    def _no_half_checkpoint(self, temporary: Path) -> Iterator[None]:
        """In a `with` block that writes a checkpoint to `temporary`: if writing fails, delete it and raise
        CheckpointError. Earlier checkpoints stay untouched."""
        try:
            yield
        except (OSError, CheckpointError) as problem:
            if self.groups.world_rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            reason = getattr(problem, "strerror", None) or str(problem).splitlines()[0]
            folder = temporary.parent if self._store is None else self._store.url
            if isinstance(problem, NonFiniteStateError):
                raise NonFiniteStateError(
                    f"{folder}: no checkpoint is saved: {problem}; {self._last_saved()}"
                ) from problem
            raise CheckpointError(
                f"{folder}: the checkpoint could not be written ({reason}); earlier ones are untouched"
            ) from problem

    def _last_saved(self) -> str:
        tag = read_latest(self.args.save_dir) if self.args.save_dir is not None else None
        return f"start again from the last checkpoint, {tag}" if tag else "there is no earlier checkpoint"

    def _check_space(self, save: Path) -> bool:
        """Raise CheckpointError if a checkpoint does not fit on the disk of `save`.

        Returns whether to write in the background: with `async_save`, if a copy fits into free memory.
        """
        per_rank = run_on_all_ranks(self.groups, lambda: self._copies.memory_for(self.part_size()))
        if self._store is None:
            num_bytes = sum(rank.size for rank in per_rank)
            remedy = "make room, or set keep_last_n_checkpoints"
            on_rank_zero(self.groups, lambda: check_free_disk(save, num_bytes, remedy))
        else:
            num_bytes = sum(rank.size for rank in per_rank if rank.machine == platform.node())
            run_on_all_ranks(self.groups, lambda: check_free_disk(save, num_bytes, "set remote_staging"))
        for rank in per_rank:
            self._say_unlocked(rank.machine, rank.problem)
        if self._writer is None:
            return False
        lacks = lacks_memory(per_rank)
        if lacks is not None:
            self.logger.warning(f"async_save: {lacks}, so training waits for this save")
        return lacks is None

    def _say_unlocked(self, machine: str, problem: str | None) -> None:
        if problem is not None:
            self.say_once(f"{machine}: {problem}")

    def part_size(self) -> int:
        """Estimates the bytes that this rank writes to a checkpoint.

        They are weights, on data rank 0, and its share of Adam's moments, fp32 master weights and averages.
        """
        elements, trained = local_sizes(self.args, self.groups, self.engine.stage)
        elements = elements if self.base is None else trained
        writes_weights = self.groups.rank("data_context") == 0
        weights = elements * self.engine.dtype.itemsize if writes_weights else 0
        state = self.args.optimizer_bytes * trained // self.groups.size("data_context")
        return weights if self.args.compat_no_save_optim else weights + state

    def states(self, progress: TrainingProgress, ephemeral: bool = False) -> Iterator[tuple[str, Any]]:
        """Yields (name, content) of each file that this rank writes to a checkpoint, on the CPU.

        Content of type bytes is written unchanged. Ranks gather tensors together, so all iterate to the end.
        """
        args, groups, engine = self.args, self.groups, self.engine
        tensor_rank = groups.rank("tensor")
        yield from self._model_states()
        extra: dict[str, Any] = {}
        if args.checkpoint_validation_with_forward_pass:
            extra[LOGITS] = fixed_logits(engine)
        callback_states = self.callback_states()  # on all ranks, because a callback may communicate
        if groups.rank("data_context") == 0:
            extra |= {"callbacks": callback_states} if callback_states else {}
            state = {**self._model_state(progress), **extra}
            yield model_file(self.run.model_rank), state if is_state_per_parameter(args) else serialised(state)
        if not args.compat_no_save_optim and is_state_per_parameter(args):
            with_params = {layer for layer, _, param in stage_parameters(engine.stage) if param.requires_grad}
            layers = [layer for layer in self._own_layers() if layer in with_params]
            # The data ranks divide the layers among themselves.
            writers = {layer: i % groups.size("data_context") for i, layer in enumerate(layers)}
            for layer, states in engine.gather_state(writers, self._copies.copy):
                self._copies.wait()
                yield optimizer_file(layer, tensor_rank), states
        elif not args.compat_no_save_optim and (layout_state := engine.layout_state()) is not None:
            name = zero_file(groups.rank("data_context"), self.run.model_rank, args.params_dtype == "bf16")
            yield name, serialised(layout_state)
        if groups.world_rank == 0 and ephemeral:
            yield EPHEMERAL, b""

    def _model_states(self) -> Iterator[tuple[str, Any]]:
        """Yields (name, content) of this rank's model files: weights or adapters, tokenizer, files of an
        imported model."""
        tensor_rank, tensor_size = self.groups.rank("tensor"), self.groups.size("tensor")
        params, name_filter = (
            (layer_params(self.args), None) if self.base is None else (adapter_params(self.args), is_adapter)
        )
        first_writes = dict.fromkeys((layer for layer in self._own_layers() if self.base is None or layer in params), 0)
        for layer, tensors in self.engine.gather_weights(first_writes, self._copies.copy, name_filter):
            self._copies.wait()
            state = local_layer_state(
                layer, tensors, self.args, tensor_rank=tensor_rank, tensor_size=tensor_size, copy=False, params=params
            )
            yield layer_file(layer, tensor_rank), state
        if self.groups.world_rank == 0:
            for name, content in self.run.tokenizer.files().items():
                yield f"tokenizer/{name}", content
            for name, content in self.carried.items():
                yield f"{HF_SUBFOLDER}/{name}", content
            if self.carried_tensors is not None:
                yield f"{HF_SUBFOLDER}/{CARRIED}", self.carried_tensors

    @contextmanager
    def _progress(self) -> Iterator[None]:
        """In a `with` block that waits for `_write`, which may run in another thread, show its progress."""
        num_mb, visible = self.part_size() // 10**6, self.groups.world_rank == 0
        with ProgressBar("saving", num_mb, "MB", self.logger, visible=visible, transient=True) as self._bar:
            try:
                yield
            finally:
                self._bar = None

    def _write(self, path: Path, states: Iterator[tuple[str, Any]]) -> list[FileRecord]:
        """Write files, given as (name, content), to the folder `path`, and from there to the object store, if
        any; return their records."""
        size = 0

        def written(record: FileRecord) -> None:
            nonlocal size
            size += record.size
            if (bar := self._bar) is not None:
                bar.advance_to(min(bar.total, size // 10**6))
            if self._store is not None:
                self._store.upload(path / record.name, f"{path.name.removeprefix('.tmp_')}/{record.name}")
                if record.name != EPHEMERAL:
                    (path / record.name).unlink()

        return write_states(path, states, written)

    def _own_layers(self) -> list[int]:
        """Returns the layers that this stage writes; of a tied embedding, the first stage writes it."""
        kinds = {spec.index: spec.kind for spec in self.engine.stage.specs}
        return [i for i, kind in kinds.items() if kind != "head" or self.args.no_weight_tying]

    def _model_state(self, progress: TrainingProgress) -> dict[str, Any]:
        args = self.args
        return {
            **self.engine.model_state(),
            **({"optimizer": None} if args.compat_no_save_optim or is_state_per_parameter(args) else {}),
            "lr_scheduler": self.schedule.state_dict(progress.iteration),
            "iteration": progress.iteration,
            "consumed_samples": progress.consumed_samples,
            "consumed_tokens": progress.consumed_tokens,
            "row_tokens": dict(progress.row_tokens),
            "skipped_steps": progress.skipped,
            **self.run.method.save_state(progress.method_state),
            **({"delayed_scaling": scaling.state()} if (scaling := self.engine.stage.delayed_scaling) else {}),
            # DeepSpeed's own counters may be ahead by a step that changed nothing.
            "global_steps": progress.iteration,
            "global_samples": progress.consumed_samples,
            "args": {name: getattr(args, name) for name in _NEOX_ARGS},
            **({} if args.no_save_rng else rng_state(self.groups.device)),
        }
