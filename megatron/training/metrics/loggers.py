"""Writes metrics to metrics.jsonl, TensorBoard, Weights & Biases and Comet.

All of them get the same rows with the same names, in one call per step.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from megatron.neox_arguments import ConfigError, ModelArgs, NeoXArgs
from megatron.neox_arguments.values.local_paths import with_home
from megatron.neox_arguments.values.remote_paths import is_remote
from megatron.process import say
from megatron.process.metrics_file import METRICS_FILE, POSITION, JsonlLogger

MetricRow = Mapping[str, float | int]


def metrics(row: MetricRow) -> dict[str, float | int]:
    """Returns a row without the fields that say where it belongs (`POSITION`), such as the iteration."""
    return {name: value for name, value in row.items() if name not in POSITION}


class MetricLogger(Protocol):
    """Writes metrics to one destination. `write` takes the row of a step: `iteration` and metrics by name."""

    def write(self, row: MetricRow) -> None: ...
    def close(self) -> None: ...


class TolerantTracker:
    """Wraps a logger so that an OSError while it writes, as on a full disk, gives one warning and no
    exception."""

    def __init__(self, target: MetricLogger, say: Callable[[str], None]) -> None:
        self._target, self._say, self._has_warned = target, say, False

    def write(self, row: MetricRow) -> None:
        with self._caught():
            self._target.write(row)

    def close(self) -> None:
        with self._caught():
            self._target.close()

    @contextmanager
    def _caught(self) -> Iterator[None]:
        try:
            yield
        except OSError as problem:
            if not self._has_warned:
                self._has_warned = True
                reason = problem.strerror or problem
                self._say(
                    f"{type(self._target).__name__} cannot write ({reason}); its metrics are lost, the run goes on"
                )


class TensorBoardLogger:
    """Writes TensorBoard event files. TensorBoard then hides values that an earlier start of the run wrote
    for steps after `iteration`."""

    def __init__(self, directory: str, iteration: int, config: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import SummaryWriter

        self._summary = Summary
        self._writer = SummaryWriter(directory, purge_step=iteration + 1 if iteration else None)
        self._writer.add_text("config", f"```json\n{json.dumps(config, indent=1)}\n```", iteration)

    def write(self, row: MetricRow) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics(row).items()]
        # This writes one event per step; add_scalar would write one per metric.
        self._writer._get_file_writer().add_summary(self._summary(value=values), int(row["iteration"]))

    def close(self) -> None:
        self._writer.close()


class WandbLogger:
    """Writes to a Weights & Biases run, which a restart continues. `run_id` names it."""

    def __init__(self, args: NeoXArgs, run_id: str, rank: int, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as problem:
            place = args.origin("use_wandb")
            raise ConfigError([f"{place}: use_wandb needs wandb: pip install 'neox[wandb]'"]) from problem
        directory = log_directory(args)
        name, group = args.wandb_run_name, args.wandb_group
        if args.wandb_init_all_ranks:  # W&B shows the ranks' runs together by their group
            name, group = f"{name or run_id}-rank{rank}", group or run_id
        try:
            self._run: Any = wandb.init(
                id=run_id if rank == 0 else f"{run_id}-rank{rank}",
                resume="allow",
                project=args.wandb_project,
                group=group,
                name=name,
                entity=args.wandb_team,
                mode=args.wandb_mode,
                dir=str(directory) if directory is not None else None,
                settings=wandb.Settings(base_url=args.wandb_host),
                config=dict(config),
            )
        except wandb.Error as problem:
            raise args.error(
                "use_wandb", f"wandb.init failed: {problem}; fix it, or set wandb_mode: offline"
            ) from problem

    def write(self, row: MetricRow) -> None:
        self._run.log(metrics(row), step=int(row["iteration"]))

    def close(self) -> None:
        self._run.finish()


class CometLogger:
    """Writes to a Comet experiment, which a restart continues.

    With `comet_mode: offline` every start writes an archive into log_dir, for `comet upload`.
    """

    def __init__(self, args: NeoXArgs, run_id: str, config: Mapping[str, Any]) -> None:
        place, directory = args.origin("use_comet"), log_directory(args)
        try:
            import comet_ml
        except ImportError as problem:
            raise ConfigError([f"{place}: use_comet needs comet-ml: pip install 'neox[comet]'"]) from problem
        offline = args.comet_mode == "offline"
        if offline and directory is None:
            raise args.error("comet_mode", "offline writes its archive into log_dir, which is not set; set log_dir")
        try:
            self._experiment: Any = comet_ml.start(
                workspace=args.comet_workspace,
                project=args.comet_project,
                experiment_key=run_id,  # 32 hexadecimal digits, as Comet wants
                mode="get_or_create",
                online=not offline,
                experiment_config=comet_ml.ExperimentConfig(
                    name=args.comet_experiment_name,
                    tags=list(args.comet_tags or ()),
                    offline_directory=str(directory) if offline else None,
                    auto_output_logging=False,  # type: ignore[arg-type]  # says str, takes False; output is in log_dir
                    auto_param_logging=False,
                    auto_metric_logging=False,
                    log_code=False,
                    log_graph=False,
                ),
            )
        except Exception as problem:  # Comet's own, those of requests, or ValueError
            raise args.error(
                "use_comet", f"comet_ml.start failed: {problem}; fix it, or set comet_mode: offline"
            ) from problem
        self._experiment.log_parameters(dict(config))
        self._experiment.log_others(dict(args.comet_others or {}))

    def write(self, row: MetricRow) -> None:
        self._experiment.log_metrics(metrics(row), step=int(row["iteration"]))

    def close(self) -> None:
        self._experiment.end()


def log_directory(args: NeoXArgs) -> Path | None:
    """Returns `log_dir`, else `<save>/logs`, or `logs` if `save` is remote; None if neither key is set."""
    if args.log_dir is not None:
        return with_home(args.log_dir)
    if is_remote(args.save):
        return Path("logs")
    return with_home(args.save) / "logs" if args.save is not None else None


def build_loggers(
    args: NeoXArgs,
    iteration: int,
    run_id: str,
    metadata: Mapping[str, Any],
    rank: int = 0,
    say: Callable[[str], None] = say,
) -> list[MetricLogger]:
    """Returns this rank's loggers: on rank 0 all configured ones, on other ranks W&B if
    `wandb_init_all_ranks` is set.

    metadata: shown by trackers next to the configuration. say: takes one warning from each logger that cannot
    write any more. Raises ConfigError if a folder cannot be written or a tracker does not start.
    """
    config = {**args.public_values, **metadata}
    if rank > 0:
        return [WandbLogger(args, run_id, rank, config)] if args.use_wandb and args.wandb_init_all_ranks else []
    rows = build_jsonl(args, METRICS_FILE, iteration, run_id, say)
    trackers = [TolerantTracker(target, say) for target in build_trackers(args, iteration, run_id, config)]
    return [*([rows] if rows is not None else []), *trackers]


def build_jsonl(
    args: NeoXArgs, name: str, iteration: int, run_id: str, say: Callable[[str], None]
) -> JsonlLogger | None:
    """Returns a logger that writes the file `name` in `log_directory`; None if there is no such folder.

    Raises ConfigError if the folder cannot be written.
    """
    directory = log_directory(args)
    if directory is None:
        return None
    with _writable(args, "log_dir" if args.log_dir is not None else "save", directory):
        return JsonlLogger(directory / name, iteration, run_id, say)


@contextmanager
def _writable(args: ModelArgs, key: str, folder: str | Path | None) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise args.error(key, f"cannot write to {folder} ({problem.strerror}); set another folder") from problem


def build_trackers(args: NeoXArgs, iteration: int, run_id: str, config: Mapping[str, Any]) -> list[MetricLogger]:
    """Returns the configured trackers: TensorBoard, Weights & Biases, Comet. Raises ConfigError if one of
    them does not start."""
    loggers: list[MetricLogger] = []
    if args.tensorboard_dir is not None:
        with _writable(args, "tensorboard_dir", args.tensorboard_dir):
            loggers.append(TensorBoardLogger(args.tensorboard_dir, iteration, config))
    if args.use_wandb:
        loggers.append(WandbLogger(args, run_id, 0, config))
    if args.use_comet:
        loggers.append(CometLogger(args, run_id, config))
    return loggers
