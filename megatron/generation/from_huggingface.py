"""Derives configuration keys from a HuggingFace model, for the command-line option `--hf-model`."""

from pathlib import Path
from typing import Any

import torch

from megatron.checkpointing import CheckpointError
from megatron.checkpointing.families.convert import from_hf
from megatron.checkpointing.huggingface import HFFolder, find_hf
from megatron.neox_arguments import ConfigError
from megatron.tokenizer import HFTokenizer, TokenizerError

_PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bfloat16", torch.float16: "fp16"}


def hf_model_keys(name: str) -> dict[str, Any]:
    """Returns the configuration keys of a HuggingFace model: architecture, precision, tokenizer and `load`.

    Documents end with the tokenizer's eos_token, as in transformers. Keys of auxiliary losses of experts are
    omitted, because some parallel layouts do not support them. Raises ConfigError if the model cannot be read
    or is not supported.

    name: a folder, or hf://ORG/NAME, which is downloaded.
    """
    try:
        path = find_hf(name)
        folder = HFFolder(path)
        keys, _ = from_hf(folder.config, folder.get)
        keys |= tokenizer_keys(path)
    except (CheckpointError, TokenizerError) as problem:
        raise ConfigError([f"--hf-model: {problem}"]) from problem
    del keys["padded_vocab_size"]  # depends on the number of tensor ranks
    keys = {key: value for key, value in keys.items() if not key.startswith("moe_aux_loss")}
    kinds = {_PRECISIONS[dtype] for dtype in folder.dtypes.values() if dtype in _PRECISIONS}
    return {**keys, "precision": kinds.pop() if len(kinds) == 1 else "fp32", "load": str(path)}


def tokenizer_keys(path: Path) -> dict[str, str]:
    """Returns the configuration keys for the tokenizer in a folder: `tokenizer_type` and `vocab_file`.

    If the tokenizer's eos_token differs from the token that would end documents, `eod_token` is added. Raises
    CheckpointError if the folder has no tokenizer.
    """
    file = path / "tokenizer.json"
    if file.is_file():
        keys, tokenizer = {"tokenizer_type": "HFTokenizer", "vocab_file": str(file)}, HFTokenizer(file)
        same_token = tokenizer.eos in (tokenizer.eod, None) or tokenizer.eos not in tokenizer.special_tokens
        return keys if same_token else {**keys, "eod_token": tokenizer.special_tokens[tokenizer.eos]}
    if (path / "tokenizer.model").is_file():
        return {"tokenizer_type": "SPMTokenizer", "vocab_file": str(path / "tokenizer.model")}
    raise CheckpointError(f"{path}: holds no tokenizer (neither tokenizer.json nor tokenizer.model)")
