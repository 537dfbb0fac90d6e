"""Where metrics go: metrics.jsonl, TensorBoard, Weights & Biases. All take the same rows under the same names."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from megatron.neox_arguments import ConfigError, NeoXArgs

Row = Mapping[str, float | int]


class MetricLogger(Protocol):
    """Takes one row a step: `iteration` and values by name."""

    def write(self, row: Row) -> None: ...
    def close(self) -> None: ...


class JsonlLogger:
    """`metrics.jsonl`, one object a line in full precision. Rows after `iteration` are cut: each step stands once."""

    def __init__(self, path: Path, iteration: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    if json.loads(line)["iteration"] <= iteration and iteration > 0:
                        kept.append(line)
                except (json.JSONDecodeError, KeyError):
                    continue  # the last line of a run that was killed while writing
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(line + "\n" for line in kept))
        os.replace(temporary, path)
        self._file = path.open("a")

    def write(self, row: Row) -> None:
        self._file.write(json.dumps(row) + "\n")
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
    """The loggers the configuration asks for; for rank 0."""
    loggers: list[MetricLogger] = []
    directory = log_directory(args)
    if directory is not None:
        loggers.append(JsonlLogger(directory / "metrics.jsonl", iteration))
    if args.tensorboard_dir is not None:
        loggers.append(TensorBoardLogger(args.tensorboard_dir, iteration))
    if args.use_wandb:
        loggers.append(WandbLogger(args, run_id))
    return loggers
