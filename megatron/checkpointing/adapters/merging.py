"""Writes checkpoints from LoRA adapters: base weights with adapters merged in, or adapters alone."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from megatron.checkpointing import layout
from megatron.checkpointing.adapters.base import BaseWeights
from megatron.checkpointing.adapters.peft_folder import PeftFolder
from megatron.checkpointing.adapters.sources import AdapterSource, merged_reader
from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families.multimodal import with_vocab_size
from megatron.checkpointing.huggingface.carried_tensors import CARRIED, carried_writer
from megatron.checkpointing.huggingface.companion_files import HF_SUBFOLDER, is_of_tokenizer, read_companion_files
from megatron.checkpointing.huggingface.exporting import LayerProgress, no_progress
from megatron.checkpointing.huggingface.importing import FREE
from megatron.checkpointing.huggingface.logit_check import LENGTH, ROWS, bound_of, neox_logits, some_tokens
from megatron.checkpointing.huggingface.model_files import CONFIG
from megatron.checkpointing.manifest import ParallelLayout, model_keys, read_manifest, untrained_manifest
from megatron.checkpointing.publish import new_checkpoint, publish
from megatron.checkpointing.resharding import PRECISIONS, write_bare_files
from megatron.checkpointing.tensor_files import FileRecord, save_tensors, write_bytes
from megatron.checkpointing.weights import local_layer_state, save_layer
from megatron.model.weight_map import adapter_params, layer_params
from megatron.neox_arguments import ModelArgs
from megatron.neox_arguments.frozen import thaw

# Allowed difference of fp32 logits relative to the largest logit; sums are rounded in another order.
BOUND = 1e-5


@dataclass(frozen=True)
class MergeComparison:
    """How far the logits of merged weights are from those of base weights plus adapters.

    name: path of the adapters.
    difference: the largest absolute difference of a logit, with merged weights in fp32.
    largest: the largest absolute logit.
    stored: the largest difference with merged weights rounded to their stored dtype; None if that is fp32.
    relative_bound: the allowed difference, relative to the largest logit if it is above 1.
    """

    name: str
    difference: float
    largest: float
    stored: float | None = None
    relative_bound: float = BOUND

    @property
    def bound(self) -> float:
        return self.relative_bound * max(1.0, self.largest)

    def __str__(self) -> str:
        rounded = f"; {self.stored:.2e} with weights rounded to their stored dtype" if self.stored is not None else ""
        return (
            f"{self.name}: largest difference between merged and unmerged logits {self.difference:.2e} (bound "
            f"{self.bound:.1e}, largest logit {self.largest:.2f}, at most {ROWS} x {LENGTH} tokens, fp32){rounded}"
        )


@torch.no_grad()
def unmerged_logits(base: BaseWeights, source: AdapterSource, tokens: Tensor) -> Tensor:
    """Returns fp32 logits `[batch, seq, padded vocabulary]` of base weights plus adapters that are not
    merged."""
    return neox_logits(source.args, lambda layer: {**base.read(layer), **source.read(layer)}, tokens)


@torch.no_grad()
def compare_merged(base: BaseWeights, source: AdapterSource) -> MergeComparison:
    """Compare the logits of base weights plus adapters with those after merging, on random tokens.

    Raises CheckpointError if they differ by more than `MergeComparison.bound`."""
    args, tokens = source.args.replace(lora=None), some_tokens(source.args)
    unmerged = unmerged_logits(base, source, tokens)
    merged = neox_logits(args, merged_reader(base.read, [(source, 1.0)], torch.float32), tokens)
    difference, largest = (unmerged - merged).abs().max().item(), unmerged.abs().max().item()
    stored = None
    if any(value.dtype != torch.float32 for layer in layer_params(args) for value in base.read(layer).values()):
        rounded = neox_logits(args, merged_reader(base.read, [(source, 1.0)]), tokens)
        stored = (unmerged - rounded).abs().max().item()
    comparison = MergeComparison(str(source.path), difference, largest, stored, bound_of(args, BOUND))
    if not difference <= comparison.bound:  # NaN too
        raise CheckpointError(f"merging changed the logits by more than the bound: {comparison}")
    return comparison


def write_merged(
    base: BaseWeights,
    adapters: Sequence[tuple[AdapterSource, float]],
    save: str | Path,
    *,
    progress: LayerProgress = no_progress,
) -> tuple[Path, list[MergeComparison]]:
    """Merges adapters into base weights, checks the logits, and writes `<save>/global_stepN`.

    adapters: (adapters, factor) pairs; the weight change of each adapter is multiplied by its factor.
    Returns the checkpoint's folder, and one comparison of logits for each pair. N is the iteration of the
    first adapters; a run that loads the result starts at iteration 0. Files of the tokenizer and of
    HuggingFace's folder are copied. One layer is in memory at a time. The folder appears only when it is
    complete. Raises CheckpointError."""
    save, first_source = Path(save), adapters[0][0]
    base.verify()
    for source, _ in adapters:
        source.verify()
    args = first_source.args.replace(lora=None)
    comparisons = [compare_merged(base, source) for source, _ in adapters]
    read, specs = merged_reader(base.read, adapters), layer_params(args)
    sources = ", ".join(f"{factor:g} x {source.path}" for source, factor in adapters)

    def write(folder: Path) -> tuple[list[FileRecord], set[torch.dtype]]:
        records, kinds = list[FileRecord](), set[torch.dtype]()
        for layer in progress(sorted(specs), len(specs)):
            tensors = read(layer)
            kinds |= {value.dtype for value in tensors.values()}
            records += save_layer(folder, layer, tensors, args)
        return records, kinds

    config = _saved_config(base, first_source)
    config.pop("lora", None)
    path = _publish(save, first_source, base, args, config, f"merged: {sources}", write, None)
    return path, comparisons


def write_adapters(
    base: BaseWeights, source: AdapterSource, save: str | Path, *, progress: LayerProgress = no_progress
) -> Path:
    """Write a checkpoint `<save>/global_stepN` that holds only adapters; a run with `lora` can load it.

    N is the iteration of the adapters; 0 for a peft folder. The manifest records the base weights. Raises
    CheckpointError."""
    base.verify()
    args, params = source.args, adapter_params(source.args)

    def write(folder: Path) -> tuple[list[FileRecord], set[torch.dtype]]:
        records, kinds = list[FileRecord](), set[torch.dtype]()
        for layer in progress(sorted(params), len(params)):
            tensors = source.read(layer)
            kinds |= {value.dtype for value in tensors.values()}
            state = local_layer_state(layer, tensors, args, tensor_rank=0, tensor_size=1, params=params)
            records.append(save_tensors(state, folder / layout.layer_file(layer, 0)))
        return records, kinds

    assert args.lora is not None
    section = {key: thaw(value) for key, value in args.lora.items() if value is not None}
    config = {**_saved_config(base, source), "lora": section, **({"score_head": True} if args.score_head else {})}
    return _publish(Path(save), source, base, args, config, f"adapters of {source.path}", write, base.record())


def _saved_config(base: BaseWeights, source: AdapterSource) -> dict[str, Any]:
    """Returns the configuration to store in the new checkpoint, with parallel sizes of 1.

    It is the configuration of the run that trained the adapters, or, for a peft folder, of the base model."""
    manifest = source.manifest or (None if base.is_hf else read_manifest(base.path))
    if manifest is not None:
        config = dict(manifest.config)
    else:
        config = source.args.replace(lora=None).public_values
    sizes = {"model_parallel_size": 1, "pipe_parallel_size": 1}
    return {**config, **sizes, "padded_vocab_size": source.args.padded_vocab_size}


def _publish(
    save: Path,
    source: AdapterSource,
    base: BaseWeights,
    args: ModelArgs,
    config: dict[str, Any],
    run_id: str,
    write: Callable[[Path], tuple[list[FileRecord], set[torch.dtype]]],
    base_record: Mapping[str, Any] | None,
) -> Path:
    iteration = 0 if source.manifest is None else source.manifest.iteration
    final = save / layout.step_tag(iteration)
    if final.exists():
        raise CheckpointError(f"{final}: already exists; remove it, or choose another folder")
    weights = base.path if base_record is None else source.path
    size = sum(file.stat().st_size for file in weights.iterdir() if file.is_file())
    with new_checkpoint(save, iteration, size) as temporary:
        records, kinds = write(temporary)
        records += write_bare_files(temporary, args, iteration)
        for name, content in _carried(base, source).items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            records.append(write_bytes(content, temporary / name, name))
        write_carried = carried_writer(base.path if base.is_hf else base.path / HF_SUBFOLDER, base.is_hf)
        if write_carried is not None:
            records.append(write_carried(temporary / HF_SUBFOLDER / CARRIED, f"{HF_SUBFOLDER}/{CARRIED}"))
        precision = PRECISIONS[next(iter(kinds))] if len(kinds) == 1 else "fp32"
        for key in ("fp16", "bf16"):
            config.pop(key, None)
        config["precision"] = {"bf16": "bfloat16"}.get(precision, precision)
        saved = source.manifest or (None if base.is_hf else read_manifest(base.path))
        keys = set(model_keys(args)) - set(FREE) if saved is None or not saved.model else {*saved.model, "lora"}
        model = {key: value for key, value in model_keys(args).items() if key in keys}
        manifest = untrained_manifest(
            run_id, ParallelLayout.from_args(args, precision), model, config, records, iteration=iteration,
            base=base_record, tokenizer=None if saved is None else saved.tokenizer,
        )  # fmt: skip
        text = f"# {run_id}\n{yaml.safe_dump(config, sort_keys=False)}"
        return publish(temporary, save, iteration, manifest, {"adapter.yml": text})


def _carried(base: BaseWeights, source: AdapterSource) -> dict[str, bytes]:
    """Returns the content of tokenizer and companion files for the new checkpoint, by path inside it.

    The adapters' tokenizer replaces the base model's, because it may have more tokens."""
    base_files = read_companion_files(base.path if base.is_hf else base.path / HF_SUBFOLDER)
    adapter_files = read_companion_files(source.path if source.manifest is None else source.path / HF_SUBFOLDER)
    if source.manifest is None:  # the README.md of a peft folder describes the adapter
        adapter_files = {name: content for name, content in adapter_files.items() if is_of_tokenizer(name)}
        adapter_files |= _resized(base_files, PeftFolder(source.path).vocab_size)
    if any(map(is_of_tokenizer, adapter_files)):
        base_files = {name: content for name, content in base_files.items() if not is_of_tokenizer(name)}
    carried = {f"{HF_SUBFOLDER}/{name}": content for name, content in {**base_files, **adapter_files}.items()}
    for folder in (base.path, source.path) if source.manifest is not None else (base.path,):
        files = (file for file in (folder / "tokenizer").rglob("*") if file.is_file())
        carried |= {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}
    return carried


def _resized(files: Mapping[str, bytes], rows: int | None) -> dict[str, bytes]:
    """Returns {"config.json": content} with `vocab_size` raised to at least `rows`.

    files: content of the base model's files by name. Returns {} if `rows` is None or `files` has no
        config.json."""
    if rows is None or CONFIG not in files:
        return {}
    config = with_vocab_size(json.loads(files[CONFIG]), rows)
    return {CONFIG: (json.dumps(config, indent=2) + "\n").encode()}
