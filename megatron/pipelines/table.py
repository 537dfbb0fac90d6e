"""Draws the table of a pipeline's stages, live on a terminal, and prints lines of progress."""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich import box
from rich.live import Live
from rich.table import Table
from rich.text import Text

from megatron.operations.jobs.table import console, duration
from megatron.operations.run_folder import RunFolder
from megatron.pipelines.definition import Pipeline, Stage
from megatron.pipelines.errors import PipelineError
from megatron.pipelines.gate_verdicts import read_verdict
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
from megatron.process import say

_COLOURS = {
    FAILED: "bold red", REFUSED: "bold yellow", PROMOTED: "green", DONE: "green", RUNNING: "bold", "waiting": "dim",
}  # fmt: skip
_SAY_EVERY_S, _DRAW_EVERY_S = 60.0, 1.0
_TAIL = 256 * 1024  # bytes of metrics.jsonl
_METRICS = ("train/lm_loss", "validation/lm_loss", "train/rewards/accuracies", "validation/rewards/accuracies")


class Display:
    """Shows the progress of a pipeline in a `with` block.

    On a terminal it is a live table of stages; otherwise one line a minute for the running stage."""

    def __init__(self, pipeline: Pipeline, state: State, say: Callable[[str], None]) -> None:
        self._pipeline, self._state, self._say = pipeline, state, say
        self._console = console(sys.stderr)
        self._live: Live | None = None
        self._last_draw_time = self._last_line_time = time.monotonic()

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

    def line_writer(self, name: str) -> Callable[[str], None]:
        """Returns a function that prints its argument as a line `NAME: ...`. name: name of the stage."""
        return lambda line: self._say(f"{name}: {line}")

    def beat(self) -> None:
        """Redraws the table once a second, or prints a line of progress once a minute.

        Call it often while a command runs; most calls do nothing."""
        now = time.monotonic()
        if self._live is not None and now - self._last_draw_time >= _DRAW_EVERY_S:
            self._last_draw_time = now
            self._live.update(self._table(), refresh=True)
        elif self._live is None and now - self._last_line_time >= _SAY_EVERY_S:
            self._last_line_time = now
            for stage in self._pipeline.stages:
                if self._state[stage.name].status == RUNNING:
                    self._say(f"{stage.name}: {progress_of(self._pipeline, stage) or 'running'}")

    def print_table(self) -> None:
        """Prints the table of stages once, as it is now."""
        with self._console.capture() as captured:  # rich would end this process if the pipe's reader is gone
            self._console.print(self._table())
        say(captured.get().rstrip("\n"))

    def _table(self) -> Table:
        return stage_table(self._pipeline, self._state, self._console.is_terminal, works=True)


def progress_of(pipeline: Pipeline, stage: Stage) -> str:
    """Returns the progress of a training stage as text, such as `iteration 120/300, train/lm_loss 4.2`.

    It is "" before the stage's run has written its status."""
    save = pipeline.save(stage.name)
    folder = RunFolder(save, save / "logs")
    status, rows = folder.status(), folder.last_rows(_TAIL)
    unread = [f"unusable: {line}" for line in folder.problems.lines()]
    parts = [f"iteration 0/{status['train_iters']}"] if status.get("train_iters") else []
    if rows and status:
        values = {name: row[name] for row in rows for name in _METRICS if name in row}
        parts = [f"iteration {rows[-1]['iteration']}/{status.get('train_iters')}"]
        parts += [f"{name} {values[name]:.4g}" for name in _METRICS if name in values]
    return ", ".join([*parts, *unread])


def rows_of(pipeline: Pipeline, state: State, works: bool) -> list[dict[str, str]]:
    """Returns one row per stage for the table of stages: the text of each cell, by the name of its column.

    works: whether a process runs the pipeline now. If not, a stage whose recorded status is running is shown
    as interrupted.
    """
    overrides = read_overrides(pipeline.folder)
    rows = []
    for stage in pipeline.stages:
        record = state[stage.name]
        status = record.status if works or record.status != RUNNING else "interrupted"
        rows.append({
            "stage": stage.name, "kind": stage.kind,
            "state": status + (f", job {record.job}" if record.job else ""),
            "progress": progress_of(pipeline, stage) if stage.kind == "train" else "",
            "gate": gate_words(pipeline, stage, state),
            "final": record.promoted["sha256"][:12] if record.promoted else "",
            "took": duration(record.seconds) if record.seconds else "",
            "notes": "; ".join(notes_of(pipeline, stage, state, overrides)),
        })  # fmt: skip
    return rows


def gate_words(pipeline: Pipeline, stage: Stage, state: State) -> str:
    """Returns the newest verdict on a stage as a short text, such as `pass (sft-1)`.

    "none" if the stage was promoted without a gate; "" if there is no verdict on its present weights.
    """
    record = state[stage.name]
    if record.verdict is None:
        return "none" if record.promoted and stage.kind == "train" else ""
    try:
        verdict = read_verdict(pipeline.folder, record.verdict)
    except PipelineError:  # logs may have been removed; promoted weights have a copy of their verdict
        return _gate_without_file(pipeline, stage, record)
    if verdict["weights_sha256"] != record.weights.get("sha256"):
        return ""  # the verdict is on an earlier attempt
    is_overridden = record.promoted.get("override") and record.promoted["sha256"] == verdict["weights_sha256"]
    return f"{verdict['result']} ({Path(record.verdict).stem})" + (", overridden" if is_overridden else "")


def _gate_without_file(pipeline: Pipeline, stage: Stage, record: StageRecord) -> str:
    """Returns the verdict on a stage as a short text if the verdict's file is missing or damaged.

    It is read from the copy stored with the promoted weights. Without a copy the text begins with
    `unknown`."""
    name = Path(record.verdict or "").name
    try:
        promoted = promoted_verdict(pipeline.final(stage.name))
    except PipelineError:
        promoted = {}
    if promoted.get("file") == record.verdict and promoted.get("weights_sha256") == record.weights.get("sha256"):
        return f"{promoted.get('result')} ({Path(name).stem}; its file is gone, so a copy was read)"
    return f"unknown ({name} is missing or damaged; run `gate {stage.name}` to judge again)"


def notes_of(pipeline: Pipeline, stage: Stage, state: State, overrides: Sequence[Override]) -> list[str]:
    """Returns notes on a stage as texts: why it failed, overrides of its gate, folders of earlier
    attempts."""
    record = state[stage.name]
    notes = [record.reason] if record.reason else []
    for entry in overrides:
        if entry.stage == stage.name:
            day = time.strftime("%Y-%m-%d", time.localtime(entry.time))
            now = "" if record.promoted.get("sha256") == entry.sha256 else ", of earlier weights"
            notes.append(f"overridden by {entry.by} on {day}: {entry.reason} (weights {entry.sha256[:12]}{now})")
    if record.retired:
        notes.append(f"earlier attempts: {', '.join(entry['folder'] for entry in record.retired)}")
    return notes


def stage_table(pipeline: Pipeline, state: State, boxed: bool, works: bool) -> Table:
    """Returns the table of a pipeline's stages, for rich to print.

    boxed: format it for a terminal, with a title and folded cells.
    works: whether a process runs the pipeline now.
    """
    table = Table(
        title=pipeline.title if boxed else None, box=box.SIMPLE_HEAD if boxed else None, pad_edge=False,
        padding=(0, 1 if boxed else 2, 0, 0),
    )  # fmt: skip
    for name in ("stage", "kind", "state", "progress", "gate", "final", "took", "notes"):
        table.add_column(name, overflow="fold", no_wrap=not boxed)
    for row in rows_of(pipeline, state, works):
        style = _COLOURS.get(row["state"].partition(",")[0], "")
        table.add_row(*(Text(value, style=style if name == "state" else "") for name, value in row.items()))
    return table
