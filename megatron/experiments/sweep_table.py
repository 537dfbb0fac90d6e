"""The results of a sweep: one row for each cell, as a table, CSV, JSON and a picture of the losses."""

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from megatron.data.files import replace_text, write_json
from megatron.experiments.comparison.comparison import keys_of_measurement
from megatron.experiments.errors import RunError
from megatron.experiments.sweep_file import Cell, Link, Sweep
from megatron.experiments.sweep_link import FAILED, FINISHED, REFUSED, WAITING, read_record, state_of
from megatron.neox_arguments.reports.config_dump import differing_values
from megatron.operations.loss_plot import ordinary, read_curve
from megatron.operations.run_folder import RunFolder
from megatron.pipelines.promotion import promoted_measurements

TABLE, DATA, PICTURE = "sweep.csv", "sweep.json", "sweep.png"
VALIDATION, TRAINING = "validation/lm_loss", "train/lm_loss"
_COLOURS = {FAILED: "bold red", REFUSED: "bold yellow", FINISHED: "green", WAITING: "dim"}


@dataclass(frozen=True)
class Row:
    """The facts of one cell.

    state: of its last run, or of the first that has not finished, with its stage. losses: by metric.
    scores: of the evaluation of a chain's last stage. parameters, tokens: of the model, and seen in training.
    """

    cell: Cell
    state: str
    steps: int
    train_iters: int | None
    losses: Mapping[str, float]
    tokens_per_s: float | None
    scores: Mapping[str, float]
    parameters: int | None
    tokens: int | None
    reason: str

    @property
    def is_finished(self) -> bool:
        return self.state == FINISHED


def rows_of(sweep: Sweep, jobs: Mapping[str, str] | None = None) -> list[Row]:
    """Returns a row for each cell: finished ones by their loss, the lowest first, then the others.

    jobs: states of Slurm jobs that wait or run, by the name of the run."""
    rows = [_row(cell, jobs or {}) for cell in sweep.cells]
    metric = metric_of(rows)

    def order(row: Row) -> tuple[bool, float]:
        loss = row.losses.get(metric, math.inf)
        return not row.is_finished, math.inf if math.isnan(loss) else loss

    return sorted(rows, key=order)


def metric_of(rows: Sequence[Row]) -> str:
    """Returns the loss by which cells are compared: of validation, if every finished cell has one."""
    finished = [row for row in rows if row.is_finished] or [row for row in rows if row.losses]
    return VALIDATION if finished and all(VALIDATION in row.losses for row in finished) else TRAINING


def differing_measurement(rows: Sequence[Row]) -> str | None:
    """Returns a note if validation losses in the table are not of the same text; None if they are.

    The runs' own configurations are compared, since runs with other keys of validation are not trained anew.
    """
    if metric_of(rows) != VALIDATION:
        return None
    configurations = [_output_of(row).args() for row in rows if VALIDATION in row.losses]
    keys = list(differing_values([args for args in configurations if args is not None], origins=False))
    differing = [*keys_of_measurement(keys), *(key for key in keys if key.startswith("valid_sets"))]
    if not differing:
        return None
    return f"validation losses are not of the same text, because of other values of {', '.join(differing)}"


def _row(cell: Cell, jobs: Mapping[str, str]) -> Row:
    link, state, reason = _current(cell, jobs)
    output = link.output
    metrics, summary, status = output.last_rows(), output.summary(), output.status()
    losses = {}
    for name in (VALIDATION, TRAINING):
        if values := [row[name] for row in metrics if name in row]:
            losses[name] = float(values[-1])
    scores: Mapping[str, float] = {}
    if state == FINISHED and link.stage is not None and link.stage.evaluation is not None:
        measured = promoted_measurements(link.folder / "checkpoints" / f"{link.stage.name}_final")
        all_scores = measured.scores if measured is not None else {}
        scores = {name: value for name, value in all_scores.items() if "_stderr" not in name}
    tokens = [row["consumed_tokens"] for row in metrics if "consumed_tokens" in row]
    return Row(
        cell, state, int(status.get("iteration") or 0), status.get("train_iters"), losses,
        summary.get("tokens_per_sec"), scores,
        (summary.get("parameters") or {}).get("total"), int(tokens[-1]) if tokens else None, reason,
    )  # fmt: skip


def _current(cell: Cell, jobs: Mapping[str, str]) -> tuple[Link, str, str]:
    """Returns the run whose numbers a cell shows, the cell's state, and why it does not go on."""
    for link in cell.links:
        state = state_of(link)
        if link.name in jobs:
            state = jobs[link.name] if state == WAITING else f"{state}, {jobs[link.name]}"
        if state != FINISHED:
            prefix = f"{link.stage.name}: " if link.stage is not None else ""
            return link, prefix + state, read_record(link).reason
    return cell.links[-1], FINISHED, ""


def as_records(sweep: Sweep, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns the rows as flat mappings, in the order of the table. A number that is missing is None."""
    metric = metric_of(rows)
    records = []
    for row in rows:
        values = {column: row.cell.values.get(column) for column in sweep.columns}
        records.append({
            "cell": row.cell.name, **values, "state": row.state, "steps": row.steps, "train_iters": row.train_iters,
            metric: row.losses.get(metric), **({} if metric == TRAINING else {TRAINING: row.losses.get(TRAINING)}),
            "tokens_per_s": row.tokens_per_s, "parameters": row.parameters, "tokens": row.tokens, **row.scores,
            "folder": str(row.cell.links[-1].folder), "reason": row.reason,
        })  # fmt: skip
    return records


def write_results(sweep: Sweep, rows: Sequence[Row]) -> list[Path]:
    """Writes the table as CSV and JSON and, if a run has logged a loss, the picture. Returns the files."""
    records = as_records(sweep, rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for record in records for name in record)))
    writer.writeheader()
    writer.writerows(
        {name: json.dumps(value) if isinstance(value, dict | list | tuple) else value for name, value in record.items()}
        for record in records
    )
    paths = [sweep.root / TABLE, sweep.root / DATA]
    try:
        sweep.root.mkdir(parents=True, exist_ok=True)
        replace_text(paths[0], text.getvalue())
        write_json(paths[1], {"metric": metric_of(rows), "columns": sweep.columns, "cells": records})
        if any(row.losses for row in rows):
            paths.append(sweep.root / PICTURE)
            draw_losses(sweep, rows, paths[-1])
    except OSError as problem:
        raise RunError(f"{problem.filename}: {problem.strerror}; free space, or allow writing there") from None
    return paths


def table_of(sweep: Sweep, rows: Sequence[Row], boxed: bool) -> Table:
    """Returns the table of cells, for rich to print. boxed: format it for a terminal."""
    metric = metric_of(rows)
    table = Table(box=box.SIMPLE_HEAD if boxed else None, pad_edge=False, padding=(0, 1 if boxed else 2, 0, 0))
    scores = list(dict.fromkeys(name for row in rows for name in row.scores))
    header = "validation loss" if metric == VALIDATION else "training loss"
    for name in (*sweep.columns, "state", "steps", header, "tokens/s", *scores, "reason"):
        table.add_column(name, overflow="fold", no_wrap=not boxed)
    for row in rows:
        values = [_text(row.cell.values.get(column)) for column in sweep.columns]
        steps = f"{row.steps}/{row.train_iters}" if row.train_iters else ""
        loss = f"{row.losses[metric]:.4f}" if metric in row.losses else ""
        speed = f"{row.tokens_per_s:,.0f}" if row.tokens_per_s is not None else ""
        numbers = [f"{row.scores[name]:.4g}" if name in row.scores else "" for name in scores]
        cells = [*values, row.state, steps, loss, speed, *numbers, row.reason]
        colour = _COLOURS.get(row.state.rpartition(": ")[2], "")
        table.add_row(*(Text(text, style=colour if i == len(values) else "") for i, text in enumerate(cells)))
    return table


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def draw_losses(sweep: Sweep, rows: Sequence[Row], path: Path) -> None:
    """Plots the losses of all cells over the tokens seen; colours go from the lowest final loss to the
    highest."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.5), layout="constrained")
    drawn_rows = [row for row in rows if row.losses]
    for i, row in enumerate(drawn_rows):
        color = pyplot.get_cmap("viridis")(i / max(1, len(drawn_rows) - 1))
        metrics = _output_of(row).rows()
        tokens, losses = read_curve(ordinary(metrics), TRAINING)
        has_validation = VALIDATION in row.losses
        label = row.cell.name if i < 20 else None
        axes.plot(tokens, losses, color=color, linewidth=0.8, alpha=0.5 if has_validation else 1.0,
                  label=None if has_validation else label)  # fmt: skip
        if has_validation:
            axes.plot(
                *read_curve(metrics, VALIDATION), color=color, marker="o", markersize=4, linestyle="none", label=label
            )
    dots = ", dots: validation" if any(VALIDATION in row.losses for row in drawn_rows) else ""
    axes.set_title(f"{sweep.file.stem} (lines: training{dots}; best first)", fontsize=10)
    axes.set_xlabel("tokens seen")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _output_of(row: Row) -> RunFolder:
    return _current(row.cell, {})[0].output
