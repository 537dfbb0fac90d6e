"""Names of configuration files as people type them: files of theirs, else the presets that come with the package."""

import os
from collections.abc import Sequence
from pathlib import Path

SUFFIXES = (".yml", ".yaml", ".json")


def file_name(name: str) -> str:
    """`a` -> a.yml; a name with an ending stays."""
    return name if name.endswith(SUFFIXES) else name + ".yml"


def files_of(names: Sequence[str], folder: str | None = None, home: Path | None = None) -> tuple[list[str], list[str]]:
    """(the files that names in `folder`, or in the working folder, mean; those of them that are presets).

    home: where `configs/` and `post-training/` are; `125M` and `configs/125M.yml` name the same preset there. A file
    of one's own always comes first. What is neither stays as it is, for the reader to refuse.
    """
    files, presets = [], []
    for name in names:
        file = os.path.join(folder or "", file_name(name))
        found = None if home is None or os.path.exists(file) else _preset(file, home)
        files.append(found or file)
        presets += [found] if found else []
    return files, presets


def _preset(file: str, home: Path) -> str | None:
    places = (home / "configs" / file, home / file)
    inside = [place for place in places if place.is_file() and place.resolve().is_relative_to(home)]
    return str(inside[0]) if inside else None
