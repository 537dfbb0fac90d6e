"""Reads the base weights of LoRA adapters one layer at a time, and identifies them by a digest."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from torch import Tensor

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families.convert import from_hf
from megatron.checkpointing.families.family import Config
from megatron.checkpointing.families.multimodal import text_config
from megatron.checkpointing.families.registry import FAMILIES
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
from megatron.neox_arguments import ModelArgs, NeoXArgs
from megatron.tokenizer import padded_vocab_size

ReadLayer = Callable[[int], dict[str, Tensor]]
_HF_WEIGHTS = (("*.safetensors", "*.bin"),)
_NEOX_WEIGHTS = ("layer_*",), ("mp_rank_*",)  # a checkpoint without pipeline may have only mp_rank_*
_ROWS = "padded_vocab_size"
_ROWS_MULTIPLE = 128  # imports pad the vocabulary to a multiple of this


def known_digests(path: Path, is_hf_folder: bool) -> tuple[dict[str, str], list[Path]]:
    """Returns the SHA-256 of each weight file by file name, as far as the manifest records them.

    Returns (digests, []) if the manifest lists the weight files, else ({}, paths of the weight files to
    hash). A HuggingFace folder (`is_hf_folder`) has no manifest. Raises CheckpointError if there are no
    weight files."""
    manifest = None if is_hf_folder else read_manifest(path)
    for kinds in _HF_WEIGHTS if is_hf_folder else _NEOX_WEIGHTS:
        if manifest is not None:
            digests = {
                name: record.sha256 for name, record in manifest.files.items() if any(map(PurePath(name).match, kinds))
            }
            if digests:
                return digests, []
        files = sorted(file for kind in kinds for file in path.glob(kind))
        if files and manifest is None:
            return {}, files
    raise CheckpointError(f"{path}: no weight files found; pass a checkpoint (global_stepN) or a HuggingFace folder")


def base_record(path: Path | None, digests: Mapping[str, str]) -> dict[str, Any]:
    """Returns {"path", "digest"} of the base weights, which the manifest of an adapter checkpoint stores.

    path: of the base weights; None: they are initial values, not read from a file.
    digests: SHA-256 of each weight file by name. "digest" is one SHA-256 computed over all of them."""
    text = json.dumps(dict(sorted(digests.items())), sort_keys=True)
    return {
        "path": None if path is None else str(path.resolve()), "digest": hashlib.sha256(text.encode()).hexdigest()
    }  # fmt: skip


def checkpoint_folder(path: str | Path, iteration: int | None = None) -> Path:
    """Returns the folder of one checkpoint. Raises CheckpointError if there is none.

    path: the checkpoint itself (a folder named global_stepN), or a folder that holds checkpoints. In the
        second case `iteration` selects the checkpoint; None: the one that the file `latest` names."""
    folder = Path(path)
    names_checkpoint = iteration is None and is_tag(folder.name) and not (folder / LATEST).exists()
    return folder if names_checkpoint and folder.is_dir() else find_checkpoint(folder, iteration)


def family_below(path: str | Path | None) -> str | None:
    """Returns the HuggingFace model type of the base weights of adapters, from their config.json.

    Returns None if the model type is not supported, or config.json is absent or cannot be fetched or read.
    path: of the base weights: a checkpoint, or a HuggingFace folder or name on the Hub."""
    try:
        model_type = text_config(config_below(path)).get("model_type")
    except CheckpointError:
        return None
    return model_type if model_type in FAMILIES else None


def config_below(path: str | Path | None) -> Config:
    """Returns the config.json stored with the base weights of adapters; {} if it is absent or cannot be read.

    path: of the base weights: a checkpoint, or a HuggingFace folder or name on the Hub."""
    try:
        if path is None:
            return {}
        return read_config(find_hf(path) if is_hf(path) else checkpoint_folder(path) / HF_SUBFOLDER)
    except CheckpointError:
        return {}


def adapter_model(manifest: Manifest) -> Mapping[str, Any]:
    """Returns the model settings that a run must share with an adapter checkpoint, by configuration key.

    The settings are `manifest.model`. If the base is a HuggingFace model, `padded_vocab_size` is left out,
    because each run may pad the vocabulary differently. It stays if the embedding or head was trained
    (`modules_to_save`)."""
    copies = (manifest.model.get("lora") or {}).get("modules_to_save")
    base_path = None if manifest.base is None or copies else manifest.base["path"]
    if base_path is None or not is_hf(base_path):
        return manifest.model
    return {key: value for key, value in manifest.model.items() if key != _ROWS}


def saved_rows(path: Path, args: ModelArgs, tokens: int) -> int | None:
    """Returns the `padded_vocab_size` of the checkpoint at `path`, for a run that starts from this
    checkpoint.

    If the checkpoint holds adapters of a HuggingFace model, the value is computed from that model. Returns
    None if it is not recorded. Raises CheckpointError.
    tokens: number of tokens of the run's tokenizer."""
    manifest = read_manifest(path)
    saved = saved_model(path) if manifest is None else adapter_model(manifest)
    if manifest is None or manifest.base is None or _ROWS in saved:
        return saved.get(_ROWS)
    base_path = (args.lora or {}).get("base") or manifest.base["path"]
    return vocab_size_from_hf(find_hf(base_path), args, tokens)[0] if is_hf(base_path) else manifest.model.get(_ROWS)


@dataclass(frozen=True)
class BaseWeights:
    """The base model of LoRA adapters, and a function that reads its weights.

    path: a checkpoint, or a HuggingFace folder (`is_hf`).
    args: the base model's configuration, for one process and without adapters.
    read: takes a NeoX layer index and returns the layer's full tensors by NeoX names.
    checkpoint: the opened checkpoint, which checks a file before `read` reads it; None for HuggingFace.
    """

    path: Path
    is_hf: bool
    args: NeoXArgs
    read: ReadLayer
    checkpoint: OpenCheckpoint | None = None

    def verify(self, groups: ParallelGroups | None = None) -> None:
        """Compare all files of the base checkpoint with its manifest; do nothing for a HuggingFace folder.

        groups: ranks among which the files are divided. Raises DamagedError."""
        if self.checkpoint is not None:
            self.checkpoint.verify(groups=groups)

    def record(self) -> dict[str, Any]:
        """Returns {"path", "digest"} of these weights, for the manifest of an adapter checkpoint."""
        recorded, files = known_digests(self.path, self.is_hf)
        return base_record(self.path, {**recorded, **{file.name: sha256(file) for file in files}})


def open_base(
    path: str | Path, args: NeoXArgs | None = None, tokens: int = 0, origin: str | Path | None = None
) -> BaseWeights:
    """Opens the base weights at `path`: a checkpoint of this program or GPT-NeoX, or a HuggingFace model.

    args: the model's configuration; None: read from `path`.
    tokens: a HuggingFace model's vocabulary is padded to at least this many rows.
    origin: the adapter that records `path` as its base, for error messages.
    Raises CheckpointError."""
    hint = (
        "" if origin is None else f" ({origin} records this path; set lora.base, or --base of tools/ckpts/adapter.py)"
    )
    if is_hf(path):
        try:
            folder = find_hf(path)
        except CheckpointError as problem:
            raise CheckpointError(f"{problem}{hint}") from problem
        args = args or _args_of_hf(folder, tokens)
        scores = has_hf_score(folder)
        args = plain_args(args.replace(lora=None))
        new_head = bool(args.score_head) and not scores
        load = hf_loader(folder, args, new_head=new_head)
        return BaseWeights(folder, True, args, partial(_read, load, args, new_head))
    if not Path(path).is_dir():
        raise CheckpointError(f"{path}: the folder of the adapters' base weights does not exist{hint}")
    source = checkpoint_folder(path)
    opened = OpenCheckpoint(source)
    if opened.manifest is not None and opened.manifest.model.get("lora") is not None:
        raise CheckpointError(
            f"{source}: these base weights have adapters of their own; merge them first (tools/ckpts/adapter.py merge)"
        )
    args = plain_args((args or checkpoint_args(source)).replace(lora=None))
    new_head = bool(args.score_head) and not has_score_head(source, args)
    load = partial(load_weights, opened, args, new_head=new_head)
    return BaseWeights(source, False, args, partial(_read, load, args, new_head), opened)


def _args_of_hf(folder: Path, tokens: int) -> NeoXArgs:
    opened = HFFolder(folder)
    rows = padded_vocab_size(max(opened.vocab_size, tokens), _ROWS_MULTIPLE, 1)
    return NeoXArgs.from_dict(from_hf(opened.config, opened.get, padded_vocab_size=rows)[0])


def _read(load: LoadLayers, args: ModelArgs, new_head: bool, layer: int) -> dict[str, Tensor]:
    if new_head and layer == args.num_layers + 4:
        return {}
    return load(layers=[layer], tensor_rank=0, tensor_size=1)[layer]
