"""The checkpoints of an experiment, found without torch."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from megatron.neox_arguments import UserError
from megatron.operations.hub.errors import HubError
from megatron.process.run_files import Problems, read_status

MANIFEST, EPHEMERAL = "manifest.json", "ephemeral"  # of `megatron.checkpointing`, whose import takes seconds
_TAG = re.compile(r"global_step(\d+)")


@dataclass(frozen=True)
class Experiment:
    """A folder of checkpoints. steps: of those that are kept, the newest first."""

    save: Path
    steps: tuple[int, ...]


def find_experiment(name: str, checkpoint_dir: str | Path) -> Path:
    """The folder of an experiment: a path, or a name below the folder of experiments. Raises HubError."""
    places = [root / Path(name).expanduser() for root in (Path(checkpoint_dir).expanduser(), Path())]
    found = next((place for place in places if place.is_dir()), None)
    if found is None:
        raise HubError(
            f"{name}: no such experiment; looked for {' and '.join(str(place.absolute()) for place in places)} "
            "(--neox_checkpoints_path, or the site's NEOX_CHECKPOINT_DIR)"
        )
    return found.absolute()


def read_experiment(save: Path) -> Experiment:
    """The checkpoints in a folder. Raises HubError where there is none."""
    steps = sorted((step for path in save.iterdir() if (step := _step(path)) is not None), reverse=True)
    if not steps:
        raise HubError(f"{save}: holds no checkpoint global_step<N>")
    return Experiment(save, tuple(steps))


def _step(path: Path) -> int | None:
    """The step of a checkpoint's folder; None for what is none, or stands only until the next save."""
    match = _TAG.fullmatch(path.name)
    return int(match[1]) if match and path.is_dir() and not (path / EPHEMERAL).exists() else None


def last_step(checkpoint: Path) -> int | None:
    """`train_iters` of the run that wrote a checkpoint: as status.json says, else as the checkpoint was
    configured (GPT-NeoX's have their files in `configs`); None where neither is known."""
    known: int | None = read_status(checkpoint.parent, Problems()).get("train_iters")
    if known is None and checkpoint.is_dir():
        from megatron.checkpointing.saved_config import checkpoint_args

        try:
            known = checkpoint_args(checkpoint).train_iters
        except UserError:
            return None
    return known


def identity(checkpoint: Path) -> str:
    """A digest by which a checkpoint is known to be the same: of its manifest, which holds those of all its
    files; of GPT-NeoX's, which have none, of names, sizes and times."""
    manifest = checkpoint / MANIFEST
    if manifest.is_file():
        return hashlib.sha256(manifest.read_bytes()).hexdigest()
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    facts = [(str(path.relative_to(checkpoint)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr(facts).encode()).hexdigest()
