"""Writes a run's initial weights as a checkpoint of iteration 0, without GPUs, data or an engine."""

import json
from pathlib import Path

import torch

from megatron.checkpointing import layout
from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.huggingface.exporting import LayerProgress, check_space, no_progress
from megatron.checkpointing.huggingface.weight_writer import weight_bytes
from megatron.checkpointing.manifest import Manifest, ParallelLayout, model_keys, read_manifest, untrained_manifest
from megatron.checkpointing.publish import new_checkpoint, publish
from megatron.checkpointing.resharding import write_bare_files
from megatron.checkpointing.tensor_files import FileRecord
from megatron.checkpointing.weights import save_layer
from megatron.model.init import initial_weight
from megatron.model.weight_map import layer_params
from megatron.neox_arguments import NeoXArgs


def write_initial_weights(args: NeoXArgs, tokenizer: str | None, progress: LayerProgress = no_progress) -> Path:
    """Writes `<save>/global_step0` with the initial weights of `seed`, in fp32, and sets `latest` to it.

    args: the run's configuration, with `padded_vocab_size` set. Its tensor and pipeline sizes decide the
        files, which a run of any layout can load.
    tokenizer: fingerprint of the run's tokenizer, for the manifest; None: unknown.

    Weights are drawn by the CPU's generator, so they are the same on every machine. A run on CPUs starts with
    the same weights, in any layout. One layer is in memory at a time. Existing files with the same weights
    are left unchanged. Raises CheckpointError."""
    if args.save is None:
        raise args.error("save", "is not set; set it to the folder that --init-only should write to")
    if args.lora is not None:
        raise args.error(
            "lora",
            "--init-only writes no adapters; leave lora out, because the run that trains adapters initialises them",
        )
    save, specs, model = Path(args.save), layer_params(args), model_keys(args)
    methods = [args.init_method, args.output_layer_init_method, args.init_method_std]
    made_from = f"initial values {json.dumps([args.seed, *methods])}"
    final = save / layout.step_tag(0)
    if (existing := _existing_manifest(final, save)) is not None:
        expected = (made_from, json.loads(json.dumps(model)), args.tp)
        if (existing.run_id, existing.model, existing.layout.tensor) == expected:
            return final
        raise CheckpointError(
            f"{save}: already holds other weights or checkpoints of a run; set save to another folder"
        )
    size = weight_bytes((spec.shape for layer in specs.values() for spec in layer), torch.float32)
    with new_checkpoint(save, 0, size, check_space) as temporary:
        records: list[FileRecord] = []
        for layer in progress(sorted(specs), len(specs)):
            tensors = {spec.name: initial_weight(spec, layer, args) for spec in specs[layer]}
            records += save_layer(temporary, layer, tensors, args)
        records += write_bare_files(temporary, args, 0)
        parallel, config = ParallelLayout.from_args(args, "fp32"), args.public_values
        manifest = untrained_manifest(made_from, parallel, model, config, records, seed=args.seed, tokenizer=tokenizer)
        return publish(temporary, save, 0, manifest, args.public_config_files)


def _existing_manifest(final: Path, save: Path) -> Manifest | None:
    """Returns the manifest of the checkpoint `final` of iteration 0; None if `save` holds no checkpoint.

    Raises CheckpointError if `save` holds checkpoints of a run."""
    if not layout.list_checkpoints(save):
        return None
    manifest = read_manifest(final) if final.is_dir() else None
    if manifest is None or layout.read_latest(save) != layout.step_tag(0):
        raise CheckpointError(f"{save}: already holds checkpoints of a run; set save to another folder")
    return manifest
