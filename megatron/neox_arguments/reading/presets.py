"""Names of configuration files as people type them: their own files, else the presets that come with the
package."""

import os
from collections.abc import Sequence
from pathlib import Path

SUFFIXES = (".yml", ".yaml", ".json")


def file_name(name: str) -> str:
    """The file that a name means: `a` is a.yml, and a name with an ending stays as it is."""
    return name if name.endswith(SUFFIXES) else name + ".yml"


def files_of(
    names: Sequence[str], folder: str | None = None, preset_root: Path | None = None
) -> tuple[list[str], list[str]]:
    """(the files that names in `folder`, or in the working folder, mean; those of them that are presets).

    preset_root: where `configs/` and `post-training/` are; `125M` and `configs/125M.yml` name the same preset
    there. A file of the user's own always comes first. A name that is neither stays as it is, and reading
    refuses it.
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
    inside = [path for path in candidates if path.is_file() and path.resolve().is_relative_to(preset_root)]
    return str(inside[0]) if inside else None
