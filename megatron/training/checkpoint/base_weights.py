"""Sets the initial values of adapters (`lora`), and records and finds their base weights.

A checkpoint that holds only adapters records its base weights, so that they are found again.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.checkpointing import CheckpointError, find_checkpoint, read_manifest
from megatron.checkpointing.adapters import base_record, known_digests
from megatron.checkpointing.huggingface import find_hf, is_hf
from megatron.data.files import sha256
from megatron.distributed import on_rank_zero, run_on_all_ranks
from megatron.model.init import parameters_with_specs
from megatron.model.lora import begun_names, begun_values
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.training.checkpoint.source import CheckpointSource
from megatron.training.engine import Engine


def weight_digests(args: NeoXArgs, source: CheckpointSource, groups: ParallelGroups) -> dict[str, str]:
    """Returns the digest of each weight file of a checkpoint or HuggingFace folder, by name. Ranks share the
    work.

    For a source without path, fresh initial values, it returns the settings that determine these.
    """
    if source.path is None:
        methods = args.init_method, args.output_layer_init_method, args.init_method_std
        return {"initial values": f"seed {args.seed}, {methods}, {groups.device.type}"}
    digests_by_name, files = known_digests(source.path, source.is_hf)
    if not files:
        return digests_by_name
    local_files = files[groups.world_rank :: groups.world_size]
    digests = run_on_all_ranks(groups, lambda: {file.name: sha256(file) for file in local_files})
    return {name: digest for part in digests for name, digest in part.items()}


def describe_base(args: NeoXArgs, source: CheckpointSource, groups: ParallelGroups) -> dict[str, Any]:
    """Returns the path and the digest of the base weights of adapters, as manifests record them (`base`)."""
    return base_record(source.path, weight_digests(args, source, groups))


def base_source(args: NeoXArgs, base: Mapping[str, Any], groups: ParallelGroups, adapters: Path) -> CheckpointSource:
    """Returns the source of the base weights of a checkpoint that holds only adapters.

    It is `lora.base` if set, else the path in the checkpoint's manifest. base: the manifest's record.
    adapters: path of the checkpoint.
    Raises CheckpointError if the base weights are missing, or are not those that the adapters were trained
    on.
    """
    requested = args.lora["base"] if args.lora is not None else None
    path = requested or base["path"]
    place = f"lora.base ({args.origin('lora.base')})" if requested else f"the manifest of {adapters}"
    source = on_rank_zero(groups, lambda: _find_base(path, requested is not None, place))
    if describe_base(args, source, groups)["digest"] != base["digest"]:
        fix = "set lora.base to the checkpoint that they were trained on"
        if path is None:
            fix = "initial values depend on seed, init_method, output_layer_init_method and device type: restore these"
        base_words = "the initial values here" if path is None else path
        raise CheckpointError(
            f"{adapters}: its adapters were trained on other weights than {base_words} ({place}); {fix}"
        )
    return source


def _find_base(path: str | None, is_requested: bool, place: str) -> CheckpointSource:
    if path is None:
        return CheckpointSource(None, False)
    if is_hf(path):
        return CheckpointSource(find_hf(path), False, is_hf=True)
    if not Path(path).is_dir():
        raise CheckpointError(f"{path}: no such folder of base weights ({place}); set lora.base to their folder")
    return CheckpointSource(
        find_checkpoint(path) if is_requested and read_manifest(path) is None else Path(path), False
    )


@torch.no_grad()
def begin_adapters(engine: Engine) -> None:
    """Set those initial values of adapters that depend on the model's weights, one layer after another.

    They are DoRA's magnitudes and the copies of `modules_to_save`. All ranks call it together.
    """
    groups, stage = engine.groups, engine.stage
    params = parameters_with_specs(stage, engine.args)
    names = {
        layer: begun_names(name for param_layer, name, *_ in params if param_layer == layer) for layer, *_ in params
    }
    names = {layer: layer_names for layer, layer_names in names.items() if layer_names}
    if not names:
        return
    initial_values: dict[int, dict[str, Tensor]] = {}
    for layer, weights in engine.gather_weights(dict.fromkeys(names, 0), lambda value: value.clone()):
        module = stage.layers[str(layer)] if str(layer) in stage.layers else None
        values = begun_values(
            module, {name: w.to(groups.device) for name, w in weights.items()}, groups.group("tensor")
        )
        initial_values[layer] = {name: value.float().contiguous() for name, value in values.items()}
    data = groups.group("data_context")
    if data is not None:
        for layer, name, _, spec in params:
            if name not in names.get(layer, ()):
                continue
            shape = spec.local_shape(groups.size("tensor"))
            value = initial_values.setdefault(layer, {}).setdefault(name, torch.empty(shape, device=groups.device))
            dist.broadcast(value, groups.members["data_context"][0], group=data)
    engine.set_weights(initial_values)
