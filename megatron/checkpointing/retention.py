"""Retention: which older checkpoints are deleted when a new one has been published."""

from dataclasses import dataclass
from pathlib import Path

from megatron.checkpointing.layout import list_checkpoints, step_of
from megatron.checkpointing.manifest import read_manifest

EPHEMERAL = "ephemeral"  # an empty file in a checkpoint that only stands until the next


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay.

    last: number of the newest that stay; None or 0: all. Of those that would be deleted, `every` keeps the
    multiples of so many iterations, and `best` keeps so many with the lowest validation loss, of those saved
    where it was computed.
    """

    last: int | None = None
    every: int | None = None
    best: int | None = None


def checkpoints_to_delete(save: Path, newest: Path, keep: Retention) -> list[Path]:
    """The checkpoints of `save` to delete now that `newest` is there; never that one."""
    # By age, not by step: after a restart the earlier run's steps may be higher than the new one's.
    others = sorted((p for p in list_checkpoints(save) if p.name != newest.name), key=lambda p: p.stat().st_mtime_ns)
    ephemeral = [path for path in others if (path / EPHEMERAL).exists()]
    if not keep.last:
        return ephemeral
    lasting = [path for path in others if path not in ephemeral]
    new = [] if (newest / EPHEMERAL).exists() else [newest]
    old = lasting[: max(0, len(lasting) - (keep.last - len(new)))]
    best = _best([*lasting, *new], keep.best) if keep.best else []
    return ephemeral + [p for p in old if p not in best and not (keep.every and step_of(p) % keep.every == 0)]


def _best(paths: list[Path], count: int) -> list[Path]:
    manifests = [(path, read_manifest(path)) for path in paths]
    losses = [(m.validation_loss, path) for path, m in manifests if m is not None and m.validation_loss is not None]
    return [path for _, path in sorted(losses)[:count]]
