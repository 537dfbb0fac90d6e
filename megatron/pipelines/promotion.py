"""Promotes a stage's weights: makes the link `checkpoints/<stage>_final` point to them, in one atomic step.

The link points to a folder in `checkpoints/.promoted`. This folder has hard links to the files of one
checkpoint, a file `latest`, and the evidence: verdict.json, metrics.jsonl, scores.json. So it takes almost no
disk space, loads like any folder of checkpoints, and stays complete when the stage's own folder is deleted.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.data.files import sync, write_json
from megatron.pipelines.digests import latest_checkpoint, numbered, weights_digest
from megatron.pipelines.errors import PipelineError
from megatron.pipelines.measurements import SCORES, Measurements, read_measurements
from megatron.process.metrics_file import METRICS_FILE
from megatron.process.run_files import read_object

VERDICT = "verdict.json"
_PROMOTED = ".promoted"


def promote(
    final: Path, checkpoint: Path, name: str, verdict: Mapping[str, Any], logs: Path, scores: Path | None
) -> None:
    """Promotes a checkpoint: copies it by hard links, and makes the symbolic link `final` point to the copy.

    The copy also gets the verdict, metrics.jsonl and the scores. Earlier copies of the stage are deleted
    afterwards. After a crash `final` points to the old copy or to the new copy, both complete.

    name: name of the copy's folder, such as `sft-1a2b3c4d5e6f-2`.
    logs: log folder of the run.
    scores: file with the evaluation's scores; None: no evaluation.

    Raises PipelineError if the file system cannot make links or cannot be written.
    """
    folder = final.parent / _PROMOTED
    target, unfinished = folder / name, folder / f".tmp-{name}"
    if final.exists() and not final.is_symlink():
        raise PipelineError(f"{final}: is a file or folder, but must be a link that the pipeline makes; move it away")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(checkpoint, unfinished / checkpoint.name, copy_function=os.link)
        (unfinished / "latest").write_text(checkpoint.name)
        write_json(unfinished / VERDICT, verdict)
        if (logs / METRICS_FILE).is_file():
            shutil.copyfile(logs / METRICS_FILE, unfinished / METRICS_FILE)
        if scores is not None and scores.is_file():
            shutil.copyfile(scores, unfinished / SCORES)
        sync(unfinished)
        if target.exists():  # a copy from an earlier promotion of the same weights, which may be damaged by now
            target = numbered(target)
        os.replace(unfinished, target)
        link = final.with_name(f".{final.name}.tmp")
        link.unlink(missing_ok=True)
        link.symlink_to(target.relative_to(final.parent), target_is_directory=True)
        os.replace(link, final)
        sync(final.parent)
    except OSError as problem:
        reason = f"{problem.filename or final}: {problem.strerror or problem}"
        raise PipelineError(
            f"{final}: the promotion failed ({reason}); its file system needs free space, write access, "
            "and hard and symbolic links"
        ) from None
    stage = final.name.removesuffix("_final")
    for path in folder.iterdir():
        if path != target and path.name.removeprefix(".tmp-").rpartition("-")[0].rpartition("-")[0] == stage:
            shutil.rmtree(path, ignore_errors=True)


def promoted_weights(final: Path) -> str | None:
    """Returns one SHA-256 for the promoted weights in the folder `final`; None if nothing is promoted.

    It is also None if files are missing or have another size than their manifest says."""
    checkpoint = latest_checkpoint(final)
    try:
        return weights_digest(checkpoint) if checkpoint is not None else None
    except PipelineError:
        return None


def promoted_measurements(final: Path) -> Measurements | None:
    """Reads the metrics and scores that were stored with the promoted weights in the folder `final`.

    Returns None if nothing is promoted."""
    checkpoint = latest_checkpoint(final)
    return None if checkpoint is None else read_measurements(final, final / SCORES, iteration_of(checkpoint))


def iteration_of(checkpoint: Path) -> int:
    """Returns the iteration N of a checkpoint from the name of its folder, `global_stepN`."""
    return int(checkpoint.name.removeprefix("global_step"))


def promoted_verdict(final: Path) -> dict[str, Any]:
    """Reads the verdict that was stored with the promoted weights in the folder `final`; {} if there is none.

    Raises PipelineError if it cannot be read."""
    try:
        return read_object(final / VERDICT)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as problem:
        raise PipelineError(f"{final / VERDICT}: the promoted weights' verdict cannot be read ({problem})") from None
