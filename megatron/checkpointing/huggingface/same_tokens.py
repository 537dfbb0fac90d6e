"""Whether two models read the same tokens."""

import json
from pathlib import Path
from typing import Any

from megatron.checkpointing.errors import CheckpointError
from megatron.tokenizer import Tokenizer


def reads_same_tokens(folder: Path, tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer of a HuggingFace folder has the same ids for the same tokens as this one: by its
    file, or its vocabulary and added tokens. Raises CheckpointError where nothing can be compared."""
    files = tokenizer.files()
    for name in ("tokenizer.json", "tokenizer.model"):
        if (folder / name).is_file() and name in files:
            theirs = (folder / name).read_bytes()
            return theirs == files[name] or (name == "tokenizer.json" and _ids(theirs) == _ids(files[name]))
    raise CheckpointError(
        f"{folder}: has no tokenizer (tokenizer.json, tokenizer.model) to compare with this run's "
        f"{type(tokenizer).__name__}, so it is not known whether both read the same tokens"
    )


def _ids(content: bytes) -> tuple[Any, dict[str, int]]:
    """The vocabulary of a tokenizer.json, and the ids of its added tokens."""
    parsed = json.loads(content)
    added = {token["content"]: token["id"] for token in parsed.get("added_tokens", ())}
    return parsed["model"].get("vocab"), added
