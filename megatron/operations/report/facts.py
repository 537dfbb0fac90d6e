"""Builds the tables of a report: a run's state, its model and data, its configuration."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.reports.config_dump import flat_values, yaml_value
from megatron.operations.report.run_data import Run

Facts = list[tuple[str, str]]


@dataclass(frozen=True)
class ConfigRow:
    """A resolved value of the configuration, and its origin."""

    key: str
    value: str
    origin: str


def summary_facts(run: Run) -> Facts:
    """The state of a run, from its status, its summary and its last rows."""
    status, summary = run.status, run.summary
    facts: Facts = []
    _add(facts, "status", _status(run))
    iteration, total = _iteration(run), status.get("train_iters") or summary.get("train_iters")
    _add(facts, "iteration", f"{iteration:,}" + (f" of {total:,}" if total else ""))
    _add(facts, "tokens", _count(_last(run, "tokens")))
    for name in ("train/lm_loss", "validation/lm_loss", "test/lm_loss"):
        if name in run.series:
            kind = name.partition("/")[0]
            _add(facts, f"last {'training' if kind == 'train' else kind} loss", f"{run.series[name].values[-1]:.4f}")
    if best := summary.get("best"):
        _add(facts, "best model", f"{best['metric']} {best['value']:.4f} at iteration {best['iteration']:,}")
    if (seconds := summary.get("training_seconds")) is not None:
        _add(facts, "time in steps", _duration(seconds))
    if (seconds := summary.get("wall_clock_seconds")) is not None:
        _add(facts, "time of the last start", _duration(seconds))
    speed = summary.get("tokens_per_sec")
    if speed is None and "runtime/tokens_per_sec" in run.series:
        speed = run.series["runtime/tokens_per_sec"].values[-1]
    _add(facts, "tokens per second", f"{speed:,.0f}" if speed is not None else None)
    _add(facts, "world size", summary.get("world_size"))
    _add(facts, "parameters", _parameters(summary))
    _add(facts, "skipped steps", summary.get("skipped_steps"))
    return facts


def model_facts(run: Run) -> Facts:
    """The model, its parallel layout, and the versions of code that trained it."""
    summary, args = run.summary, run.args
    manifest = run.checkpoints[-1].manifest if run.checkpoints else {}
    facts: Facts = []
    if args is not None:
        size = f"{args.num_layers} layers, hidden size {args.hidden_size}, {args.num_attention_heads} heads"
        _add(facts, "model", f"{size}, sequences of {args.seq_length}")
    _add(facts, "parameters", _parameters(summary))
    _add(facts, "precision", summary.get("precision"))
    _add(facts, "objective", summary.get("objective"))
    layout = summary.get("layout") or manifest.get("layout") or {}
    _add(facts, "layout", ", ".join(f"{axis} {size}" for axis, size in layout.items()))
    batch = summary.get("effective_batch") or {}
    _add(facts, "batch", ", ".join(f"{_words(name)} {value:,}" for name, value in batch.items()))
    _add(facts, "engine", manifest.get("engine"))
    _add(facts, "started from", summary.get("start_weights") or ("fresh weights" if summary else None))
    versions = summary.get("versions") or manifest.get("versions") or {}
    _add(facts, "versions", ", ".join(f"{name} {version}" for name, version in versions.items()))
    _add(facts, "commit", summary.get("git_hash"))
    _add(facts, "run", run.status.get("run_id") or summary.get("run_id"))
    _add(facts, "save", run.folder.save)
    _add(facts, "logs", run.folder.logs)
    return facts


def data_facts(run: Run) -> Facts:
    """Paths of the data, and the digests and sizes by which a checkpoint identifies them."""
    facts: Facts = []
    if run.args is not None:
        for key, value in flat_values(run.args):
            if key.endswith(("data_path", "data_paths")) and value:
                _add(facts, key, yaml_value(value))
    if not run.checkpoints:
        return facts
    manifest = run.checkpoints[-1].manifest
    data = manifest["data"]
    for name, digest in (data.get("files") or {}).items():
        _add(facts, f"files of {name}", _digest(digest))
    laid_out = (data.get("laid_out") or {}).items()
    counts = (f"{name} {sum(ends[-1] for ends in members if ends):,}" for name, members in laid_out)
    _add(facts, "samples laid out", ", ".join(counts))
    _add(facts, "digest of samples read", data.get("consumed_sha256"))
    _add(facts, "digest of the tokenizer", manifest.get("tokenizer"))
    samples = manifest.get("consumed_samples")
    _add(facts, "samples read at the last save", f"{samples:,}" if samples is not None else None)
    return facts


def config_rows(args: NeoXArgs) -> tuple[list[ConfigRow], list[ConfigRow]]:
    """Returns (rows of keys that were set or derived, rows of keys that have their default)."""
    rows = [ConfigRow(key, yaml_value(value), args.origin(key)) for key, value in flat_values(args)]
    return [row for row in rows if row.origin != "default"], [row for row in rows if row.origin == "default"]


def local_time(text: Any) -> str:
    """A time in ISO 8601 as local time of this machine; "" if it is not one."""
    try:
        return f"{datetime.fromisoformat(text).astimezone():%Y-%m-%d %H:%M:%S}"
    except (TypeError, ValueError):
        return ""


def scores_of(run: Run) -> dict[str, float]:
    """The last value of each score of `eval_tasks`."""
    scores = ((name, series) for name, series in run.series.items() if name.startswith("eval_tasks/"))
    return {name.removeprefix("eval_tasks/"): float(series.values[-1]) for name, series in scores}


def _add(facts: Facts, name: str, value: Any) -> None:
    if value not in (None, ""):
        facts.append((name, str(value)))


def _status(run: Run) -> str:
    status = run.status.get("status") or run.summary.get("status") or "unknown (no status.json)"
    reason = run.status.get("reason") or ""
    timestamp = local_time(run.status.get("time"))
    return f"{status}{': ' if reason else ''}{reason}{f' ({timestamp})' if timestamp else ''}"


def _iteration(run: Run) -> int:
    """The last iteration; rows may be ahead of status.json, which is written less often."""
    return max(int(_last(run, "iterations") or 0), int(run.status.get("iteration") or 0))


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


def _duration(seconds: float) -> str:
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {remainder} s" if minutes else f"{seconds:.1f} s"


def _digest(entry: Any) -> str:
    """Formats the manifest's entry on a data set as one line, with hashes shortened to 16 digits."""
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
