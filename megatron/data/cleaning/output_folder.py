"""The output folder of a cleaning job: checks its content, and moves a result into it."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.data.errors import DataError
from megatron.data.files import write_json
from megatron.data.preprocessing.inputs import InputFile

METADATA, PAGE = "metadata.json", "report.html"
WORK = ".clean-"  # and the digest of the job
_MARKER = "publishing.json"  # in the work folder, from before the first file gets its place


def check_target(target: Path, identity: str, inputs: Sequence[InputFile], overwrite: bool) -> Mapping[str, Any] | None:
    """Return the metadata of the same job if its result already exists, else None.

    Raises DataError if the folder holds something that would be lost: an input, files that no job lists, or,
    without overwrite, the result of another job.
    """
    for file in inputs:
        if file.path.resolve().is_relative_to(target.resolve()):
            raise DataError(f"{target}: holds the input {file.path}; choose another OUT")
    if not target.exists():
        return None
    metadata = _metadata(target)
    if metadata is not None and metadata["identity"] == identity:
        return metadata if all((target / name).exists() for name in metadata["output_files"]) else None
    if (target / f"{WORK}{identity}" / _MARKER).exists():
        return None  # our own, half in its place
    if metadata is None:
        foreign = [path for pattern in ("train-*-of-*", "validation-*-of-*", PAGE) for path in target.glob(pattern)]
        if foreign:
            raise DataError(f"{foreign[0]}: was not made by this command; choose another OUT")
    elif not overwrite:
        raise DataError(f"{target}: holds the result of another job; choose another OUT, or add --overwrite")
    return None


def publish(work: Path, target: Path, files: Mapping[str, Path], metadata: Mapping[str, Any]) -> None:
    """Move files and then the metadata into the output folder, replacing an earlier result. If interrupted,
    call it again.

    work: the work folder of the job. files: final name -> current path.
    """
    marker = work / _MARKER
    if not marker.exists():
        old = _metadata(target) or {"output_files": []}
        write_json(marker, {"stale": [*old["output_files"], *old.get("rejected_files", [])]})
    for name in json.loads(marker.read_text(encoding="utf-8"))["stale"]:
        if name not in files:
            (target / name).unlink(missing_ok=True)
    for name, path in files.items():
        if path.exists():  # else it has its place since an earlier try
            (target / name).parent.mkdir(exist_ok=True)
            os.replace(path, target / name)
    write_json(target / METADATA, metadata)


def _metadata(target: Path) -> dict[str, Any] | None:
    """Return the content of metadata.json if this command wrote it, for any job; None if there is no such
    file. Raises DataError if it is not of this command."""
    try:
        metadata = json.loads((target / METADATA).read_text(encoding="utf-8"))
        if isinstance(metadata["identity"], str) and all(isinstance(name, str) for name in metadata["output_files"]):
            return dict(metadata)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise DataError(f"{target / METADATA}: was not made by this command, or is damaged; choose another OUT")
