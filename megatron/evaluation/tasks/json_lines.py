"""Loads the data of the shipped tasks from JSON-lines files in this folder, whatever the working folder
is."""

from pathlib import Path
from typing import Any


def documents(file: str, **options: Any) -> dict[str, Any]:
    """Returns {"test": dataset}, read from a JSON-lines file in the folder of the shipped tasks. lm-eval
    calls it as a task's `custom_dataset`.

    file: name of the file.
    """
    import json

    from datasets import Dataset

    lines = (Path(__file__).parent / file).read_text(encoding="utf-8").splitlines()
    return {"test": Dataset.from_list([json.loads(line) for line in lines])}
