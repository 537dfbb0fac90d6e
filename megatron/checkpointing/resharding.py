"""Reshards a checkpoint on disk for other tensor- and pipeline-parallel sizes, with its optimizer state.

One layer is in memory at a time. Files do not depend on data-parallel size and ZeRO stage; only the manifest
records them.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megatron.checkpointing import layout
from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.manifest import Manifest, ParallelLayout, model_keys, read_manifest, untrained_manifest
from megatron.checkpointing.neox_optimizer import NeoXOptimizer
from megatron.checkpointing.opening import OpenCheckpoint, open_checkpoint, verify
from megatron.checkpointing.optimizer_files import OptimizerFiles
from megatron.checkpointing.parameter_names import to_file_names
from megatron.checkpointing.publish import new_checkpoint, publish
from megatron.checkpointing.tensor_files import FileRecord, copy_file, save_tensors
from megatron.checkpointing.weight_files import describe_checkpoint
from megatron.checkpointing.weights import gather_layers, load_weights, save_layer
from megatron.model.weight_map import layer_params
from megatron.mpu import ParamSpec, shard
from megatron.neox_arguments import ModelArgs, NeoXArgs

PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def reshard(
    source: str | Path,
    save: str | Path,
    args: NeoXArgs,
    to: ParallelLayout,
    *,
    optimizer: bool = True,
    sequential: bool = False,
    naming: str | None = None,
    progress: Callable[[Iterable[int], int], Iterable[int]] = lambda layers, count: layers,
) -> Path:
    """Writes checkpoint `source` for another layout to `<save>/global_stepN`; returns this directory.

    args: the configuration of `source`.
    to: the new layout; its precision is ignored, because the source's is kept.
    optimizer: false leaves the optimizer's state out.
    sequential: write GPT-NeoX's files for runs without a pipeline, with weights in mp_rank files.
    naming: names of the weights in the files, a key of WEIGHT_NAMINGS; None: GPT-NeoX's for `args`.
    progress: wraps the iteration over layers, for a progress bar.

    One layer is in memory at a time. The result appears only when it is complete. After an interruption,
    repeat the call. Raises CheckpointError if the source is damaged, if its optimizer state cannot be
    resharded, or if the tensor-parallel size does not divide the model."""
    source, save = Path(source), Path(save)
    # Files are the same for every schedule.
    args = args.replace(
        model_parallel_size=to.tensor, pipe_parallel_size=to.pipe, pipeline_schedule="1f1b", pipeline_layers=None
    )
    final = save / layout.step_tag(layout.step_of(source))
    opened = open_checkpoint(source)
    manifest = opened.manifest
    source_manifest = manifest or _first_manifest(opened, args, optimizer)
    to = replace(to, precision=source_manifest.layout.precision)
    state = _optimizer_state(opened, args, optimizer)
    with_state, specs = optimizer and bool(state), layer_params(args)
    tensor_names = frozenset(
        name for layer in specs if layer >= 2 for name in _file_names(args, layer, specs[layer], naming)
    )
    if final.exists():
        existing = read_manifest(final)
        expected = (to, source_manifest.run_id, with_state)
        is_same = existing is not None and (existing.layout, existing.run_id, existing.optimizer) == expected
        is_same = is_same and describe_checkpoint(final).blocks == tensor_names
        if is_same and bool(layout.layer_files(final)) != sequential:
            verify(final)
            return final
        raise CheckpointError(f"{final}: already exists; remove it, or choose another folder")
    check_sizes(specs, to.tensor)
    size = sum(file.stat().st_size for file in source.rglob("*") if file.is_file())
    with new_checkpoint(save, layout.step_of(source), size * (2 if sequential else 1)) as temporary:
        records: list[FileRecord] = []
        for layer in progress(sorted(specs), len(specs)):
            weights = load_weights(opened, args, layers=[layer], tensor_rank=0, tensor_size=1)[layer]
            written = save_layer(temporary, layer, weights, args, naming)
            records += [] if sequential else written
            del weights
            if with_state:
                records += _reshard_state(state, temporary, layer, specs[layer], to.tensor)
        if isinstance(state, NeoXOptimizer):
            states = _model_states(opened, to, source_manifest, {"loss_scaler": state.scaler()})
        elif manifest is None:
            states = [bare_state(args, source_manifest.iteration)] * (to.pipe * to.tensor)
        else:
            states = _model_states(opened, to, manifest)
        records += [*write_model_files(temporary, states, sequential), *copy_folders(source, temporary)]
        files = {record.name: record for record in records}
        new_manifest = replace(source_manifest, layout=to, model=model_keys(args), optimizer=with_state, files=files)
        configs = {} if (source / "configs").is_dir() else args.public_config_files
        return publish(temporary, save, new_manifest.iteration, new_manifest, configs)


def _optimizer_state(checkpoint: OpenCheckpoint, args: NeoXArgs, required: bool) -> OptimizerFiles | NeoXOptimizer:
    """Returns a reader of a checkpoint's optimizer state: of this program or, if required, of GPT-NeoX.

    Raises CheckpointError if the state is required, but only the layout that wrote it can read it."""
    source, manifest = checkpoint.path, checkpoint.manifest
    if manifest is None and required:
        return NeoXOptimizer(source, args)
    state = OptimizerFiles(checkpoint)
    if required and not state and manifest is not None and manifest.optimizer:
        raise CheckpointError(
            f"{source}: only the layout that wrote its optimizer state can read this state; resume in that layout and "
            "save again, or leave the state out (--no-optimizer)"
        )
    return state


def _first_manifest(checkpoint: OpenCheckpoint, args: NeoXArgs, optimizer: bool) -> Manifest:
    """Makes a manifest for a checkpoint of GPT-NeoX, which has none.

    optimizer: true: the result keeps optimizer state, so a run can resume from it; false: a run starts from
        it at iteration 0."""
    source = checkpoint.path
    facts = describe_checkpoint(source)
    dtype = only_dtype(source, facts.dtypes)
    config = args.replace(compat_gqa_rows=None).public_values
    state = {"consumed_samples": _samples(checkpoint, args), "seed": args.seed} if optimizer else {}
    source_layout = ParallelLayout(1, 1, facts.tensor_size, 0, PRECISIONS[dtype], 1)
    return untrained_manifest(
        f"GPT-NeoX {source.resolve()}", source_layout, {}, config, (), optimizer=optimizer,
        iteration=layout.step_of(source), **state,
    )  # fmt: skip


def only_dtype(source: str | Path, dtypes: Collection[torch.dtype | None], hint: str = "") -> torch.dtype:
    """Returns the only element of `dtypes`, the dtypes of the weights of `source`.

    hint: end of the error. Raises CheckpointError for several dtypes, or one other than fp32, bf16 and fp16.
    """
    if len(dtypes) != 1 or not set(dtypes) <= PRECISIONS.keys():
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise CheckpointError(f"{source}: its weights have several or unknown dtypes ({names}){hint}")
    return next(dtype for dtype in dtypes if dtype is not None)


def _samples(checkpoint: OpenCheckpoint, args: NeoXArgs) -> int:
    """Returns the number of samples that the GPT-NeoX run had trained on when it saved `checkpoint`."""
    state = checkpoint.model_state()
    return int(state.get("global_samples") or layout.step_of(checkpoint.path) * (args.train_batch_size or 0))


def _file_names(args: ModelArgs, layer: int, specs: Sequence[ParamSpec], naming: str | None) -> Iterable[str]:
    """Returns a layer's tensor names in files of `naming`. Raises CheckpointError if `naming` has no names
    for them.

    naming: a key of WEIGHT_NAMINGS; None: GPT-NeoX's for `args`."""
    return to_file_names(layer, {spec.name: torch.empty(spec.shape, device="meta") for spec in specs}, args, naming)


def check_sizes(specs: Mapping[int, Sequence[ParamSpec]], tensor_size: int) -> None:
    """Raise CheckpointError if some parameter cannot be split evenly over `tensor_size` ranks.

    specs: the parameters, by NeoX layer index."""
    for layer, layer_specs in specs.items():
        for spec in layer_specs:
            if spec.axis is not None and any(block % tensor_size for block in spec.blocks):
                raise CheckpointError(
                    f"layer {layer}: {spec.name} has {' + '.join(map(str, spec.blocks))} rows or columns, which "
                    f"{tensor_size} tensor ranks do not divide; choose another tensor-parallel size"
                )


def _reshard_state(
    state: OptimizerFiles | NeoXOptimizer, temporary: Path, layer: int, specs: Sequence[ParamSpec], tensor_size: int
) -> list[FileRecord]:
    trained = {name for _, name in state.names([layer])}
    trained_specs = [spec for spec in specs if spec.name in trained and (not spec.shared or layer == 2)]
    if not trained_specs:
        return []
    full_state = {spec.name: state.read(layer, spec, 0, 1) for spec in trained_specs}
    records = []
    for rank in range(tensor_size):
        sharded: dict[str, dict[str, Tensor]] = {
            spec.name: {
                key: (value if value.dim() == 0 else shard(value, spec, rank, tensor_size)).clone(
                    memory_format=torch.contiguous_format
                )
                for key, value in full_state[spec.name].items()
            }
            for spec in trained_specs
        }
        records.append(save_tensors(sharded, temporary / layout.optimizer_file(layer, rank)))
    return records


def _model_states(
    source: OpenCheckpoint, to: ParallelLayout, manifest: Manifest, extra: Mapping[str, Any] = MappingProxyType({})
) -> list[dict[str, Any]]:
    """Returns the content of the mp_rank files of a resharded checkpoint, one per rank, without weights.

    Every rank gets counters, schedule and random states of the source's first rank. Saved logits of the last
    pipeline stage are sharded over the new tensor ranks. extra: further entries for every rank."""
    states = list(source.model_states().values())
    base_state: dict[str, Any] = {**states[0], "module": None, "optimizer": None, "mp_world_size": to.tensor, **extra}
    if isinstance(base_state.get("args"), dict):
        base_state["args"] = {**base_state["args"], "model_parallel_size": to.tensor}
    parts = [rank_state[layout.LOGITS] for rank_state in states if rank_state.get(layout.LOGITS) is not None]
    parts = parts[-manifest.layout.tensor :]
    sharded_logits = torch.cat(parts, dim=-1).chunk(to.tensor, dim=-1) if parts else ()
    new_states = []
    for pipe in range(to.pipe):
        for rank in range(to.tensor):
            state = dict(base_state)
            if sharded_logits:
                state[layout.LOGITS] = sharded_logits[rank].clone() if pipe == to.pipe - 1 else None
            new_states.append(state)
    return new_states


def bare_state(args: ModelArgs, iteration: int) -> dict[str, Any]:
    """Returns the content of an mp_rank file without weights, schedule and random states.

    GPT-NeoX's converters write the same."""
    keys = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings", "padded_vocab_size")
    return {
        "module": None, "optimizer": None, "lr_scheduler": None, "iteration": iteration, "global_steps": iteration,
        "skipped_steps": 0, "dp_world_size": 1, "mp_world_size": args.tp,
        "args": {**{key: getattr(args, key) for key in keys}, "model_parallel_size": args.tp},
    }  # fmt: skip


def write_bare_files(path: Path, args: ModelArgs, iteration: int, sequential: bool = False) -> list[FileRecord]:
    """Write the mp_rank file of every rank of `args`, without schedule and random states; return their
    records.

    sequential: move the weights from the layer files in `path` into the mp_rank files."""
    return write_model_files(path, [bare_state(args, iteration)] * (args.pp * args.tp), sequential)


def write_model_files(path: Path, states: Sequence[Mapping[str, Any]], sequential: bool) -> list[FileRecord]:
    """Write the mp_rank file of each rank; returns their records.

    states: content of each file. sequential: move the weights from the layer files in `path` into the mp_rank
        files."""
    records = []
    for rank, state in enumerate(states):
        module = gather_layers(path, rank) if sequential else None
        records.append(save_tensors({**state, "module": module}, path / layout.model_file(rank)))
    if sequential:
        for file in layout.layer_files(path).values():
            file.unlink()
    return records


def copy_folders(source: Path, temporary: Path) -> list[FileRecord]:
    """Copy `tokenizer/`, `configs/` and `huggingface/` of a checkpoint; returns the files' records."""
    records = []
    for file in sorted(path for path in source.glob("*/**/*") if path.is_file()):
        name = str(file.relative_to(source))
        (temporary / name).parent.mkdir(parents=True, exist_ok=True)
        records.append(copy_file(file, temporary / name, name))
    return records
