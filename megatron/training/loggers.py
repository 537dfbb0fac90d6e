"""Where metrics go: metrics.jsonl, TensorBoard, Weights & Biases. All take the same rows under the same names."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from megatron.neox_arguments import ConfigError, NeoXArgs

Row = Mapping[str, float | int]


class MetricLogger(Protocol):
    """Takes one row a step: `iteration` and values by name."""

    def write(self, row: Row) -> None: ...
    def close(self) -> None: ...


class JsonlLogger:
    """`metrics.jsonl`, one object a line in full precision, each step once.

    When a run goes on, its rows after `iteration` are cut. A file of another run (`log_dir` may be shared) is set aside
    as `metrics.1.jsonl` and so on.
    """

    def __init__(self, path: Path, iteration: int, run_id: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = list(self._rows(path)) if path.exists() else []
        if any(row.get("run_id") != run_id for _, row in rows):
            taken = (path.with_suffix(f".{i}.jsonl") for i in itertools.count(1))
            os.replace(path, next(name for name in taken if not name.exists()))
            rows = []
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(line + "\n" for line, row in rows if row["iteration"] <= iteration))
        os.replace(temporary, path)
        self._file = path.open("a")
        self._run_id = run_id

    @staticmethod
    def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
        for line in path.read_text().splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue  # the last line of a run that was killed while writing
            if isinstance(row, dict) and "iteration" in row:
                yield line, row

    def write(self, row: Row) -> None:
        self._file.write(json.dumps({**row, "run_id": self._run_id}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardLogger:
    """Event files; values after `iteration` of an earlier start are hidden by TensorBoard."""

    def __init__(self, directory: str, iteration: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(directory, purge_step=iteration + 1 if iteration else None)

    def write(self, row: Row) -> None:
        for name, value in row.items():
            if "/" in name:
                self._writer.add_scalar(name, value, int(row["iteration"]))

    def close(self) -> None:
        self._writer.close()


class WandbLogger:
    """One Weights & Biases run, the same one after a restart; one call a row."""

    def __init__(self, args: NeoXArgs, run_id: str) -> None:
        try:
            import wandb
        except ImportError as problem:
            place = args.origin("use_wandb")
            raise ConfigError([f"{place}: use_wandb needs wandb: pip install 'neox[wandb]'"]) from problem
        self._run: Any = wandb.init(
            id=run_id,
            resume="allow",
            project=args.wandb_project,
            group=args.wandb_group,
            name=args.wandb_run_name,
            entity=args.wandb_team,
            settings=wandb.Settings(base_url=args.wandb_host),
            config=json.loads(args.to_json())["given"],
        )

    def write(self, row: Row) -> None:
        self._run.log({name: value for name, value in row.items() if "/" in name}, step=int(row["iteration"]))

    def close(self) -> None:
        self._run.finish()


def log_directory(args: NeoXArgs) -> Path | None:
    """`log_dir`, else `<save>/logs`; None when neither is set."""
    if args.log_dir is not None:
        return Path(args.log_dir).expanduser()
    return Path(args.save).expanduser() / "logs" if args.save is not None else None


def build_loggers(args: NeoXArgs, iteration: int, run_id: str) -> list[MetricLogger]:
    """The loggers the configuration asks for; for rank 0. Raises ConfigError for a folder that cannot be written."""
    loggers: list[MetricLogger] = []
    directory = log_directory(args)
    folders = {"log_dir" if args.log_dir is not None else "save": directory, "tensorboard_dir": args.tensorboard_dir}
    for key, folder in folders.items():
        try:
            if folder is not None:
                Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise ConfigError([f"{args.origin(key)}: {key}: {folder}: {problem.strerror}"]) from problem
    if directory is not None:
        loggers.append(JsonlLogger(directory / "metrics.jsonl", iteration, run_id))
    if args.tensorboard_dir is not None:
        loggers.append(TensorBoardLogger(args.tensorboard_dir, iteration))
    if args.use_wandb:
        loggers.append(WandbLogger(args, run_id))
    return loggers
