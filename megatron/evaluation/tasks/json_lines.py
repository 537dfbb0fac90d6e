"""Data of the shipped tasks: JSON lines beside this file, wherever the working folder is."""

from pathlib import Path
from typing import Any


def documents(file: str, **others: Any) -> dict[str, Any]:
    """The documents of a task from JSON lines beside this file, in the form that lm-eval's `custom_dataset`
    returns."""
    import json

    from datasets import Dataset

    lines = (Path(__file__).parent / file).read_text(encoding="utf-8").splitlines()
    return {"test": Dataset.from_list([json.loads(line) for line in lines])}
