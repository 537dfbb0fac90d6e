"""Paths as users write them."""

import os
from pathlib import Path


def with_home(path: str | Path) -> Path:
    """Returns the path with the home folder in place of a leading `~` or `~user`.

    The path of an unknown user stays as it is, so that its file is not found. `Path.expanduser` raises
    RuntimeError for it.
    """
    return Path(os.path.expanduser(path))
