"""The table of stages, live on a terminal, and the lines of what happens."""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.live import Live
from rich.table import Table
from rich.text import Text

from megatron.operations.jobs.table import console, duration
from megatron.operations.run_folder import RunFolder
from megatron.pipelines.definition import Pipeline, Stage
from megatron.pipelines.errors import PipelineError
from megatron.pipelines.promotion import promoted_verdict
from megatron.pipelines.state import (
    DONE,
    FAILED,
    PROMOTED,
    REFUSED,
    RUNNING,
    Override,
    StageRecord,
    State,
    read_overrides,
)
from megatron.pipelines.verdicts import read_verdict
from megatron.process import say

_COLOURS = {
    FAILED: "bold red",
    REFUSED: "bold yellow",
    PROMOTED: "green",
    DONE: "green",
    RUNNING: "bold",
    "waiting": "dim",
}
_SAY_EVERY_S, _DRAW_EVERY_S = 60.0, 1.0
_TAIL = 256 * 1024  # bytes of metrics.jsonl
_SHOWN = ("train/lm_loss", "validation/lm_loss", "train/rewards/accuracies", "validation/rewards/accuracies")


class Display:
    """What a person sees while a pipeline runs: on a terminal the table, redrawn; else a line now and
    then."""

    def __init__(self, pipeline: Pipeline, state: State, say: Callable[[str], None]) -> None:
        self._pipeline, self._state, self._say = pipeline, state, say
        self._console = console(sys.stderr)
        self._live: Live | None = None
        self._drawn = self._said = time.monotonic()

    def __enter__(self) -> "Display":
        if self._console.is_terminal:
            self._live = Live(self._table(), console=self._console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *unused: object) -> None:
        if self._live is not None:
            self._live.update(Text(""), refresh=True)
            self._live.stop()
            self._live = None

    def of_stage(self, name: str) -> Callable[[str], None]:
        """Takes lines about one stage."""
        return lambda line: self._say(f"{name}: {line}")

    def beat(self) -> None:
        """Called often while a command runs."""
        now = time.monotonic()
        if self._live is not None and now - self._drawn >= _DRAW_EVERY_S:
            self._drawn = now
            self._live.update(self._table(), refresh=True)
        elif self._live is None and now - self._said >= _SAY_EVERY_S:
            self._said = now
            for stage in self._pipeline.stages:
                if self._state[stage.name].status == RUNNING:
                    self._say(f"{stage.name}: {progress_of(self._pipeline, stage) or 'running'}")

    def print_table(self) -> None:
        """The table once more, as it is at the end."""
        with self._console.capture() as shown:  # rich would end this process where nobody reads
            self._console.print(self._table())
        say(shown.get().rstrip("\n"))

    def _table(self) -> Table:
        return stage_table(self._pipeline, self._state, self._console.is_terminal, works=True)


def progress_of(pipeline: Pipeline, stage: Stage) -> str:
    """`iteration 120/300, train/lm_loss 4.2`, "" where a stage has none."""
    save = pipeline.save(stage.name)
    folder = RunFolder(save, save / "logs")
    status, rows = folder.status(), folder.last_rows(_TAIL)
    unread = [f"not used: {line}" for line in folder.problems.lines()]
    if not rows or not status:
        shown = [f"iteration 0/{status['train_iters']}"] if status.get("train_iters") else []
        return ", ".join([*shown, *unread])
    values: dict[str, Any] = {}
    for row in rows:
        values |= {name: row[name] for name in _SHOWN if name in row}
    shown = [f"iteration {rows[-1]['iteration']}/{status.get('train_iters')}"]
    shown += [f"{name} {values[name]:.4g}" for name in _SHOWN if name in values]
    return ", ".join([*shown, *unread])


def rows_of(pipeline: Pipeline, state: State, works: bool) -> list[dict[str, str]]:
    """The cells of the table by column, a row for each stage. works: whether some process works in it now:
    without one what was running has been interrupted."""
    overrides = read_overrides(pipeline.folder)
    rows = []
    for stage in pipeline.stages:
        record = state[stage.name]
        took = record.seconds
        status = record.status if works or record.status != RUNNING else "interrupted"
        rows.append({
            "stage": stage.name, "kind": stage.kind,
            "state": status + (f", job {record.job}" if record.job else ""),
            "progress": progress_of(pipeline, stage) if stage.kind == "train" else "",
            "gate": gate_words(pipeline, stage, state),
            "final": record.promoted["sha256"][:12] if record.promoted else "",
            "took": duration(took) if took else "",
            "notes": "; ".join(notes_of(pipeline, stage, state, overrides)),
        })  # fmt: skip
    return rows


def gate_words(pipeline: Pipeline, stage: Stage, state: State) -> str:
    """The newest verdict on a stage in a word or two."""
    record = state[stage.name]
    if record.verdict is None:
        return "none" if record.promoted and stage.kind == "train" else ""
    try:
        verdict = read_verdict(pipeline.folder, record.verdict)
    except PipelineError:  # logs may be removed; what was promoted by it keeps a copy
        return _gate_without_file(pipeline, stage, record)
    if verdict["weights_sha256"] != record.weights.get("sha256"):
        return ""  # of an earlier attempt
    is_overridden = record.promoted.get("override") and record.promoted["sha256"] == verdict["weights_sha256"]
    return f"{verdict['result']} ({Path(record.verdict).stem})" + (", overridden" if is_overridden else "")


def _gate_without_file(pipeline: Pipeline, stage: Stage, record: StageRecord) -> str:
    """The verdict of a gate whose file is gone or damaged, from what else is known."""
    name = Path(record.verdict or "").name
    try:
        kept = promoted_verdict(pipeline.final(stage.name))
    except PipelineError:
        kept = {}
    if kept.get("file") == record.verdict and kept.get("weights_sha256") == record.weights.get("sha256"):
        return f"{kept.get('result')} ({Path(name).stem}, whose file is gone)"
    return f"unknown ({name} is gone or damaged; `gate {stage.name}` judges again)"


def notes_of(pipeline: Pipeline, stage: Stage, state: State, overrides: Sequence[Override]) -> list[str]:
    """What else is to be known of a stage: why it failed, its overrides for ever, folders of earlier
    attempts."""
    record = state[stage.name]
    notes = [record.reason] if record.reason else []
    for one in overrides:
        if one.stage == stage.name:
            day = time.strftime("%Y-%m-%d", time.localtime(one.time))
            now = "" if record.promoted.get("sha256") == one.sha256 else ", of earlier weights"
            notes.append(f"overridden by {one.by} on {day}: {one.reason} (weights {one.sha256[:12]}{now})")
    if record.retired:
        notes.append(f"earlier attempts: {', '.join(one['folder'] for one in record.retired)}")
    return notes


def stage_table(pipeline: Pipeline, state: State, boxed: bool, works: bool) -> Table:
    """The table of stages; boxed: for a terminal. works: as of `rows_of`."""
    table = Table(
        title=pipeline.title if boxed else None, box=box.SIMPLE_HEAD if boxed else None, pad_edge=False,
        padding=(0, 1 if boxed else 2, 0, 0),
    )  # fmt: skip
    rows = rows_of(pipeline, state, works)
    for name in ("stage", "kind", "state", "progress", "gate", "final", "took", "notes"):
        table.add_column(name, overflow="fold", no_wrap=not boxed)
    for row in rows:
        style = _COLOURS.get(row["state"].partition(",")[0], "")
        table.add_row(*(Text(value, style=style if name == "state" else "") for name, value in row.items()))
    return table
