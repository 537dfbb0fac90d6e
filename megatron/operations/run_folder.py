"""What a training run leaves in its folders, read without torch: status.json and training_summary.json in
`save`, metrics.jsonl and the resolved arguments of every start in its log folder."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.neox_arguments import NeoXArgs, UserError
from megatron.process.metrics_file import METRICS_FILE, read_metrics

STATUS, SUMMARY = "status.json", "training_summary.json"
_SCORES = "eval_tasks/"
_ARGS_FILES = "neox_args.train.*.json"  # one a start, `megatron.launch.plan` names them


class RunFolderError(UserError):
    """A folder that holds no run, or files in it that cannot be read."""


@dataclass(frozen=True)
class RunFolder:
    """The folders of one run. save: of its checkpoints, None where it has none or they are in a bucket; logs:
    `log_dir`, else `<save>/logs`."""

    save: Path | None
    logs: Path

    @property
    def metrics_file(self) -> Path:
        """`metrics.jsonl`, whether it is there yet or not."""
        return self.logs / METRICS_FILE

    def status(self) -> dict[str, Any]:
        """status.json: `status` (running, finished, stopped, failed), `reason`, `iteration`, `train_iters`,
        `run_id`, `time` of the last change; {} before there is one."""
        return _read_object(self.save / STATUS) if self.save is not None else {}

    def summary(self) -> dict[str, Any]:
        """training_summary.json, which is written at the end of every start; {} before there is one."""
        return _read_object(self.save / SUMMARY) if self.save is not None else {}

    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl in order of their steps, names and values as they were logged; [] before
        there is a file."""
        try:
            return [row for _, row in read_metrics(self.metrics_file)]
        except FileNotFoundError:
            return []

    def scores(self) -> dict[str, float]:
        """The newest value of every score of `eval_tasks`, by its logged name without `eval_tasks/`, such as
        piqa_acc; {} before the first evaluation."""
        logged = {name: value for row in self.rows() for name, value in row.items() if name.startswith(_SCORES)}
        return {name.removeprefix(_SCORES): value for name, value in logged.items()}

    def args_files(self) -> list[Path]:
        """The files of resolved arguments, one a start of `train.py` by deepy.py, the oldest first."""
        return sorted(self.logs.glob(_ARGS_FILES), key=lambda path: path.stat().st_mtime_ns)

    def args(self) -> NeoXArgs | None:
        """The configuration of the newest start, with the origin of each key; None where no start has left
        one (`train.py` started without deepy.py), or this version cannot read it."""
        for path in reversed(self.args_files()):
            try:
                return NeoXArgs.from_json(path.read_text(encoding="utf-8"))
            except (UserError, ValueError, KeyError):
                continue
        return None


def open_run(path: str | Path) -> RunFolder:
    """The run that a path names: its `save`, its log folder, or its metrics.jsonl.

    Raises RunFolderError where there is none.
    """
    path = Path(path).expanduser().absolute()
    if path.name == METRICS_FILE:
        path = path.parent
    if not path.is_dir():
        raise RunFolderError(f"{path}: no such folder; name the `save` of a run, or its log folder")
    if (path / STATUS).is_file():
        logged = _read_object(path / STATUS).get("log_dir")
        return RunFolder(path, Path(logged) if isinstance(logged, str) and Path(logged).is_dir() else path / "logs")
    if (path / "logs" / METRICS_FILE).is_file():
        return RunFolder(path, path / "logs")
    if (path / METRICS_FILE).is_file():
        return RunFolder(_save_of(path), path)
    raise RunFolderError(
        f"{path}: holds no run: neither {STATUS} nor {METRICS_FILE}; name the `save` of a run, or its log folder"
    )


def last_rows(metrics_file: Path, size: int = 4 * 1024 * 1024) -> list[dict[str, Any]]:
    """The rows in the last `size` bytes of a metrics.jsonl, which may have gigabytes; [] where there is
    none."""
    try:
        with metrics_file.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(0, end - size))
            lines = file.read(size).split(b"\n")
    except OSError:
        return []
    rows = []
    for line in lines if end <= size else lines[1:]:
        try:
            row = json.loads(line)
        except ValueError:  # a line that is being written, or that a run was killed in
            continue
        rows += [row] if isinstance(row, dict) and isinstance(row.get("iteration"), int) else []
    return rows


def experiment_of(save: str | Path, checkpoint_dir: str | Path | None = None) -> str:
    """The name of the experiment that saves here: the folder below the site's folder of checkpoints
    (NEOX_CHECKPOINT_DIR), else the last folder of `save`."""
    path = Path(save).expanduser().absolute()
    if checkpoint_dir is not None:
        root = Path(checkpoint_dir).expanduser().absolute()
        if path != root and path.is_relative_to(root):
            return path.relative_to(root).parts[0]
    return path.name


def _save_of(logs: Path) -> Path | None:
    """The folder of checkpoints of the run that logs here."""
    if (logs.parent / STATUS).is_file():
        return logs.parent
    args = RunFolder(None, logs).args()
    save = Path(args.save_dir).absolute() if args is not None and args.save_dir is not None else None
    return save if save is not None and save.is_dir() else None


def _read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} where there is no file. Raises RunFolderError for other text."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as problem:
        raise RunFolderError(f"{path}: cannot be read ({problem})") from None
    if not isinstance(value, dict):
        raise RunFolderError(f"{path}: holds no object of JSON")
    return value
