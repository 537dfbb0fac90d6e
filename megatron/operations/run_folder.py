"""Reads the files in a training run's folders, without importing torch.

The folder `save` has status.json and training_summary.json. The log folder has metrics.jsonl and the resolved
configuration of every start.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.neox_arguments import NeoXArgs, UserError
from megatron.neox_arguments.values.local_paths import with_home
from megatron.process.metrics_file import METRICS_FILE, read_last_metrics, read_metrics
from megatron.process.run_files import STATUS, SUMMARY, SUMMARY_SHAPE, Problems, read_fields, read_object, read_status

_ARGS_FILES = "neox_args.train.*.json"  # deepy.py writes one of these files at every start


class RunFolderError(UserError):
    """A folder holds no training run, or files of the run cannot be read."""


@dataclass(frozen=True)
class RunFolder:
    """The folders of one training run, with methods that read their files.

    save: folder of checkpoints; None if there is none or it is in a bucket.
    logs: the run's `log_dir`, else `<save>/logs`.
    problems: collects messages on unusable content of the files; show them together with the run.
    """

    save: Path | None
    logs: Path
    problems: Problems = field(default_factory=Problems, compare=False, repr=False)

    @property
    def metrics_file(self) -> Path:
        """The path of the run's metrics.jsonl; the file may not exist yet."""
        return self.logs / METRICS_FILE

    def status(self) -> dict[str, Any]:
        """Returns the content of status.json; {} if it is missing or unreadable.

        Some fields: `status` (running, finished, stopped or failed), `reason`, `iteration`, `train_iters`,
        `run_id`, `time` of the last change."""
        return read_status(self.save, self.problems) if self.save is not None else {}

    def summary(self) -> dict[str, Any]:
        """Returns the content of training_summary.json; {} if it is missing or unreadable.

        A run writes the file each time it ends."""
        return read_fields(self.save / SUMMARY, SUMMARY_SHAPE, self.problems) if self.save is not None else {}

    def rows(self) -> list[dict[str, Any]]:
        """Returns all rows of metrics.jsonl, in order of their steps; [] if it is missing or unreadable."""
        return self._read_rows(lambda: list(read_metrics(self.metrics_file, self.problems)))

    def last_rows(self, size: int = 4 * 1024 * 1024) -> list[dict[str, Any]]:
        """Returns the rows in the last `size` bytes of metrics.jsonl; [] if it is missing or unreadable.

        Use it instead of `rows` if only the end is needed: the file may have gigabytes."""
        return self._read_rows(lambda: read_last_metrics(self.metrics_file, size, self.problems))

    def _read_rows(self, read: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        try:
            return read()
        except FileNotFoundError:
            return []
        except OSError as problem:
            self.problems.note(self.metrics_file, "", f"cannot be read ({problem.strerror})")
            return []

    def args(self) -> NeoXArgs | None:
        """Returns the configuration of the newest start that can be read, with the origin of each key.

        None if there is no readable one: deepy.py writes them, but a direct start of train.py does not."""
        for path in reversed(sorted(self.logs.glob(_ARGS_FILES), key=lambda path: path.stat().st_mtime_ns)):
            try:
                read_object(path)  # raises for anything but a regular file, and for deeply nested JSON
                return NeoXArgs.from_json(path.read_text(encoding="utf-8"))
            except (UserError, OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
                reason = f"this version cannot read the configuration in it ({type(problem).__name__})"
                self.problems.note(path, "", reason)
        return None


def open_run(path: str | Path) -> RunFolder:
    """Returns the folders of the run to which `path` belongs: its `save`, log folder or metrics.jsonl.

    Raises RunFolderError if `path` is none of these.
    """
    path = with_home(path).absolute()
    if path.name == METRICS_FILE:
        path = path.parent
    if not path.is_dir():
        raise RunFolderError(f"{path}: no such folder; give the `save` of a run, or its log folder")
    if (path / STATUS).exists():
        logged = read_status(path, Problems()).get("log_dir")
        return RunFolder(path, Path(logged) if logged and os.path.isdir(logged) else path / "logs")
    if (path / "logs" / METRICS_FILE).is_file():
        return RunFolder(path, path / "logs")
    if (path / METRICS_FILE).is_file():
        return RunFolder(_save_of(path), path)
    raise RunFolderError(
        f"{path}: holds no run: neither {STATUS} nor {METRICS_FILE} is in it; give the `save` of a run, or its log "
        "folder"
    )


def experiment_of(save: str | Path, checkpoint_dir: str | Path | None = None) -> str:
    """Returns the name of the experiment to which the run that saves in `save` belongs.

    checkpoint_dir: the site's NEOX_CHECKPOINT_DIR. For `save` below it, the name is that of the first folder
    below it. Otherwise it is the name of the last folder of `save`."""
    path = with_home(save).absolute()
    if checkpoint_dir is not None:
        root = with_home(checkpoint_dir).absolute()
        if path != root and path.is_relative_to(root):
            return path.relative_to(root).parts[0]
    return path.name


def _save_of(logs: Path) -> Path | None:
    """Returns the folder of checkpoints of the run with the log folder `logs`; None if it is unknown."""
    if (logs.parent / STATUS).is_file():
        return logs.parent
    args = RunFolder(None, logs).args()
    save = Path(args.save_dir).absolute() if args is not None and args.save_dir is not None else None
    return save if save is not None and save.is_dir() else None
