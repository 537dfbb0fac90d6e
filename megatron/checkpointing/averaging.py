"""Averages the weights of several checkpoints of one model, with one layer in memory at a time."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpointing import layout
from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.manifest import Manifest, check_model, model_keys
from megatron.checkpointing.opening import OpenCheckpoint, open_checkpoint
from megatron.checkpointing.publish import new_checkpoint, publish
from megatron.checkpointing.saved_config import load_checkpoint_args
from megatron.checkpointing.tensor_files import FileRecord, copy_file, save_tensors
from megatron.checkpointing.weights import load_weights, save_layer
from megatron.model.weight_map import layer_params
from megatron.neox_arguments import ModelArgs


def average(
    sources: Sequence[str | Path],
    save: str | Path,
    *,
    progress: Callable[[Iterable[int], int], Iterable[int]] = lambda layers, count: layers,
) -> Path:
    """Write the mean weights of the checkpoints `sources` as `<save>/global_stepN`, and return this
    directory.

    Sums are in fp32. The result has the dtype, layout, counters, tokenizer and step N of the last source, and
    no optimizer state. It appears, and `latest` names it, only when it is complete.
    progress: wraps the iteration over layers, for a progress bar.
    Raises CheckpointError if sources are damaged or of different models."""
    paths, save = [Path(source) for source in sources], Path(save)
    if len({path.resolve() for path in paths}) != len(paths) or len(paths) < 2:
        raise CheckpointError("averaging needs at least two different checkpoints; remove duplicates or add another")
    last = paths[-1]
    args = load_checkpoint_args(last)[0]
    if args.lora is not None:
        text = "has LoRA adapters, which cannot be averaged; sum several of them with tools/ckpts/adapter.py merge"
        raise CheckpointError(f"{last}: {text}")
    opened = [open_checkpoint(path) for path in paths]
    for source in opened:
        check_model(_manifest(source).model, args, str(source.path))
    manifest = _manifest(opened[-1])
    final = save / layout.step_tag(manifest.iteration)
    if final.exists():
        raise CheckpointError(f"{final}: already exists; remove it, or choose another folder")
    specs, sharded_args = layer_params(args), args.replace(model_parallel_size=manifest.layout.tensor)
    size = sum(record.size for name, record in manifest.files.items() if not layout.is_optimizer_file(name))
    with new_checkpoint(save, manifest.iteration, size) as temporary:
        records: list[FileRecord] = []
        for layer in progress(sorted(specs), len(specs)):
            mean = _mean(opened, args, layer)
            records += save_layer(temporary, layer, mean, sharded_args)
            del mean
        for rank, state in opened[-1].model_states().items():
            rank_state = {**state, "module": None, "optimizer": None}
            rank_state.pop(layout.LOGITS, None)  # recorded for one source's weights, so wrong for the mean
            records.append(save_tensors(rank_state, temporary / layout.model_file(rank)))
        for name in sorted(name for name in manifest.files if "/" in name):  # tokenizer, configs, huggingface
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            records.append(copy_file(last / name, temporary / name, name))
        mean_manifest = replace(
            manifest,
            model={key: value for key, value in model_keys(args).items() if key in manifest.model},
            run_id="mean of " + ", ".join(str(path) for path in paths),
            files={record.name: record for record in records},
            optimizer=False,
            validation_loss=None,
        )
        return publish(temporary, save, mean_manifest.iteration, mean_manifest, {})


def _manifest(checkpoint: OpenCheckpoint) -> Manifest:
    if checkpoint.manifest is None:
        raise CheckpointError(
            f"{checkpoint.path}: has no manifest.json; rewrite this checkpoint with tools/ckpts/reshard.py first"
        )
    return checkpoint.manifest


def _mean(checkpoints: Sequence[OpenCheckpoint], args: ModelArgs, layer: int) -> dict[str, Tensor]:
    """Returns the mean over checkpoints of one layer's full tensors, by our names, in the last checkpoint's
    dtype.

    layer: NeoX index."""
    sums: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    for source in checkpoints:
        for name, value in load_weights(source, args, layers=[layer], tensor_rank=0, tensor_size=1)[layer].items():
            dtypes[name] = value.dtype
            sums[name] = sums[name].add_(value) if name in sums else value.to(torch.float32, copy=True)
    return {name: value.div_(len(checkpoints)).to(dtypes[name]) for name, value in sums.items()}
