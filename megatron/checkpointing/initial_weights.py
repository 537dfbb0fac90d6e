"""The weights that a run begins with, as a checkpoint of iteration 0: made without GPUs, data or an
engine."""

import json
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

from megatron.checkpointing import layout
from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.huggingface.exporting import LayerProgress, check_space, no_progress
from megatron.checkpointing.manifest import Manifest, ParallelLayout, model_keys, read_manifest
from megatron.checkpointing.publish import new_checkpoint, publish
from megatron.checkpointing.resharding import bare_state, write_model_files
from megatron.checkpointing.tensor_files import FileRecord
from megatron.checkpointing.weights import save_layer
from megatron.model.init import initial_whole
from megatron.model.weight_map import layer_params
from megatron.mpu import ParamSpec
from megatron.neox_arguments import NeoXArgs

_MADE_FROM = "initial values"


def write_initial_weights(args: NeoXArgs, tokenizer: str | None, each: LayerProgress = no_progress) -> Path:
    """Write `<save>/global_step0` with the weights that `seed` gives, in fp32, and let `latest` name it.

    They are drawn by the CPU's generator, so they are the same on every machine, and what a run on CPUs
    begins with in any layout. args: with `padded_vocab_size`; its tensor and pipeline sizes say into which
    files they go, and a run of any layout loads them. tokenizer: its fingerprint. One layer is in memory at a
    time. The same weights that are there already are left as they are. Raises CheckpointError.
    """
    if args.save is None:
        raise args.error("save", "names no folder; --init-only writes the weights there")
    if args.lora is not None:
        raise args.error("lora", "adapters are begun by the run that trains them; leave it out of --init-only")
    save, specs, model = Path(args.save), layer_params(args), model_keys(args)
    methods = [args.init_method, args.output_layer_init_method, args.init_method_std]
    made_from = f"{_MADE_FROM} {json.dumps([args.seed, *methods])}"
    final = save / layout.step_tag(0)
    if (there := _already(final, save)) is not None:
        if (there.run_id, there.model, there.layout.tensor) == (made_from, json.loads(json.dumps(model)), args.tp):
            return final
        raise CheckpointError(f"{save}: holds other weights or a run; give another save")
    needed = 4 * sum(_size(spec) for layer in specs.values() for spec in layer)
    pipe = args.pp
    with new_checkpoint(save, 0, needed * (1 if pipe else 2), check_space) as temporary:
        records: list[FileRecord] = []
        for layer in each(sorted(specs), len(specs)):
            whole = {spec.name: initial_whole(spec, layer, args) for spec in specs[layer]}
            records += save_layer(temporary, layer, whole, args)
        records = records if pipe else []
        states = [bare_state(args, 0)] * (max(pipe, 1) * args.tp)
        records += write_model_files(temporary, states, sequential=pipe == 0)
        manifest = Manifest(
            run_id=made_from, iteration=0, consumed_samples=0, model=model, seed=args.seed, tokenizer=tokenizer,
            data={},
            layout=ParallelLayout(max(pipe, 1), 1, args.tp, 0, "fp32", max(pipe, 1) * args.tp),
            versions={"torch": version("torch")}, created=datetime.now(UTC).isoformat(timespec="seconds"),
            config=json.loads(args.to_json())["given"], files={record.name: record for record in records},
            optimizer=False,
        )  # fmt: skip
        return publish(temporary, save, 0, manifest, args.config_files)


def _already(final: Path, save: Path) -> Manifest | None:
    """The manifest of what is at iteration 0; None where the folder holds no checkpoint at all."""
    if not layout.list_checkpoints(save):
        return None
    manifest = read_manifest(final) if final.is_dir() else None
    if manifest is None or layout.read_latest(save) != layout.step_tag(0):
        raise CheckpointError(f"{save}: holds a run already; give another save")
    return manifest


def _size(spec: ParamSpec) -> int:
    return torch.Size(spec.shape).numel()
