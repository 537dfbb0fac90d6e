"""Reads LoRA adapters from a checkpoint or a folder in peft's format, and merges them into base weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron.checkpointing.adapters.base import BaseWeights, ReadLayer, adapter_model, checkpoint_folder, open_base
from megatron.checkpointing.adapters.peft_folder import PeftFolder, is_peft
from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.huggingface.folder import is_hf
from megatron.checkpointing.huggingface.logit_check import plain_args
from megatron.checkpointing.manifest import Manifest, check_model, read_manifest
from megatron.checkpointing.opening import OpenCheckpoint
from megatron.checkpointing.saved_config import checkpoint_args
from megatron.checkpointing.weights import load_weights
from megatron.model import build_stage
from megatron.model.lora import merged_layer
from megatron.model.weight_map import adapter_params, is_adapter
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import ModelArgs, NeoXArgs
from megatron.neox_arguments.frozen import thaw

_RANK_OF_SUMS = (
    "adapters of reward models cannot be summed or scaled, because each has its own score head; merge one alone"
)


@dataclass(frozen=True)
class AdapterSource:
    """The LoRA adapters of one training run, opened for reading.

    path: the checkpoint, or the folder in peft's format.
    args: the configuration of the model with adapters, for one process.
    read: takes a NeoX layer index and returns the layer's full trained tensors by NeoX names: adapters, and
        copies of embedding and head.
    manifest: the checkpoint's; None for a peft folder.
    read_base: reads base weights in the same way, if the checkpoint holds them too; None if it holds only
        adapters.
    checkpoint: the opened checkpoint, which checks files before they are read; None for a peft folder.
    """

    path: Path
    args: NeoXArgs
    read: ReadLayer
    manifest: Manifest | None = None
    read_base: ReadLayer | None = None
    checkpoint: OpenCheckpoint | None = None

    def verify(self, groups: ParallelGroups | None = None) -> None:
        """Compare all files of the adapter checkpoint with its manifest; do nothing for a peft folder.

        groups: ranks among which the files are divided. Raises DamagedError."""
        if self.checkpoint is not None:
            self.checkpoint.verify(groups=groups)

    def modules(self) -> Mapping[int, nn.Module]:
        """Returns the model's modules with adapters by NeoX layer index, without values (meta device)."""
        stage = build_stage(self.args, ParallelGroups.single(torch.device("cpu")))
        return {int(index): module for index, module in stage.layers.items()}


def is_adapter_checkpoint(path: str | Path) -> bool:
    """Whether a checkpoint directory holds LoRA adapters, with or without their base weights."""
    manifest = read_manifest(path)
    return manifest is not None and manifest.model.get("lora") is not None


def open_adapter(path: str | Path, base_args: NeoXArgs | None = None) -> AdapterSource:
    """Opens the adapters in a checkpoint or in a folder in peft's format; files are checked when they are
    read.

    base_args: the configuration of the base model; required for a peft folder, which does not store it.
        Raises CheckpointError, also if the adapters do not fit `base_args`."""
    if is_peft(path):
        if base_args is None:
            raise CheckpointError(
                f"{path}: a folder in peft's format does not describe its base model; name the model with --base"
            )
        folder = PeftFolder(path)
        args = folder.args_over(plain_args(base_args.replace(lora=None)))
        return AdapterSource(Path(path), args, folder.reader(args))
    reason = "holds no adapters: it is neither a checkpoint of a run with `lora` nor a folder in peft's format"
    if is_hf(path):
        raise CheckpointError(f"{path}: {reason}")
    source = checkpoint_folder(path)
    opened = OpenCheckpoint(source)
    manifest = opened.manifest
    if manifest is None or manifest.model.get("lora") is None:
        raise CheckpointError(f"{source}: {reason}")
    saved = checkpoint_args(source)
    args = plain_args((base_args or saved).replace(lora=_section(saved)))
    if base_args is not None:
        check_model(adapter_model(manifest), args, str(source))
    if manifest.base is not None:
        params = adapter_params(args)
        return AdapterSource(source, args, partial(_read, opened, args, params), manifest, checkpoint=opened)
    read_layer = partial(_read, opened, args, None)
    return AdapterSource(
        source, args, lambda layer: {name: v for name, v in read_layer(layer).items() if is_adapter(name)}, manifest,
        lambda layer: {name: v for name, v in read_layer(layer).items() if not is_adapter(name)}, opened,
    )  # fmt: skip


def _section(args: ModelArgs) -> dict[str, Any]:
    """Returns the keys of `lora` except those of quantization, because base weights are read unquantised."""
    assert args.lora is not None
    return {key: thaw(value) for key, value in args.lora.items() if key not in ("quantization", "double_quant")}


def _read(
    checkpoint: OpenCheckpoint, args: ModelArgs, params: Mapping[int, Any] | None, layer: int
) -> dict[str, Tensor]:
    if params is not None and layer not in params:
        return {}
    return load_weights(checkpoint, args, layers=[layer], tensor_rank=0, tensor_size=1, params=params)[layer]


def open_with_base(
    paths: Sequence[str | Path], base: str | Path | None = None
) -> tuple[BaseWeights, list[AdapterSource]]:
    """Opens the adapters at `paths` and the base weights that they share.

    base: the base weights; None: those that the first adapters contain or name. Raises CheckpointError if an
        adapter was trained on other weights."""
    peft = [PeftFolder(path) if is_peft(path) else None for path in paths]
    rows = max((folder.vocab_size or 0 for folder in peft if folder is not None), default=0)
    checkpoint_path = next((path for path, folder in zip(paths, peft, strict=True) if folder is None), None)
    first_source = open_adapter(checkpoint_path) if checkpoint_path is not None else None
    args = None if first_source is None else first_source.args
    if base is not None:
        weights = open_base(base, args, rows)
    elif first_source is not None and first_source.read_base is not None:
        args = plain_args(first_source.args.replace(lora=None))
        weights = BaseWeights(first_source.path, False, args, first_source.read_base, first_source.checkpoint)
    else:
        weights = open_base(_named_base(first_source, peft[0], paths[0]), args, rows, paths[0])
    sources = [open_adapter(path, weights.args) for path in paths]
    for source in sources:
        check_base(source, weights)
    return weights, sources


def _named_base(source: AdapterSource | None, peft: PeftFolder | None, path: str | Path) -> str:
    """Returns the base weights that adapters name: an existing or absolute path, or `hf://NAME`.

    source: the adapters, if they are a checkpoint; peft: if they are a peft folder. path: of the adapters,
        for errors."""
    base = peft.base if source is None and peft is not None else None
    if source is not None and source.manifest is not None and source.manifest.base is not None:
        base = source.manifest.base["path"]
    if base is None:
        reason = "its adapters were trained on new, random weights" if source is not None else "it names no base model"
        raise CheckpointError(f"{path}: {reason}; pass the base weights with --base")
    return base if Path(base).exists() or base.startswith("/") else f"hf://{base}"


def check_base(source: AdapterSource, base: BaseWeights) -> None:
    """Raise CheckpointError if a checkpoint's adapters were trained on other weights than `base`.

    A peft folder is not checked, because it does not record its base weights."""
    if source.manifest is None or source.path == base.path:
        return
    recorded = source.manifest.base
    if recorded is not None and recorded["digest"] != base.record()["digest"]:
        raise CheckpointError(
            f"{source.path}: its adapters were trained on other weights than {base.path}; pass the right base model: "
            f"{recorded['path'] or 'the weights that their run initialised'}"
        )
    if source.read_base is not None:
        for layer in range(base.args.num_layers + 5):
            _same_weights(source, base, layer)


def _same_weights(source: AdapterSource, base: BaseWeights, layer: int) -> None:
    assert source.read_base is not None
    source_weights, base_weights = source.read_base(layer), base.read(layer)
    wrong = [
        name
        for name in source_weights
        if name not in base_weights or not torch.equal(source_weights[name], base_weights[name])
    ]
    if wrong:
        raise CheckpointError(
            f"{source.path}: its adapters were trained on other weights than {base.path}: {wrong[0]} of layer {layer} "
            "differs; pass the base model that these adapters were trained on"
        )


def merged_reader(
    base: ReadLayer, adapters: Sequence[tuple[AdapterSource, float]], dtype: torch.dtype | None = None
) -> ReadLayer:
    """Returns a function that takes a NeoX layer index and returns the layer's weights with all adapters
    merged in.

    base: reads the base weights of a layer.
    adapters: (adapters, factor) pairs; the weight change of each adapter is multiplied by its factor.
    dtype: of the result; None: that of the base weights.
    Raises CheckpointError if adapters of reward models would be summed or scaled."""
    modules = [source.modules() for source, _ in adapters]
    if any(source.args.score_head for source, _ in adapters) and (len(adapters) > 1 or adapters[0][1] != 1.0):
        raise CheckpointError(_RANK_OF_SUMS)

    def read(layer: int) -> dict[str, Tensor]:
        weights = base(layer)
        if dtype is not None:
            weights = {name: value.to(dtype) for name, value in weights.items()}
        parts = [
            (layers.get(layer, nn.Module()), source.read(layer), factor)
            for layers, (source, factor) in zip(modules, adapters, strict=True)
        ]
        return merged_layer(weights, parts)

    return read
