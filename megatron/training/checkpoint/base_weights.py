"""The weights below adapters: which they are, so that a checkpoint of adapters alone finds them again."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.checkpointing import CheckpointError, find_checkpoint, read_manifest
from megatron.checkpointing.adapters import base_record, known_digests
from megatron.checkpointing.huggingface import find_hf, is_hf
from megatron.data.files import sha256
from megatron.distributed import on_rank_zero, run_on_all_ranks
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.training.checkpoint.source import CheckpointSource


def weight_digests(args: NeoXArgs, source: CheckpointSource, groups: ParallelGroups) -> dict[str, str]:
    """A digest of each file of weights of a source, of initial values what they are made of. The work is
    shared out over ranks."""
    if source.path is None:
        methods = args.init_method, args.output_layer_init_method, args.init_method_std
        return {"initial values": f"seed {args.seed}, {methods}, {groups.device.type}"}
    known, files = known_digests(source.path, source.is_hf)
    if not files:
        return known
    local_files = files[groups.world_rank :: groups.world_size]
    digests = run_on_all_ranks(groups, lambda: {file.name: sha256(file) for file in local_files})
    return {name: digest for part in digests for name, digest in part.items()}


def describe_base(args: NeoXArgs, source: CheckpointSource, groups: ParallelGroups) -> dict[str, Any]:
    """What a manifest says of the weights below adapters: where they are, and a digest of them."""
    return base_record(source.path, weight_digests(args, source, groups))


def base_source(args: NeoXArgs, base: Mapping[str, Any], groups: ParallelGroups, adapters: Path) -> CheckpointSource:
    """The weights below the checkpoint `adapters`, from `lora.base` or from where its manifest (`base`) says.

    Raises CheckpointError where they are not there, or others.
    """
    asked = args.lora["base"] if args.lora is not None else None
    path = asked or base["path"]
    place = f"lora.base ({args.origin('lora.base')})" if asked else f"the manifest of {adapters}"
    source = on_rank_zero(groups, lambda: _found(path, asked is not None, place))
    if describe_base(args, source, groups)["digest"] != base["digest"]:
        fix = "set lora.base to the checkpoint that they were trained on"
        if path is None:
            fix = (
                "they are a function of seed, init_method, output_layer_init_method and kind of device: set these back"
            )
        what = "the initial values here" if path is None else path
        raise CheckpointError(f"{adapters}: its adapters were trained on other weights than {what} ({place}); {fix}")
    return source


def _found(path: str | None, asked: bool, place: str) -> CheckpointSource:
    if path is None:
        return CheckpointSource(None, False)
    if is_hf(path):
        return CheckpointSource(find_hf(path), False, is_hf=True)
    if not Path(path).is_dir():
        raise CheckpointError(f"{path}: the weights below adapters are not there ({place}); set lora.base to them")
    return CheckpointSource(find_checkpoint(path) if asked and read_manifest(path) is None else Path(path), False)
