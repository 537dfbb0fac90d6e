"""Paths as users write them."""

import os
from pathlib import Path

from megatron.neox_arguments.errors import UserError


class UnknownHomeError(UserError, ValueError):
    """Raised for a path that begins with the home folder of a user who is unknown here."""


def with_home(path: str | Path) -> Path:
    """Returns the path with the home folder in place of a leading `~` or `~user`.

    Raises UnknownHomeError for an unknown user, unless a file or folder has this name. `Path.expanduser`
    raises RuntimeError.
    """
    expanded = Path(os.path.expanduser(path))
    if str(expanded).startswith("~") and not Path(expanded.parts[0]).exists():
        raise UnknownHomeError(f"{path}: no user of this machine has the home folder {expanded.parts[0]}; correct it")
    return expanded
