"""The weights below adapters: read a layer at a time, and recognised again by a digest."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from torch import Tensor

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families import FAMILIES, from_hf, text_config
from megatron.checkpointing.families.family import Config
from megatron.checkpointing.huggingface.companion_files import HF_SUBFOLDER
from megatron.checkpointing.huggingface.folder import HFFolder, find_hf, has_hf_score, is_hf
from megatron.checkpointing.huggingface.importing import LoadLayers, hf_loader, vocab_size_from_hf
from megatron.checkpointing.huggingface.logit_check import plain_args
from megatron.checkpointing.huggingface.model_files import read_config
from megatron.checkpointing.layout import LATEST, find_checkpoint, is_tag
from megatron.checkpointing.manifest import Manifest, read_manifest, saved_model
from megatron.checkpointing.opening import OpenCheckpoint
from megatron.checkpointing.saved_config import checkpoint_args
from megatron.checkpointing.weights import has_score_head, load_weights
from megatron.data.files import sha256
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.tokenizer import padded_vocab_size

ReadLayer = Callable[[int], dict[str, Tensor]]
_HF_WEIGHTS = (("*.safetensors", "*.bin"),)
_OUR_WEIGHTS = ("layer_*",), ("mp_rank_*",)  # the second without a pipeline
_ROWS = "padded_vocab_size"
_ROWS_MULTIPLE = 128  # as imports pad the vocabulary


def known_digests(path: Path, of_hf: bool) -> tuple[dict[str, str], list[Path]]:
    """(the digest of each file of weights that a manifest knows, the files whose digests are to be made)."""
    manifest = None if of_hf else read_manifest(path)
    for kinds in _HF_WEIGHTS if of_hf else _OUR_WEIGHTS:
        if manifest is not None:
            known = {name: of.sha256 for name, of in manifest.files.items() if any(map(PurePath(name).match, kinds))}
            if known:
                return known, []
        files = sorted(file for kind in kinds for file in path.glob(kind))
        if files and manifest is None:
            return {}, files
    raise CheckpointError(f"{path}: holds no weights")


def base_record(path: Path | None, digests: Mapping[str, str]) -> dict[str, Any]:
    """What a manifest says of the weights below adapters: where they are, and a digest of them."""
    text = json.dumps(dict(sorted(digests.items())), sort_keys=True)
    return {
        "path": None if path is None else str(path.resolve()), "digest": hashlib.sha256(text.encode()).hexdigest()
    }  # fmt: skip


def checkpoint_folder(path: str | Path, iteration: int | None = None) -> Path:
    """One checkpoint: `path` itself where that is a global_stepN, else the one of `iteration` in it, or that
    `latest` names. Raises CheckpointError."""
    folder = Path(path)
    alone = iteration is None and is_tag(folder.name) and not (folder / LATEST).exists()
    return folder if alone and folder.is_dir() else find_checkpoint(folder, iteration)


def family_below(path: str | Path | None) -> str | None:
    """The family of the weights below adapters by the config.json that came with them; None where they came
    without one, or cannot be had. path: a checkpoint, or a HuggingFace folder or name on the Hub."""
    try:
        model_type = text_config(config_below(path)).get("model_type")
    except CheckpointError:
        return None
    return model_type if model_type in FAMILIES else None


def config_below(path: str | Path | None) -> Config:
    """The config.json that came with the weights below adapters, as of `family_below`; {} without one."""
    try:
        if path is None:
            return {}
        return read_config(find_hf(path) if is_hf(path) else checkpoint_folder(path) / HF_SUBFOLDER)
    except CheckpointError:
        return {}


def adapter_model(manifest: Manifest) -> Mapping[str, Any]:
    """`Manifest.model`; of adapters alone over a HuggingFace model without the rows of vocabulary, which a
    run pads at will, unless copies of embedding or head have them."""
    copies = (manifest.model.get("lora") or {}).get("modules_to_save")
    below = None if manifest.base is None or copies else manifest.base["path"]
    if below is None or not is_hf(below):
        return manifest.model
    return {key: value for key, value in manifest.model.items() if key != _ROWS}


def saved_rows(path: Path, args: NeoXArgs, tokens: int) -> int | None:
    """`padded_vocab_size` for a run that starts from a checkpoint, by this or by the HuggingFace model below
    its adapters; None where neither says it. tokens: of the run's tokenizer. Raises CheckpointError."""
    manifest = read_manifest(path)
    saved = saved_model(path) if manifest is None else adapter_model(manifest)
    if manifest is None or manifest.base is None or _ROWS in saved:
        return saved.get(_ROWS)
    below = (args.lora or {}).get("base") or manifest.base["path"]
    return vocab_size_from_hf(find_hf(below), args, tokens)[0] if is_hf(below) else manifest.model.get(_ROWS)


@dataclass(frozen=True)
class BaseWeights:
    """A model that adapters are laid over. args: its configuration, on one process, without adapters. read:
    the whole tensors of a NeoX layer, by our names. path: a checkpoint, or a HuggingFace folder (`is_hf`).
    checkpoint: the first of these, which checks a file before `read` reads it."""

    path: Path
    is_hf: bool
    args: NeoXArgs
    read: ReadLayer
    checkpoint: OpenCheckpoint | None = None

    def verify(self, groups: ParallelGroups | None = None) -> None:
        """Check all files of a checkpoint now, as `OpenCheckpoint.verify`."""
        if self.checkpoint is not None:
            self.checkpoint.verify(groups=groups)

    def record(self) -> dict[str, Any]:
        """`base_record` of it."""
        known, files = known_digests(self.path, self.is_hf)
        return base_record(self.path, {**known, **{file.name: sha256(file) for file in files}})


def open_base(
    path: str | Path, args: NeoXArgs | None = None, tokens: int = 0, below: str | Path | None = None
) -> BaseWeights:
    """The weights of a checkpoint of ours or GPT-NeoX's, or of a HuggingFace model.

    args: their configuration where it is known. tokens: rows that the vocabulary of a HuggingFace model has
    at least, which is padded. below: what says that they are there, for errors. Raises CheckpointError.
    """
    says = "" if below is None else f" ({below} says so; --base names another place)"
    if is_hf(path):
        try:
            folder = find_hf(path)
        except CheckpointError as problem:
            raise CheckpointError(f"{problem}{says}") from problem
        args = args or _args_of_hf(folder, tokens)
        scores = has_hf_score(folder)
        args = plain_args(args.replace(lora=None))
        new_head = bool(args.score_head) and not scores
        load = hf_loader(folder, args, new_head=new_head)
        return BaseWeights(folder, True, args, partial(_read_hf, load, args, new_head))
    if not Path(path).is_dir():
        raise CheckpointError(f"{path}: the weights below the adapters are not there{says}")
    source = checkpoint_folder(path)
    opened = OpenCheckpoint(source)
    if opened.manifest is not None and opened.manifest.model.get("lora") is not None:
        raise CheckpointError(f"{source}: holds adapters itself; merge them first (tools/ckpts/adapter.py merge)")
    args = plain_args((args or checkpoint_args(source)).replace(lora=None))
    new_head = bool(args.score_head) and not has_score_head(source, args)
    return BaseWeights(source, False, args, partial(_read, opened, args, new_head), opened)


def _args_of_hf(folder: Path, tokens: int) -> NeoXArgs:
    opened = HFFolder(folder)
    rows = padded_vocab_size(max(opened.vocab_size, tokens), _ROWS_MULTIPLE, 1)
    return NeoXArgs.from_dict(from_hf(opened.config, opened.get, padded_vocab_size=rows)[0])


def _read(checkpoint: OpenCheckpoint, args: NeoXArgs, new_head: bool, layer: int) -> dict[str, Tensor]:
    if new_head and layer == args.num_layers + 4:
        return {}
    return load_weights(checkpoint, args, layers=[layer], tensor_rank=0, tensor_size=1, new_head=new_head)[layer]


def _read_hf(load: LoadLayers, args: NeoXArgs, new_head: bool, layer: int) -> dict[str, Tensor]:
    if new_head and layer == args.num_layers + 4:
        return {}
    return load(layers=[layer], tensor_rank=0, tensor_size=1)[layer]
