"""Trained adapters, of a checkpoint of ours or of a folder in peft's format, and weights that have taken them
in."""

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
from megatron.checkpointing.huggingface.companion_files import HF_SUBFOLDER, read_companion_files
from megatron.checkpointing.huggingface.folder import is_hf
from megatron.checkpointing.huggingface.logit_check import plain_args
from megatron.checkpointing.manifest import Manifest, check_model, read_manifest
from megatron.checkpointing.opening import OpenCheckpoint
from megatron.checkpointing.saved_config import checkpoint_args
from megatron.checkpointing.weights import load_weights
from megatron.model import build_stage
from megatron.model.adapters import merged_layer
from megatron.model.weight_map import adapter_params, is_adapter
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs

_RANK_OF_SUMS = "several adapters of reward models cannot be summed: each has a score head of its own"


@dataclass(frozen=True)
class AdapterSource:
    """Adapters of one training.

    path: the checkpoint or folder. args: of the model with them, on one process. read: the whole tensors of
    adapters and copies of a NeoX layer, by our names. manifest: of a checkpoint of ours. below: reads the
    weights that the same checkpoint holds too; None where it holds adapters alone. checkpoint: of ours, which
    checks a file before these read it.
    """

    path: Path
    args: NeoXArgs
    read: ReadLayer
    manifest: Manifest | None = None
    below: ReadLayer | None = None
    checkpoint: OpenCheckpoint | None = None

    def verify(self, groups: ParallelGroups | None = None) -> None:
        """Check all files of a checkpoint now, as `OpenCheckpoint.verify`."""
        if self.checkpoint is not None:
            self.checkpoint.verify(groups=groups)

    @property
    def iteration(self) -> int:
        return 0 if self.manifest is None else self.manifest.iteration

    def companions(self) -> dict[str, bytes]:
        """The companion files of a HuggingFace model that stand beside it, by name."""
        return read_companion_files(self.path if self.manifest is None else self.path / HF_SUBFOLDER)

    def modules(self) -> Mapping[int, nn.Module]:
        """The layers of the model with them, by NeoX index, on the meta device."""
        stage = build_stage(self.args, ParallelGroups.single(torch.device("cpu")))
        return {int(index): module for index, module in stage.layers.items()}


def is_adapter_checkpoint(path: str | Path) -> bool:
    """Whether a checkpoint directory of ours holds adapters, alone or with the weights below them."""
    manifest = read_manifest(path)
    return manifest is not None and manifest.model.get("lora") is not None


def open_adapter(path: str | Path, over: NeoXArgs | None = None, iteration: int | None = None) -> AdapterSource:
    """The adapters of a path: a folder in peft's format, or a checkpoint of ours, each file of which is
    checked before it is read.

    over: the configuration of the model below; needed for peft's, which do not say it. Raises
    CheckpointError, also where they are of another model.
    """
    if is_peft(path):
        if over is None:
            raise CheckpointError(f"{path}: peft's folders do not say the model below; give it with --base")
        folder = PeftFolder(path)
        args = folder.args_over(plain_args(over.replace(lora=None)))
        return AdapterSource(Path(path), args, folder.reader(args))
    nothing = "holds no adapters: it is neither a checkpoint of a run with `lora` nor a folder of peft's"
    if is_hf(path):
        raise CheckpointError(f"{path}: {nothing}")
    source = checkpoint_folder(path, iteration)
    opened = OpenCheckpoint(source)
    manifest = opened.manifest
    if manifest is None or manifest.model.get("lora") is None:
        raise CheckpointError(f"{source}: {nothing}")
    saved = checkpoint_args(source)
    args = plain_args((over or saved).replace(lora=_section(saved)))
    if over is not None:
        check_model(adapter_model(manifest), args, str(source))
    if manifest.base is not None:
        params = adapter_params(args)
        return AdapterSource(source, args, partial(_read, opened, args, params), manifest, checkpoint=opened)
    whole = partial(_read, opened, args, None)
    return AdapterSource(
        source, args, lambda layer: {name: v for name, v in whole(layer).items() if is_adapter(name)}, manifest,
        lambda layer: {name: v for name, v in whole(layer).items() if not is_adapter(name)}, opened,
    )  # fmt: skip


def _section(args: NeoXArgs) -> dict[str, Any]:
    """`lora` of a run; here the weights below are those of the files, not in 4 bits."""
    assert args.lora is not None
    kept = {key: value for key, value in args.lora.items() if key not in ("quantization", "double_quant")}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in kept.items()}


def _read(
    checkpoint: OpenCheckpoint, args: NeoXArgs, params: Mapping[int, Any] | None, layer: int
) -> dict[str, Tensor]:
    if params is not None and layer not in params:
        return {}
    return load_weights(checkpoint, args, layers=[layer], tensor_rank=0, tensor_size=1, params=params)[layer]


def open_with_base(
    paths: Sequence[str | Path], base: str | Path | None = None
) -> tuple[BaseWeights, list[AdapterSource]]:
    """Adapters and the weights below them: `base`, else where the first of them says that these are.

    Raises CheckpointError where they were trained on other weights.
    """
    peft = [PeftFolder(path) if is_peft(path) else None for path in paths]
    rows = max((folder.vocab_size or 0 for folder in peft if folder is not None), default=0)
    ours = next((path for path, folder in zip(paths, peft, strict=True) if folder is None), None)
    first = open_adapter(ours) if ours is not None else None
    args = None if first is None else first.args
    if base is not None:
        weights = open_base(base, args, rows)
    elif first is not None and first.below is not None:
        args = plain_args(first.args.replace(lora=None))
        weights = BaseWeights(first.path, False, args, first.below, first.checkpoint)
    else:
        weights = open_base(*_named_base(first, peft, paths[0], args, rows))
    sources = [open_adapter(path, weights.args) for path in paths]
    for source in sources:
        check_base(source, weights)
    return weights, sources


def _named_base(
    first: AdapterSource | None,
    peft: Sequence[PeftFolder | None],
    path: str | Path,
    args: NeoXArgs | None,
    rows: int,
) -> tuple[str, NeoXArgs | None, int, Path]:
    named = peft[0].base if first is None and peft[0] is not None else None
    if first is not None and first.manifest is not None and first.manifest.base is not None:
        named = first.manifest.base["path"]
    if named is None:
        why = "they were trained over freshly initialised weights" if first is not None else "it names no base"
        raise CheckpointError(f"{path}: {why}; say with --base where the weights below are")
    return _address(named), args, rows, Path(path)


def _address(name: str) -> str:
    """A folder as it is, anything else as a name on the Hub."""
    return name if Path(name).exists() or name.startswith("/") else f"hf://{name}"


def check_base(source: AdapterSource, base: BaseWeights) -> None:
    """Raise CheckpointError where the adapters of a checkpoint were trained on other weights than `base`.
    peft's folders do not say on which."""
    if source.manifest is None or source.path == base.path:
        return
    recorded = source.manifest.base
    if recorded is not None and recorded["digest"] != base.record()["digest"]:
        raise CheckpointError(
            f"{source.path}: its adapters were trained on other weights than {base.path}: on those of "
            f"{recorded['path'] or 'a fresh start'}"
        )
    if source.below is not None:
        for layer in range(base.args.num_layers + 5):
            _same_weights(source, base, layer)


def _same_weights(source: AdapterSource, base: BaseWeights, layer: int) -> None:
    assert source.below is not None
    mine, theirs = source.below(layer), base.read(layer)
    wrong = [name for name in mine if name not in theirs or not torch.equal(mine[name], theirs[name])]
    if wrong:
        raise CheckpointError(
            f"{source.path}: its adapters were trained on other weights than {base.path}: layer {layer}: {wrong[0]}"
        )


def merged_reader(
    base: ReadLayer, adapters: Sequence[tuple[AdapterSource, float]], dtype: torch.dtype | None = None
) -> ReadLayer:
    """What reads the weights of a layer that have taken adapters in, each with its factor. dtype: of the
    result; None: that of the weights. Raises CheckpointError for what cannot be summed."""
    modules = [source.modules() for source, _ in adapters]
    if any(source.args.score_head for source, _ in adapters) and (len(adapters) > 1 or adapters[0][1] != 1.0):
        raise CheckpointError(_RANK_OF_SUMS)

    def read(layer: int) -> dict[str, Tensor]:
        weights = base(layer)
        if dtype is not None:
            weights = {name: value.to(dtype) for name, value in weights.items()}
        parts = [
            (of.get(layer, nn.Module()), source.read(layer), factor)
            for of, (source, factor) in zip(modules, adapters, strict=True)
        ]
        return merged_layer(weights, parts)

    return read
