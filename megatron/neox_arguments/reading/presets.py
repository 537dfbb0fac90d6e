"""Finds configuration files by the names that users type: their own files, else presets of the package."""

import os
from collections.abc import Sequence
from pathlib import Path

SUFFIXES = (".yml", ".yaml", ".json")


def file_name(name: str) -> str:
    """Returns the file name for a typed name: `a` gives a.yml; a name with .yml, .yaml or .json is
    unchanged."""
    return name if name.endswith(SUFFIXES) else name + ".yml"


def files_of(
    names: Sequence[str], folder: str | None = None, preset_root: Path | None = None
) -> tuple[list[str], list[str]]:
    """Returns (the files that the typed names mean, the presets among these files).

    folder: where the user's files are; None: the working folder. A user's file takes precedence over a
        preset.
    preset_root: the folder of `configs/` and `post-training/`; `125M` and `configs/125M.yml` name the same
        preset.

    An unknown name is returned unchanged; reading it fails later.
    """
    files, presets = [], []
    for name in names:
        file = os.path.join(folder or "", file_name(name))
        preset = None if preset_root is None or os.path.exists(file) else _preset(file, preset_root)
        files.append(preset or file)
        presets += [preset] if preset else []
    return files, presets


def _preset(file: str, preset_root: Path) -> str | None:
    candidates = (preset_root / "configs" / file, preset_root / file)
    matches = [path for path in candidates if path.is_file() and path.resolve().is_relative_to(preset_root)]
    return str(matches[0]) if matches else None
