"""Reads the JSON files of a HuggingFace model's folder, and recognises other kinds of folders."""

import re
from pathlib import Path
from typing import Any

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families.field_types import check_fields, plain_values
from megatron.checkpointing.families.multimodal import TEXT_TOWERS
from megatron.checkpointing.families.registry import FAMILIES
from megatron.neox_arguments.errors import lfs_pointer_error
from megatron.neox_arguments.values.json_text import parse_json

CONFIG = "config.json"


def read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file, so its folder is no HuggingFace model{other_kind(path.parent)}")
    if (pointer := lfs_pointer_error(path)) is not None:
        raise CheckpointError(pointer)
    try:
        content = parse_json(path.read_bytes())
    except ValueError as problem:
        raise CheckpointError(f"{path}: does not hold JSON ({problem})") from problem
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, but holds a {type(content).__name__}")
    return content


def read_config(folder: Path) -> dict[str, Any]:
    """Reads the config.json of a model's folder.

    Raises CheckpointError, also if a field of a supported family has a wrong type."""
    config = read_json(folder / CONFIG)
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type not in (*FAMILIES, *TEXT_TOWERS):
        return config  # its fields may have other types; `family_of` refuses it later
    family = FAMILIES.get(str(model_type))
    check_fields(config, str(folder / CONFIG), () if family is None else family.unread)
    return plain_values(config)


def other_kind(path: Path) -> str:
    """Returns the end of an error: what `path` is instead of a HuggingFace model, and how to use it.

    Returns "" if the kind is unknown."""
    names = [file.name for file in path.iterdir()] if path.is_dir() else [path.name]
    if "adapter_config.json" in names:
        return (
            "; it holds adapters in peft's format, without the model: tools/ckpts/adapter.py import or merge reads it"
        )
    if any(name.endswith(".gguf") for name in names):
        return "; it holds GGUF, llama.cpp's format; use the HuggingFace folder of the same model"
    if any(re.fullmatch(r"consolidated.*\.(safetensors|pth)", name) for name in names):
        meta = "; tools/ckpts/convert_raw_llama_weights_to_neox.py reads Meta's files (consolidated.00.pth)"
        mistral = "; consolidated.safetensors is Mistral's own format: use the HuggingFace folder of the same model"
        return meta if any(name.endswith(".pth") for name in names) else mistral
    if any(name.startswith("global_step") or name == "latest" for name in names):
        return (
            "; it holds checkpoints of this trainer, or of GPT-NeoX, which need no conversion: set load to this folder"
        )
    return ""
