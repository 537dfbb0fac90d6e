"""The folder that a job of cleaning writes into: what may be there, and how a result gets its place."""

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
    """The metadata of the same job, if its result is there already.

    Raises DataError where the folder holds something that would be lost: an input, files that no job noted,
    and, without overwrite, the result of another job.
    """
    for file in inputs:
        if file.path.resolve().is_relative_to(target.resolve()):
            raise DataError(f"{target}: holds {file.path}, which is read; choose another OUT")
    if not target.exists():
        return None
    known = _metadata(target)
    if known is not None and known["identity"] == identity:
        return known if all((target / name).exists() for name in known["output_files"]) else None
    if (target / f"{WORK}{identity}" / _MARKER).exists():
        return None  # our own, half in its place
    if known is None:
        foreign = [path for pattern in ("train-*-of-*", "validation-*-of-*", PAGE) for path in target.glob(pattern)]
        if foreign:
            raise DataError(f"{foreign[0]}: was not made by this command; choose another OUT")
    elif not overwrite:
        raise DataError(f"{target}: holds the result of another job; choose another OUT, or add --overwrite")
    return None


def publish(work: Path, target: Path, files: Mapping[str, Path], metadata: Mapping[str, Any]) -> None:
    """Give files their names in the folder, in the place of an earlier result, the metadata last. Called
    again after it was cut short, it goes on. work: of the job; files: where each is, by its name there."""
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
    """The metadata of a result of this command, whatever job's."""
    try:
        known = json.loads((target / METADATA).read_text(encoding="utf-8"))
        if isinstance(known["identity"], str) and all(isinstance(name, str) for name in known["output_files"]):
            return dict(known)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise DataError(f"{target / METADATA}: was not made by this command, or is damaged; choose another OUT")
