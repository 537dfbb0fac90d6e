"""A checkpoint on disk cut for other tensor-parallel and pipeline sizes, optimizer state included, layer by layer.

Data-parallel size and ZeRO stage leave no trace in our files; the manifest records them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpointing import layout as names
from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.files import FileRecord, load_tensors, save_tensors, write_bytes
from megatron.checkpointing.manifest import Layout, Manifest, model_keys, read_manifest, saved_model, verify
from megatron.checkpointing.optimizer_files import OptimizerFiles
from megatron.checkpointing.publish import begin, publish
from megatron.checkpointing.weights import load_weights, local_layer_state
from megatron.model.weight_map import ParamSpec, layer_params, shard
from megatron.neox_arguments import NeoXArgs, load

_LOGITS = "checkpoint_validation_logits"


def checkpoint_args(path: str | Path, config_files: Sequence[str | Path] = ()) -> NeoXArgs:
    """The configuration of a checkpoint: of `config_files`, else what its manifest keeps, else its `configs` folder.

    The padded vocabulary is the checkpoint's. Raises CheckpointError when there is none of these; ConfigError.
    """
    path = Path(path)
    manifest, vocabulary = read_manifest(path), saved_model(path).get("padded_vocab_size")
    known = {"padded_vocab_size": vocabulary} if vocabulary else {}
    files = list(config_files)
    if not files and manifest is not None and manifest.config:
        return NeoXArgs.from_dict({**manifest.config, **known})
    files = files or sorted(file for kind in ("yml", "yaml", "json") for file in path.glob(f"configs/*.{kind}"))
    if not files:
        raise CheckpointError(f"{path}: does not say how its model was configured; give its config file")
    args = load(files, known)
    if args.padded_vocab_size is None:
        raise CheckpointError(f"{path}: does not say padded_vocab_size; set it in the config file")
    return args


def reshard(
    source: str | Path,
    save: str | Path,
    args: NeoXArgs,
    to: Layout,
    *,
    optimizer: bool = True,
    each: Callable[[Iterable[int], int], Iterable[int]] = lambda layers, count: layers,
) -> Path:
    """Write checkpoint `source` (of `args`) into `<save>/global_stepN` for layout `to` (its precision is the
    source's); returns that directory.

    optimizer: false leaves its state out. each: goes through the layers, for a progress bar. One layer at a time is in
    memory. Nothing is visible until it is whole: an interrupted call is simply made again.
    Raises CheckpointError when the source is damaged, has no state to cut, or the sizes do not divide the model.
    """
    source, save = Path(source), Path(save)
    args = args.replace(model_parallel_size=to.tensor, pipe_parallel_size=to.pipe)
    final = save / names.step_tag(names.step_of(source))
    manifest = verify(source)
    if manifest is None:
        raise CheckpointError(
            f"{source}: has no manifest.json, as GPT-NeoX's; load it in a run with no_load_optim: true, which any "
            "layout can, and save it"
        )
    to = replace(to, precision=manifest.layout.precision)
    if final.exists():
        there = read_manifest(final)
        if there is not None and (there.layout, there.run_id) == (to, manifest.run_id):
            verify(final)
            return final
        raise CheckpointError(f"{final}: is there already; remove it, or choose another folder")
    state = OptimizerFiles(source)
    if optimizer and not state and manifest.optimizer:
        raise CheckpointError(
            f"{source}: its optimizer state can only be read by the layout that wrote it; go on with that once and "
            "save again, or leave the state out"
        )
    specs = layer_params(args)
    _check_sizes(specs, to.tensor)
    _check_space(source, save)
    temporary = begin(save, names.step_of(source))
    records: list[FileRecord] = []
    for layer in each(sorted(specs), len(specs)):
        weights = load_weights(source, args, layers=[layer], tensor_rank=0, tensor_size=1)[layer]
        for rank in range(to.tensor):
            local = {spec.name: shard(weights[spec.name], spec, rank, to.tensor) for spec in specs[layer]}
            ours = local_layer_state(layer, local, args, tensor_rank=rank, tensor_size=to.tensor)
            records.append(save_tensors(ours, temporary / names.layer_file(layer, rank)))
        del weights
        if optimizer and state:
            records += _reshard_state(state, temporary, layer, specs[layer], to.tensor)
    records += _model_files(source, temporary, to, manifest)
    records += _copied(source, temporary)
    made = replace(
        manifest,
        layout=to,
        model=model_keys(args),
        optimizer=optimizer and bool(state),
        files={record.name: record for record in records},
    )
    return publish(temporary, save, made.iteration, made, {})


def _check_sizes(specs: Mapping[int, Sequence[ParamSpec]], tensor_size: int) -> None:
    for layer, found in specs.items():
        for spec in found:
            if spec.axis is not None and any(block % tensor_size for block in spec.blocks):
                raise CheckpointError(
                    f"layer {layer}: {spec.name} has {' + '.join(map(str, spec.blocks))} rows or columns to cut, which "
                    f"{tensor_size} tensor ranks do not divide"
                )


def _check_space(source: Path, save: Path) -> None:
    needed = sum(file.stat().st_size for file in source.rglob("*") if file.is_file())
    save.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(save).free
    if free < needed:
        raise CheckpointError(f"{save}: takes about {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free; make room")


def _reshard_state(
    state: OptimizerFiles, temporary: Path, layer: int, specs: Sequence[ParamSpec], tensor_size: int
) -> list[FileRecord]:
    own = [spec for spec in specs if not spec.shared or layer == 2]
    whole = {spec.name: state.read(layer, spec, 0, 1) for spec in own}
    records = []
    for rank in range(tensor_size):
        cut: dict[str, dict[str, Tensor]] = {
            spec.name: {
                key: (value if value.dim() == 0 else shard(value, spec, rank, tensor_size)).clone(
                    memory_format=torch.contiguous_format
                )
                for key, value in whole[spec.name].items()
            }
            for spec in own
        }
        records.append(save_tensors(cut, temporary / names.optimizer_file(layer, rank)))
    return records


def _model_files(source: Path, temporary: Path, to: Layout, manifest: Manifest) -> list[FileRecord]:
    """Counters, schedule and random states of the first rank for every rank; logits of the last stage cut anew."""
    states = [load_tensors(file) for _, file in sorted(names.model_files(source).items())]
    first: dict[str, Any] = {**states[0], "module": None, "optimizer": None, "mp_world_size": to.tensor}
    if isinstance(first.get("args"), dict):
        first["args"] = {**first["args"], "model_parallel_size": to.tensor}
    parts = [found[_LOGITS] for found in states if found.get(_LOGITS) is not None]
    parts = parts[-manifest.layout.tensor :]
    cut = torch.cat(parts, dim=-1).chunk(to.tensor, dim=-1) if parts else ()
    records = []
    for pipe in range(to.pipe):
        for rank in range(to.tensor):
            own = dict(first)
            if cut:
                own[_LOGITS] = cut[rank].clone() if pipe == to.pipe - 1 else None
            records.append(save_tensors(own, temporary / names.model_file(pipe * to.tensor + rank)))
    return records


def _copied(source: Path, temporary: Path) -> list[FileRecord]:
    """Tokenizer and configs, as they are."""
    records = []
    for file in sorted(found for folder in ("tokenizer", "configs") for found in (source / folder).glob("**/*")):
        if file.is_file():
            name = str(file.relative_to(source))
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            records.append(write_bytes(file.read_bytes(), temporary / name, name))
    return records
