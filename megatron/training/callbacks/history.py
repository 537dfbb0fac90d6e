"""What is left of a run to be read by others: `<save>/training_history.json`, made of metrics.jsonl, and
`<save>/training_summary.json`."""

import json
import math
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megatron.checkpointing import CheckpointError, replace_file
from megatron.data import rows_per_sample, trains_preferences
from megatron.distributed import on_rank_zero
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.values.losses import sample_kind
from megatron.training.callbacks.best_model import FOLDER, read_best
from megatron.training.metrics.loggers import METRICS_FILE, POSITION, log_directory, read_metrics
from megatron.training.setup import Training

HISTORY, SUMMARY = "training_history.json", "training_summary.json"
# Of metrics.jsonl; norms of single parameters stay there.
_KINDS = ("train/", "validation/", "test/", "eval_tasks/", "runtime/", "device/")
_FINAL = ("train/lm_loss", "validation/lm_loss", "test/lm_loss")
_LOOKED_AT = 64  # samples, for how many pairs a packed row has on average


def history(rows: Sequence[Mapping[str, Any]], trainable_share: float) -> list[dict[str, Any]]:
    """A record for each row, under its own names; null for what was no number."""
    records = []
    for row in rows:
        kept = {name: value for name, value in row.items() if name in POSITION or name.startswith(_KINDS)}
        records.append({**{name: _number(value) for name, value in kept.items()}, "trainable_share": trainable_share})
    return records


def training_time(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """(seconds, tokens) of the logged steps of all starts, without validation and saving."""
    seconds, tokens, before = 0.0, 0.0, 0
    for row in rows:
        if "runtime/iteration_time" in row:
            own = row["runtime/iteration_time"] * (row["iteration"] - before)
            seconds, tokens, before = seconds + own, tokens + own * row["runtime/tokens_per_sec"], row["iteration"]
    return seconds, tokens


def write_history(
    training: Training, facts: Mapping[str, Any], status: str, reason: str | None, wall_clock: float
) -> None:
    """Both files, of rank 0; all ranks call it together. Nothing without `save`. That they cannot be written is said;
    how the run ended stays as it is.

    facts: as `run_facts`; status, reason: as in status.json; wall_clock: seconds of this start.
    """

    def write() -> None:
        try:
            _write(training, facts, status, reason, wall_clock)
        except (OSError, CheckpointError) as problem:
            training.logger.warning(str(problem))

    if training.args.save_dir is not None:
        on_rank_zero(training.groups, write)


def _write(training: Training, facts: Mapping[str, Any], status: str, reason: str | None, wall_clock: float) -> None:
    folder, run_id = log_directory(training.args), training.checkpointer.run_id
    assert folder is not None and training.args.save_dir is not None
    file = folder / METRICS_FILE
    rows = [row for _, row in read_metrics(file) if row.get("run_id") == run_id] if file.is_file() else []
    ending = {"status": status, "reason": reason, "run_id": run_id, "wall_clock_seconds": wall_clock}
    contents = {
        HISTORY: history(rows, facts["trainable_share"]), SUMMARY: {**ending, **_summary(training, facts, rows)}
    }  # fmt: skip
    for name, content in contents.items():
        data = (json.dumps(content, indent=1, allow_nan=False) + "\n").encode()
        replace_file(Path(training.args.save_dir) / name, data)


def _summary(training: Training, facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    args, groups, progress, schedule = training.args, training.groups, training.progress, training.schedule
    seconds, tokens = training_time(rows)
    best = read_best(Path(args.save_dir or "") / FOLDER) if args.save_best is not None else None
    own = best is not None and best.run_id == training.checkpointer.run_id
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
            "total": facts["total_params"], "trainable": facts["trainable_params"],
            "trainable_share": facts["trainable_share"],
        },
        "iteration": progress.iteration,
        "train_iters": args.train_iters,
        "skipped_steps": progress.skipped,
        "consumed_samples": progress.consumed_samples,
        "consumed_tokens": progress.consumed_tokens,
        "training_seconds": seconds,
        "tokens_per_sec": tokens / seconds if seconds else None,
        "best": None if best is None or not own else {
            "metric": best.metric, "value": best.value, "iteration": best.iteration, "folder": FOLDER,
        },
        "final": {name: _number(value) for name, value in last.items()},
        "start_weights": _start_weights(args),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in ("torch", "deepspeed")}},
        "git_hash": facts["git_hash"],
    }  # fmt: skip


def _answers(training: Training) -> dict[str, float]:
    """Pairs, or examples of KTO, of a step; packed ones on average over the first rows."""
    args, dataset = training.args, training.datasets.train
    if not trains_preferences(args) or dataset is None:
        return {}
    samples = [len(dataset[i].preference_labels) for i in range(min(_LOOKED_AT, len(dataset)))]  # type: ignore[union-attr]
    name, answers = ("pairs", 2) if sample_kind(args) == "pairs" else ("examples", 1)
    return {name: sum(samples) / len(samples) / answers * args.train_batch_size}


def _start_weights(args: NeoXArgs) -> str | None:
    """What the run was begun with; None: freshly initialised weights."""
    return None if args.load is None or args.load == args.save else args.load


def _number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
