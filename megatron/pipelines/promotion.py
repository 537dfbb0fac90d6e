"""`checkpoints/<stage>_final`: the promoted weights of a stage, moved in one step.

It is a symbolic link to a folder in `checkpoints/.promoted` that holds hard links to the files of one
checkpoint, `latest`, and the evidence: verdict.json, metrics.jsonl, scores.json. So it takes no room beside
the stage's own files, loads like any folder of checkpoints, and stays as it is whatever is done in the
stage's own folder.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.data.files import sync, write_json
from megatron.pipelines.digests import weights_digest
from megatron.pipelines.errors import PipelineError
from megatron.pipelines.measurements import SCORES, Measurements, read_measurements
from megatron.process.metrics_file import METRICS_FILE
from megatron.process.run_files import read_object

VERDICT = "verdict.json"
_PROMOTED = ".promoted"


def promote(
    final: Path, checkpoint: Path, name: str, verdict: Mapping[str, Any], logs: Path, scores: Path | None
) -> None:
    """Let `final` name a copy by hard links of a checkpoint, with the evidence beside it; the folder that it
    named before goes. name: of the new folder. logs: of the run, scores: of its evaluation.

    A crash at any point leaves the old or the new. Raises PipelineError where it cannot be written.
    """
    folder = final.parent / _PROMOTED
    target, unfinished = folder / name, folder / f".tmp-{name}"
    if final.exists() and not final.is_symlink():
        raise PipelineError(f"{final}: is no link to promoted weights; move it away")
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
        again = 0
        while target.exists():  # of an earlier promotion of the same weights, which may be damaged by now
            again += 1
            target = folder / f"{name}.{again}"
        os.replace(unfinished, target)
        link = final.with_name(f".{final.name}.tmp")
        link.unlink(missing_ok=True)
        link.symlink_to(target.relative_to(final.parent), target_is_directory=True)
        os.replace(link, final)
        sync(final.parent)
    except OSError as problem:
        what = f"{problem.filename or final}: {problem.strerror or problem}"
        raise PipelineError(f"{final}: cannot be moved ({what}); it needs hard and symbolic links") from None
    stage = final.name.removesuffix("_final")
    for other in folder.iterdir():
        if other != target and other.name.removeprefix(".tmp-").rpartition("-")[0].rpartition("-")[0] == stage:
            shutil.rmtree(other, ignore_errors=True)


def promoted_weights(final: Path) -> str | None:
    """SHA-256 of the weights that `final` names; None where there are none, or files of them are missing."""
    checkpoint = latest_checkpoint(final)
    try:
        return weights_digest(checkpoint) if checkpoint is not None else None
    except PipelineError:
        return None


def latest_checkpoint(save: Path) -> Path | None:
    """The checkpoint that `latest` in a folder names; None where there is none."""
    if not (save / "latest").is_file():
        return None
    return save / (save / "latest").read_text(encoding="utf-8").strip()


def promoted_measurements(final: Path) -> Measurements | None:
    """The evidence beside promoted weights; None where there are none."""
    checkpoint = latest_checkpoint(final)
    if checkpoint is None:
        return None
    return read_measurements(final, final / SCORES, iteration_of(checkpoint))


def iteration_of(checkpoint: Path) -> int:
    """The iteration in a checkpoint's name."""
    return int(checkpoint.name.removeprefix("global_step"))


def promoted_verdict(final: Path) -> dict[str, Any]:
    """The verdict by which weights were promoted; {} where there are none."""
    try:
        return read_object(final / VERDICT)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as problem:
        raise PipelineError(f"{final / VERDICT}: cannot be read ({problem})") from None
