"""Reads JSON that a user or another program wrote."""

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Returns the value that a text of JSON writes. Raises ValueError for any other text, and for one nested
    too deeply, at which `json.loads` raises RecursionError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
