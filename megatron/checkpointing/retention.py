"""Chooses the older checkpoints to delete after a new checkpoint has been published."""

from dataclasses import dataclass
from pathlib import Path

from megatron.checkpointing.layout import list_checkpoints, step_of
from megatron.checkpointing.manifest import read_manifest

EPHEMERAL = "ephemeral"  # an empty file; marks a checkpoint that is deleted after the next save


@dataclass(frozen=True)
class Retention:
    """Rules that decide which checkpoints stay when a new one has been saved.

    last: number of newest checkpoints to keep; None or 0: all.
    interval: also keep checkpoints whose iteration is a multiple of this number.
    best: also keep the checkpoints with the lowest validation loss, up to this number.
    """

    last: int | None = None
    interval: int | None = None
    best: int | None = None


def checkpoints_to_delete(save: Path, newest: Path, keep: Retention) -> list[Path]:
    """Returns the checkpoints in `save` to delete after `newest` was saved; never `newest` itself.

    Checkpoints marked as ephemeral are always deleted."""
    # By age, not by step: after a restart the earlier run's steps may be higher than the new one's.
    older = sorted((p for p in list_checkpoints(save) if p.name != newest.name), key=lambda p: p.stat().st_mtime_ns)
    ephemeral = [path for path in older if (path / EPHEMERAL).exists()]
    if not keep.last:
        return ephemeral
    lasting = [path for path in older if path not in ephemeral]
    new = [] if (newest / EPHEMERAL).exists() else [newest]
    old = lasting[: max(0, len(lasting) - (keep.last - len(new)))]
    best = _best([*lasting, *new], keep.best) if keep.best else []
    return ephemeral + [p for p in old if p not in best and not (keep.interval and step_of(p) % keep.interval == 0)]


def _best(paths: list[Path], count: int) -> list[Path]:
    manifests = [(path, read_manifest(path)) for path in paths]
    losses = [(m.validation_loss, path) for path, m in manifests if m is not None and m.validation_loss is not None]
    return [path for _, path in sorted(losses)[:count]]
