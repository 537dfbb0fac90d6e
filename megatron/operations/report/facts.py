"""Builds the tables of a report on a run: its state, model, data and configuration."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.reports.config_dump import flat_values, yaml_value
from megatron.operations.report.run_data import Run

Facts = list[tuple[str, str]]
_LOSSES = {
    "last training loss": "train/lm_loss", "last validation loss": "validation/lm_loss",
    "last test loss": "test/lm_loss",
}  # fmt: skip


@dataclass(frozen=True)
class ConfigRow:
    """A row of the table of the configuration: a key, its resolved value, and where the value comes from."""

    key: str
    value: str
    origin: str


def summary_facts(run: Run) -> Facts:
    """Returns (name, text) pairs on the state of a run, from status.json, training_summary.json and
    metrics."""
    status, summary = run.status, run.summary
    # Rows of metrics.jsonl may be ahead of status.json, which is written less often.
    iteration = max(int(_last(run, "iterations") or 0), int(status.get("iteration") or 0))
    total = status.get("train_iters") or summary.get("train_iters")
    best, speed = summary.get("best"), summary.get("tokens_per_sec")
    if speed is None and "runtime/tokens_per_sec" in run.series:
        speed = run.series["runtime/tokens_per_sec"].values[-1]
    return _facts(
        ("status", _status(run)),
        ("iteration", f"{iteration:,}" + (f" of {total:,}" if total else "")),
        ("tokens", _count(_last(run, "tokens"))),
        *((fact, f"{run.series[name].values[-1]:.4f}") for fact, name in _LOSSES.items() if name in run.series),
        ("best model", f"{best['metric']} {best['value']:.4f} at iteration {best['iteration']:,}" if best else None),
        ("time in steps", _duration(summary.get("training_seconds"))),
        ("time of the last start", _duration(summary.get("wall_clock_seconds"))),
        ("tokens per second", _count(speed)),
        ("world size", summary.get("world_size")),
        ("parameters", _parameters(summary)),
        ("skipped steps", summary.get("skipped_steps")),
    )


def model_facts(run: Run) -> Facts:
    """Returns (name, text) pairs on a run's model, parallel layout, batch, code versions and folders."""
    summary, args = run.summary, run.args
    manifest = run.checkpoints[-1].manifest if run.checkpoints else {}
    model = None
    if args is not None:
        size = f"{args.num_layers} layers, hidden size {args.hidden_size}, {args.num_attention_heads} heads"
        model = f"{size}, sequences of {args.seq_length}"
    layout = summary.get("layout") or manifest.get("layout") or {}
    batch = summary.get("effective_batch") or {}
    versions = summary.get("versions") or manifest.get("versions") or {}
    return _facts(
        ("model", model),
        ("parameters", _parameters(summary)),
        ("precision", summary.get("precision")),
        ("objective", summary.get("objective")),
        ("layout", ", ".join(f"{axis} {size}" for axis, size in layout.items())),
        ("batch", ", ".join(f"{_words(name)} {value:,}" for name, value in batch.items())),
        ("engine", manifest.get("engine")),
        ("started from", summary.get("start_weights") or ("fresh weights" if summary else None)),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("commit", summary.get("git_hash")),
        ("run", run.status.get("run_id") or summary.get("run_id")),
        ("save", run.folder.save),
        ("logs", run.folder.logs),
    )


def data_facts(run: Run) -> Facts:
    """Returns (name, text) pairs on a run's data: paths, and the digests and sizes in its last checkpoint."""
    values = flat_values(run.args) if run.args is not None else []
    paths = [
        (key, yaml_value(value))
        for key, value in values
        if value and (key.endswith(("data_path", "data_paths")) or key.startswith("valid_sets"))
    ]
    if not run.checkpoints:
        return _facts(*paths)
    manifest = run.checkpoints[-1].manifest
    data, samples = manifest["data"], manifest.get("consumed_samples")
    laid_out = (data.get("laid_out") or {}).items()
    counts = (f"{name} {sum(ends[-1] for ends in members if ends):,}" for name, members in laid_out)
    return _facts(
        *paths,
        *((f"files of {name}", _digest(digest)) for name, digest in (data.get("files") or {}).items()),
        ("samples laid out", ", ".join(counts)),
        ("digest of samples read", data.get("consumed_sha256")),
        ("digest of the tokenizer", manifest.get("tokenizer")),
        ("samples read at the last save", f"{samples:,}" if samples is not None else None),
    )


def config_rows(args: NeoXArgs) -> tuple[list[ConfigRow], list[ConfigRow]]:
    """Returns (rows of keys that were set or derived, rows of keys that have their default)."""
    rows = [ConfigRow(key, yaml_value(value), args.origin(key)) for key, value in flat_values(args)]
    return [row for row in rows if row.origin != "default"], [row for row in rows if row.origin == "default"]


def local_time(text: Any) -> str:
    """Converts an ISO 8601 time to text in this machine's local time; "" for anything else."""
    try:
        return f"{datetime.fromisoformat(text).astimezone():%Y-%m-%d %H:%M:%S}"
    except (TypeError, ValueError):
        return ""


def scores_of(run: Run) -> dict[str, float]:
    """Returns the last logged value of each score of `eval_tasks`, by TASK_METRIC."""
    scores = ((name, series) for name, series in run.series.items() if name.startswith("eval_tasks/"))
    return {name.removeprefix("eval_tasks/"): float(series.values[-1]) for name, series in scores}


def _facts(*facts: tuple[str, Any]) -> Facts:
    """Returns the (name, value) pairs as text, without those whose value is None or ""."""
    return [(name, str(value)) for name, value in facts if value not in (None, "")]


def _status(run: Run) -> str:
    status = run.status.get("status") or run.summary.get("status") or "unknown (no status.json)"
    reason = run.status.get("reason") or ""
    timestamp = local_time(run.status.get("time"))
    return f"{status}{': ' if reason else ''}{reason}{f' ({timestamp})' if timestamp else ''}"


def _last(run: Run, column: str) -> float | None:
    ends = [float(getattr(series, column)[-1]) for series in run.series.values()]
    return max((end for end in ends if end == end), default=None)


def _parameters(summary: Mapping[str, Any]) -> str | None:
    counts = summary.get("parameters")
    if not counts:
        return None
    return f"{counts['total']:,} ({counts['trainable']:,} trained, {counts['trainable_share']:.1%})"


def _count(value: float | None) -> str | None:
    return f"{value:,.0f}" if value is not None else None


def _duration(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {remainder} s" if minutes else f"{seconds:.1f} s"


def _digest(entry: Any) -> str:
    """Formats a manifest's entry on a data set as one line of text, with hashes shortened to 16 digits."""
    return ", ".join(_leaves(entry, "")) if isinstance(entry, Mapping) else str(entry)


def _leaves(entry: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, value in entry.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            text = f"{value:,}" if isinstance(value, int | float) else value[:16] if "sha256" in name else value
            yield f"{prefix}{_words(name)} {text}"


def _words(name: str) -> str:
    return name.replace("_", " ")
