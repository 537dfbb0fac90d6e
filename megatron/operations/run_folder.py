"""Reads a training run's folders, without torch.

`save` has status.json and training_summary.json. The log folder has metrics.jsonl and the resolved arguments
of every start.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.neox_arguments import NeoXArgs, UserError
from megatron.process.metrics_file import METRICS_FILE, read_last_metrics, read_metrics
from megatron.process.run_files import STATUS, SUMMARY, SUMMARY_SHAPE, Problems, read_fields, read_object, read_status

_ARGS_FILES = "neox_args.train.*.json"  # one per start, named by `megatron.launch.plan`


class RunFolderError(UserError):
    """A folder holds no run, or files in it cannot be read."""


@dataclass(frozen=True)
class RunFolder:
    """The folders of one run.

    save: folder of its checkpoints; None if it has none or they are in a bucket.
    logs: `log_dir`, else `<save>/logs`.
    problems: unusable content found while reading; show it together with the run.
    """

    save: Path | None
    logs: Path
    problems: Problems = field(default_factory=Problems, compare=False, repr=False)

    @property
    def metrics_file(self) -> Path:
        """The path of `metrics.jsonl`, which may not exist yet."""
        return self.logs / METRICS_FILE

    def status(self) -> dict[str, Any]:
        """The content of status.json; {} if it is missing or unreadable. Fields: `status` (running, finished,
        stopped, failed), `reason`, `iteration`, `train_iters`, `run_id`, `time` of the last change."""
        return read_status(self.save, self.problems) if self.save is not None else {}

    def summary(self) -> dict[str, Any]:
        """The content of training_summary.json, which is written at the end of every start; {} if it is
        missing or unreadable."""
        return read_fields(self.save / SUMMARY, SUMMARY_SHAPE, self.problems) if self.save is not None else {}

    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl in order of their steps, as they were logged; [] if the file is missing
        or unreadable."""
        return self._read_rows(lambda: list(read_metrics(self.metrics_file, self.problems)))

    def last_rows(self, size: int = 4 * 1024 * 1024) -> list[dict[str, Any]]:
        """The rows in the last `size` bytes of metrics.jsonl, which may have gigabytes; [] if it is missing
        or unreadable."""
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
        """The configuration of the newest start, with the origin of each key; None if this version can read
        none. A start of `train.py` without deepy.py leaves none."""
        for path in reversed(sorted(self.logs.glob(_ARGS_FILES), key=lambda path: path.stat().st_mtime_ns)):
            try:
                read_object(path)  # refuses other things than files, and deep nesting
                return NeoXArgs.from_json(path.read_text(encoding="utf-8"))
            except (UserError, OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
                reason = f"not a configuration that this version can read ({type(problem).__name__})"
                self.problems.note(path, "", reason)
        return None


def open_run(path: str | Path) -> RunFolder:
    """The run that a path names: its `save`, its log folder, or its metrics.jsonl.

    Raises RunFolderError if there is none.
    """
    path = Path(path).expanduser().absolute()
    if path.name == METRICS_FILE:
        path = path.parent
    if not path.is_dir():
        raise RunFolderError(f"{path}: no such folder; name the `save` of a run, or its log folder")
    if (path / STATUS).exists():
        logged = read_status(path, Problems()).get("log_dir")
        return RunFolder(path, Path(logged) if logged and os.path.isdir(logged) else path / "logs")
    if (path / "logs" / METRICS_FILE).is_file():
        return RunFolder(path, path / "logs")
    if (path / METRICS_FILE).is_file():
        return RunFolder(_save_of(path), path)
    raise RunFolderError(
        f"{path}: holds no run: neither {STATUS} nor {METRICS_FILE}; name the `save` of a run, or its log folder"
    )


def experiment_of(save: str | Path, checkpoint_dir: str | Path | None = None) -> str:
    """Returns the name of the experiment that saves in `save`.

    It is the first folder below the site's folder of checkpoints (NEOX_CHECKPOINT_DIR), else the last folder
    of `save`."""
    path = Path(save).expanduser().absolute()
    if checkpoint_dir is not None:
        root = Path(checkpoint_dir).expanduser().absolute()
        if path != root and path.is_relative_to(root):
            return path.relative_to(root).parts[0]
    return path.name


def _save_of(logs: Path) -> Path | None:
    """The folder of checkpoints of the run with this log folder."""
    if (logs.parent / STATUS).is_file():
        return logs.parent
    args = RunFolder(None, logs).args()
    save = Path(args.save_dir).absolute() if args is not None and args.save_dir is not None else None
    return save if save is not None and save.is_dir() else None
