"""Lists the checkpoints of an experiment, without importing torch."""

import hashlib
import re
from pathlib import Path

from megatron.neox_arguments import UserError
from megatron.neox_arguments.values.local_paths import with_home
from megatron.operations.hub.errors import HubError
from megatron.process.run_files import Problems, read_status

MANIFEST, EPHEMERAL = "manifest.json", "ephemeral"  # copied: importing `megatron.checkpointing` takes seconds
_TAG = re.compile(r"global_step(\d+)")


def find_experiment(name: str, checkpoint_dir: str | Path) -> Path:
    """Returns the absolute path of an experiment's folder. name: a folder below `checkpoint_dir`, or a path.

    Raises HubError if the folder does not exist."""
    candidates = [root / with_home(name) for root in (with_home(checkpoint_dir), Path())]
    folder = next((candidate for candidate in candidates if candidate.is_dir()), None)
    if folder is None:
        raise HubError(
            f"{name}: no such experiment: neither folder exists: "
            f"{' and '.join(str(path.absolute()) for path in candidates)}; give the experiment's path, or set the "
            "folder of experiments with --neox_checkpoints_path or the site's NEOX_CHECKPOINT_DIR"
        )
    return folder.absolute()


def steps_in(save: Path) -> tuple[int, ...]:
    """Returns the step numbers N of the checkpoints global_stepN in the folder `save`, the newest first.

    Ephemeral checkpoints are left out. Raises HubError if no checkpoint is left."""
    steps = sorted((step for path in save.iterdir() if (step := _step(path)) is not None), reverse=True)
    if not steps:
        raise HubError(
            f"{save}: holds no lasting checkpoint global_step<N>; name a folder that a run saved to (`save`)"
        )
    return tuple(steps)


def _step(path: Path) -> int | None:
    """Returns the step N of a checkpoint folder named global_stepN; None for other paths and ephemeral
    checkpoints."""
    match = _TAG.fullmatch(path.name)
    return int(match[1]) if match and path.is_dir() and not (path / EPHEMERAL).exists() else None


def last_step(checkpoint: Path) -> int | None:
    """Returns the last step (`train_iters`) of the run that wrote a checkpoint; None if it is unknown.

    The number comes from status.json beside the checkpoint, else from the configuration in the checkpoint.
    """
    steps: int | None = read_status(checkpoint.parent, Problems()).get("train_iters")
    if steps is None and checkpoint.is_dir():
        from megatron.checkpointing.saved_config import checkpoint_args

        try:
            steps = checkpoint_args(checkpoint).train_iters
        except UserError:
            return None
    return steps


def identity(checkpoint: Path) -> str:
    """Returns a digest that changes when the checkpoint changes.

    It is the SHA-256 of the manifest, which holds a digest of every file. A checkpoint of GPT-NeoX has no
    manifest; then the digest covers names, sizes and modification times of its files.
    """
    manifest = checkpoint / MANIFEST
    if manifest.is_file():
        return hashlib.sha256(manifest.read_bytes()).hexdigest()
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    facts = [(str(path.relative_to(checkpoint)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr(facts).encode()).hexdigest()
