"""The JSON files of a HuggingFace model's folder, and what a place that is no such folder is."""

import json
import re
from pathlib import Path
from typing import Any

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families import FAMILIES, TEXT_TOWERS, check_fields, plain_values
from megatron.neox_arguments.errors import lfs_pointer_error

CONFIG = "config.json"


def read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; not a HuggingFace model folder{other_kind(path.parent)}")
    if (pointer := lfs_pointer_error(path)) is not None:
        raise CheckpointError(pointer)
    try:
        content = json.loads(path.read_bytes())
    except ValueError as problem:
        raise CheckpointError(f"{path}: not JSON ({problem})") from problem
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not a JSON object, but {type(content).__name__}")
    return content


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a model's folder. Raises CheckpointError, also for a field of another type than
    models have there, of a family that is read here."""
    config = read_json(folder / CONFIG)
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type not in (*FAMILIES, *TEXT_TOWERS):
        return config  # whose fields may be of other types; who reads the family refuses it
    check_fields(config, str(folder / CONFIG))
    return plain_values(config)


def other_kind(path: Path) -> str:
    """What a folder or a file that is no HuggingFace model is, where it is known, and what to do with it; ""
    where it is not."""
    names = [file.name for file in path.iterdir()] if path.is_dir() else [path.name]
    if "adapter_config.json" in names:
        return (
            "; it holds adapters in peft's format, without the model: tools/ckpts/adapter.py import or merge reads it"
        )
    if any(name.endswith(".gguf") for name in names):
        return "; GGUF is llama.cpp's format, made of a HuggingFace folder and mostly quantised: take that folder"
    if any(re.fullmatch(r"consolidated.*\.(safetensors|pth)", name) for name in names):
        meta = "; tools/ckpts/convert_raw_llama_weights_to_neox.py reads Meta's files (consolidated.00.pth)"
        mistral = "; consolidated.safetensors is Mistral's own format: take the HuggingFace folder of the same model"
        return meta if any(name.endswith(".pth") for name in names) else mistral
    if any(name.startswith("global_step") or name == "latest" for name in names):
        return "; it holds checkpoints of this trainer, or of GPT-NeoX, which need no conversion: name it as load"
    return ""
