"""Compares the vocabularies of two models' tokenizers."""

import json
from pathlib import Path
from typing import Any

from megatron.checkpointing.errors import CheckpointError
from megatron.tokenizer import Tokenizer


def reads_same_tokens(folder: Path, tokenizer: Tokenizer) -> bool:
    """Whether a HuggingFace folder's tokenizer has the same ids for the same tokens as `tokenizer`.

    Compares the files byte by byte, else vocabularies and added tokens. Raises CheckpointError if the folder
    has no tokenizer."""
    files = tokenizer.files()
    for name in ("tokenizer.json", "tokenizer.model"):
        if (folder / name).is_file() and name in files:
            folder_content = (folder / name).read_bytes()
            return folder_content == files[name] or (
                name == "tokenizer.json" and _ids(folder_content) == _ids(files[name])
            )
    raise CheckpointError(
        f"{folder}: has no tokenizer.json or tokenizer.model, so its tokenizer cannot be compared with this run's "
        f"{type(tokenizer).__name__}; add the file"
    )


def _ids(content: bytes) -> tuple[Any, dict[str, int]]:
    """Returns (vocabulary, {added token: id}) of a tokenizer.json. content: of the file."""
    parsed = json.loads(content)
    added = {token["content"]: token["id"] for token in parsed.get("added_tokens", ())}
    return parsed["model"].get("vocab"), added
