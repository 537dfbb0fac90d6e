"""Compares runs: differing keys, curves at common points, speed, scores."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from megatron.experiments.comparison.curves import AlignedCurve, Axis, align, on_axis
from megatron.experiments.comparison.scores import Score, ScoreDifference, differences, read_scores
from megatron.experiments.errors import RunError
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.keys.declaration import keys_of
from megatron.neox_arguments.reports.config_dump import differing_values
from megatron.neox_arguments.values.local_paths import with_home
from megatron.operations.report.run_data import Run, read_runs
from megatron.process.run_files import Problems

LOSSES = ("validation/lm_loss", "validation/*/lm_loss", "test/lm_loss", "train/lm_loss")
# Keys of where a run writes, how it is logged and how it is started: no differences between experiments
_PLACE_OWNERS = ("LoggingKeys", "OperationsKeys", "RunnerKeys")
_PLACE_KEYS = {
    "save", "local_save", "remote_staging", "s3_path", "index_cache_dir", "reference_cache_dir", "eval_output_dir",
    "eval_results_prefix", "eval_cache", "fused_kernels_build_path", "rank", "local_rank", "user_script",
    "branched_from",
}  # fmt: skip
# Keys on which the text and tokens of a validation depend. It reads eval_iters batches.
_MEASURED_ON = (
    "data_path", "split", "valid_*", "test_*", "tokenizer_type", "vocab_file", "merge_file", "seq_length",
    "eval_iters", "train_batch_size", "eod_mask_loss",
)  # fmt: skip


@dataclass(frozen=True)
class Differences:
    """The keys with different values. values: by key, a text for each run.

    derived: differing keys that follow from others. places: differing keys of folders, logging and launching.
    """

    values: Mapping[str, Sequence[str]]
    derived: Sequence[str] = ()
    places: Sequence[str] = ()


@dataclass(frozen=True)
class Speed:
    """The speed of a run; medians over its rows. None: not logged.

    utilization: of the peak (MFU). hours: in steps. gpus: number of ranks.
    """

    tokens_per_second: float | None
    utilization: float | None
    gpus: int | None
    hours: float | None
    tokens: float | None
    flops: float | None = None


@dataclass(frozen=True)
class Comparison:
    """All that `compare` finds out. runs: as read; placed_runs: with the positions of the axis.

    differences: None if the configuration of a run is unknown.
    scores: of each run, by name.
    plotted: metrics to plot: those asked for, else all that at least two runs have logged.
    notes: sentences on what could not be compared, or only in part.
    problems: messages on unusable content of files.
    """

    runs: Sequence[Run]
    placed_runs: Sequence[Run]
    axis: Axis
    differences: Differences | None
    curves: Sequence[AlignedCurve]
    speeds: Sequence[Speed]
    scores: Sequence[Mapping[str, Score]]
    score_differences: Sequence[ScoreDifference]
    plotted: Sequence[str]
    notes: Sequence[str]
    problems: Sequence[str]


def compare_runs(
    paths: Sequence[str | Path], axis: Axis = "step", metrics: Sequence[str] = (), folders: Sequence[str | Path] = (),
    all_keys: bool = False,
) -> Comparison:  # fmt: skip
    """Compares two or more runs; differences are from the first.

    paths: for each run its `save`, log folder or metrics.jsonl. metrics: names or patterns of the curves; ():
        losses. folders: further folders with result files of eval.py. all_keys: count keys of places too.

    Raises RunFolderError for a path without a run, RunError if nothing can be compared.
    """
    if len(paths) < 2:
        raise RunError(f"{paths[0]}: a comparison needs two runs or more; name another one")
    for folder in folders:
        if not with_home(folder).is_dir():
            raise RunError(f"--scores {folder}: no such folder; name one with result files of eval.py")
    runs = read_runs(paths)
    placed_runs = [on_axis(run, axis) for run in runs]
    scores = [read_scores(run, folders) for run in runs]
    problems = Problems()
    tested = differences(scores, problems)
    names = _metrics(
        placed_runs, metrics, has_scores=any(len(run_scores) for run_scores in scores[1:]) and bool(tested)
    )
    difference = _differences(runs, all_keys)
    return Comparison(
        runs, placed_runs, axis, difference, [align(placed_runs, name) for name in names],
        [_speed(run, placed_run, axis) for run, placed_run in zip(runs, placed_runs, strict=True)], scores, tested,
        names if metrics else _common_metrics(placed_runs), _notes(runs, placed_runs, names, difference),
        [*(line for run in runs for line in run.folder.problems.lines()), *problems.lines()],
    )  # fmt: skip


def keys_of_measurement(keys: Iterable[str]) -> list[str]:
    """Returns those keys on which a validation loss depends, besides the model."""
    return [
        key for key in keys
        if not key.startswith("valid_set") and any(fnmatchcase(key, pattern) for pattern in _MEASURED_ON)
    ]  # fmt: skip


def _metrics(runs: Sequence[Run], patterns: Sequence[str], has_scores: bool) -> list[str]:
    """Returns the metrics to compare: those that match `patterns`, and that at least two runs have logged.

    Raises RunError if there are none, unless the runs have common scores and `patterns` is empty."""
    common = _common_metrics(runs)
    for metric in patterns:
        if not any(fnmatchcase(name, metric) for name in common):
            logging_runs = [run.name for run in runs if any(fnmatchcase(name, metric) for name in run.series)]
            logged = f"only {logging_runs[0]} has logged it" if logging_runs else "no run has logged it"
            similar = difflib.get_close_matches(metric, common, 3, 0.4) or common[:3]
            hint = f"; common ones are {', '.join(similar)}" if similar else "; they have no common metric"
            raise RunError(f"--metric {metric}: {logged}{hint}")
    chosen = [name for metric in patterns or LOSSES for name in common if fnmatchcase(name, metric)]
    if not chosen and not has_scores:
        empty = [str(run.folder.metrics_file) for run in runs if not run.series]
        if empty:
            raise RunError(f"{empty[0]}: has no metrics yet, and there are no common scores; compare it later")
        hint = f"name a metric that two of them have: --metric {common[0]}" if common else "they have no common metric"
        raise RunError(f"{' and '.join(run.name for run in runs)}: no loss is logged by two of these runs; {hint}")
    return list(dict.fromkeys(chosen))


def _common_metrics(runs: Sequence[Run]) -> list[str]:
    names = dict.fromkeys(name for run in runs for name in run.series)
    return [name for name in names if sum(name in run.series for run in runs) > 1]


def _differences(runs: Sequence[Run], all_keys: bool) -> Differences | None:
    configurations = [run.args for run in runs if run.args is not None]
    if len(configurations) < len(runs):
        return None
    values = differing_values(configurations, origins=False)
    if all_keys:
        return Differences(values)
    keys = keys_of(NeoXArgs)
    places = [
        key for key in values
        if keys[name := key.partition(".")[0]].owner in _PLACE_OWNERS or name in _PLACE_KEYS
    ]  # fmt: skip
    goes_on = (
        args.load is None or _is_same_folder(args.load, args.save) or args.branched_from for args in configurations
    )
    if all(goes_on):  # of the run itself, to resume, or the parent of a branch, which has a line of its own
        places += [key for key in ("load", "iteration") if key in values]
    derived = [
        key for key in values
        if key not in places and all(args.origin(key) in ("derived", "default") for args in configurations)
    ]  # fmt: skip
    if derived and len(derived) + len(places) == len(values):
        derived = []  # a configuration from a checkpoint does not say which keys were set
    hidden = {*places, *derived}
    return Differences({key: texts for key, texts in values.items() if key not in hidden}, derived, places)


def _is_same_folder(load: str, save: str | None) -> bool:
    return save is not None and with_home(load).absolute() == with_home(save).absolute()


def _speed(run: Run, placed_run: Run, axis: Axis) -> Speed:
    def median(name: str) -> float | None:
        values = run.series[name].values if name in run.series else np.empty(0)
        values = values[np.isfinite(values)]
        return float(np.median(values)) if len(values) else None

    seconds = run.summary.get("training_seconds")
    tokens = max((float(np.nanmax(points.tokens)) for points in run.series.values()
                  if np.isfinite(points.tokens).any()), default=None)  # fmt: skip
    flops = max((float(points.iterations[-1]) for points in placed_run.series.values()), default=None)
    return Speed(
        median("runtime/tokens_per_sec"), median("runtime/model_flops_utilization"),
        run.summary.get("world_size") or (run.args.world_size if run.args is not None else None),
        seconds / 3600 if seconds is not None else None, tokens, flops if axis == "flops" else None,
    )  # fmt: skip


def _notes(
    runs: Sequence[Run], placed_runs: Sequence[Run], metrics: Sequence[str], difference: Differences | None
) -> list[str]:
    notes = []
    for run, placed_run in zip(runs, placed_runs, strict=True):
        if run.status.get("status") == "running":
            last = max((int(points.iterations[-1]) for points in run.series.values()), default=0)
            total = f" of {run.status['train_iters']:,}" if run.status.get("train_iters") else ""
            notes.append(f"{run.name} is still running (step {last:,}{total}): only its rows up to now are compared")
        if run.args is not None and (parent := run.args.branched_from) is not None:
            notes.append(f"{run.name} is a branch from step {parent['iteration']:,} of {parent['run']}")
        if run.args is None:
            notes.append(f"{run.name} has no configuration that this version can read: keys are not compared")
        if missing := [name for name in metrics if name not in placed_run.series]:
            notes.append(f"{run.name} has not logged {', '.join(missing)}")
    differing = [] if difference is None else [*difference.values, *difference.derived]
    measured_on = keys_of_measurement(differing)
    if measured_on and any(name.startswith(("validation/", "test/")) for name in metrics):
        notes.append(
            "validation and test losses are not of the same text or tokens, because of other values of "
            + ", ".join(measured_on)
        )
    return notes
