"""Writes `<save>/training_history.json`, from metrics.jsonl, and `<save>/training_summary.json` for other
programs."""

import json
import math
import platform
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megatron.callbacks import Callback, Step, TrainingRun
from megatron.checkpointing import CheckpointError, replace_file
from megatron.data import rows_per_sample, trains_preferences
from megatron.distributed import on_rank_zero
from megatron.neox_arguments.values.losses import sample_kind
from megatron.process.metrics_file import METRICS_FILE, POSITION, read_metrics
from megatron.process.run_files import SUMMARY, Problems
from megatron.process.spare import report_imports
from megatron.training.builtin_callbacks.best_model import FOLDER, read_best
from megatron.training.builtin_callbacks.status import note_failure, note_phases, say_ending, write_status
from megatron.training.metrics.loggers import log_directory
from megatron.training.nonfinite_guard import NonFiniteError
from megatron.training.run import Training

HISTORY = "training_history.json"
# The metrics that are copied from metrics.jsonl; norms of single parameters are not.
_KINDS = ("train/", "validation/", "test/", "eval_tasks/", "runtime/", "device/")
_FINAL = ("train/lm_loss", "validation/lm_loss", "test/lm_loss")
_LOOKED_AT = 64  # samples from which the average number of pairs in a packed row is estimated


class HistoryCallback(Callback):
    """Keeps status.json up to date; at the end it writes history, summary and the last line of the log.

    metadata: from `run_metadata`.
    """

    def __init__(self, training: Training, metadata: Mapping[str, Any]) -> None:
        self.training, self.metadata = training, metadata
        self._start_time = time.monotonic()
        self._is_running = False

    def on_train_start(self, run: TrainingRun) -> None:
        """Write the status `running` to status.json, and from now on every change of phase."""
        write_status(self.training, "running", None)
        note_phases(self.training)
        self._is_running = True

    def on_step_end(self, run: TrainingRun, step: Step) -> None:
        """After the first step, tell the launcher what this process has imported, for its spares."""
        report_imports()

    def on_error(self, run: TrainingRun, problem: Exception) -> None:
        """Write why the run failed: to history and summary after a NonFiniteError, which is in status.json
        already; else to status.json."""
        self.training.watchdog.listener = None  # closing the callbacks is not a phase of a running run
        if isinstance(problem, NonFiniteError):
            self._write("failed", str(problem))
        elif self._is_running and run.groups.world_rank == 0:
            note_failure(self.training, f"{type(problem).__name__}: {problem}".splitlines()[0])

    def close(self) -> None:
        """If the run did not fail, write its end to history, summary, status.json and the log."""
        ending = self.training.loop.ending
        if ending is not None:
            self._write(*ending)
            write_status(self.training, *ending)
            say_ending(self.training, *ending)

    def _write(self, status: str, reason: str | None) -> None:
        """Write history and summary on rank 0; nothing without `save`. All ranks call it together.

        A write that fails is only logged. status, reason: as in status.json.
        """
        wall_clock = time.monotonic() - self._start_time

        def write() -> None:
            try:
                _write(self.training, self.metadata, status, reason, wall_clock)
            except (OSError, CheckpointError) as problem:
                self.training.logger.warning(str(problem))

        if self.training.args.save_dir is not None:
            on_rank_zero(self.training.groups, write)


def history(rows: Sequence[Mapping[str, Any]], trainable_share: float) -> list[dict[str, Any]]:
    """Returns a record for each row of metrics.jsonl: its iteration, its metrics and `trainable_share`.

    Norms of single parameters are left out. Non-finite values become None.
    """
    known_metrics = [{name: row[name] for name in row if name in POSITION or name.startswith(_KINDS)} for row in rows]
    share = {"trainable_share": trainable_share}
    return [{name: _number(value) for name, value in row.items()} | share for row in known_metrics]


def training_time(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Returns (seconds, tokens) of the logged steps of all starts, without validation and saving."""
    seconds, tokens, last_iteration = 0.0, 0.0, 0
    for row in rows:
        if "runtime/iteration_time" in row and "runtime/tokens_per_sec" in row:
            step_seconds = row["runtime/iteration_time"] * (row["iteration"] - last_iteration)
            tokens += step_seconds * row["runtime/tokens_per_sec"]
            seconds, last_iteration = seconds + step_seconds, row["iteration"]
    return seconds, tokens


def _write(training: Training, metadata: Mapping[str, Any], status: str, reason: str | None, wall_clock: float) -> None:
    """Write training_history.json and training_summary.json. wall_clock: seconds since this start of the
    run."""
    folder, run_id = log_directory(training.args), training.checkpointer.run_id
    assert folder is not None and training.args.save_dir is not None
    file = folder / METRICS_FILE
    problems = Problems()
    rows = [row for row in read_metrics(file, problems) if row.get("run_id") == run_id] if file.is_file() else []
    for line in problems.lines():
        training.logger.warning(line)
    ending = {"status": status, "reason": reason, "run_id": run_id, "wall_clock_seconds": wall_clock}
    contents = {
        HISTORY: history(rows, metadata["trainable_share"]), SUMMARY: {**ending, **_summary(training, metadata, rows)}
    }  # fmt: skip
    for name, content in contents.items():
        data = (json.dumps(content, indent=1, allow_nan=False) + "\n").encode()
        replace_file(Path(training.args.save_dir) / name, data)


def _summary(training: Training, metadata: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    args, groups, progress, schedule = training.args, training.groups, training.progress, training.schedule
    seconds, tokens = training_time(rows)
    best = read_best(Path(args.save_dir or "") / FOLDER) if args.save_best is not None else None
    is_of_this_run = best is not None and best.run_id == training.checkpointer.run_id
    last = {name: row[name] for row in rows for name in _FINAL if name in row}
    return {
        "world_size": groups.world_size,
        "layout": {
            **{axis: groups.size(axis) for axis in ("tensor", "pipe", "context", "data")},
            "zero_stage": training.engine.zero_stage,
        },
        "precision": args.params_dtype,
        "objective": args.train_impl,
        "effective_batch": {
            "samples": args.train_batch_size,
            "rows": args.train_batch_size * rows_per_sample(args),
            "tokens": args.train_batch_size * rows_per_sample(args) * args.seq_length,
            "micro_batch": args.train_micro_batch_size_per_gpu,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            **_answers(training),
        },
        "learning_rate": {
            "given": args.lr, "lr_scaling": args.lr_scaling, "effective": schedule.start_lr,
            "least": schedule.min_lr, "last": schedule(progress.iteration),
        },
        "parameters": {
            "total": metadata["total_params"], "trainable": metadata["trainable_params"],
            "trainable_share": metadata["trainable_share"],
        },
        "iteration": progress.iteration,
        "train_iters": args.train_iters,
        "skipped_steps": progress.skipped,
        "consumed_samples": progress.consumed_samples,
        "consumed_tokens": progress.consumed_tokens,
        "training_seconds": seconds,
        "tokens_per_sec": tokens / seconds if seconds else None,
        "best": None if best is None or not is_of_this_run else {
            "metric": best.metric, "value": best.value, "iteration": best.iteration, "folder": FOLDER,
        },
        "final": {name: _number(value) for name, value in last.items()},
        "start_weights": None if args.load == args.save else args.load,  # None: freshly initialised
        "versions": {"python": platform.python_version(), **{name: version(name) for name in ("torch", "deepspeed")}},
        "git_hash": metadata["git_hash"],
    }  # fmt: skip


def _answers(training: Training) -> dict[str, float]:
    """Returns the average number of pairs (for KTO, of examples) in a step, such as `{"pairs": 12.5}`.

    It is estimated from the first samples. Returns {} if the run does not train on preferences.
    """
    args, dataset = training.args, training.datasets.train
    if not trains_preferences(args) or dataset is None:
        return {}
    samples = [len(dataset[i].preference_labels) for i in range(min(_LOOKED_AT, len(dataset)))]  # type: ignore[union-attr]
    name, answers = ("pairs", 2) if sample_kind(args) == "pairs" else ("examples", 1)
    return {name: sum(samples) / len(samples) / answers * args.train_batch_size}


def _number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
