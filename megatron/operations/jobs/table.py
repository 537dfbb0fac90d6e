"""Draws the table of jobs as text, for terminals of any width and for pipes."""

import sys
from collections.abc import Sequence
from typing import IO, Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from megatron.operations.jobs.overview import Row
from megatron.operations.jobs.verdict import CRASHED, FINISHED, STALE, UNKNOWN

_COLOURS = {CRASHED: "bold red", STALE: "bold yellow", UNKNOWN: "bold yellow", FINISHED: "green", "pending": "dim"}
_UNBOUNDED = 10_000  # columns of output that is not a terminal


def console(file: IO[str] | None = None) -> Console:
    """Returns a rich console that prints to `file` (None: stdout); no colours or truncation unless a
    terminal."""
    file = file or sys.stdout
    options: dict[str, Any] = {} if file.isatty() else {"width": _UNBOUNDED, "no_color": True}
    return Console(file=file, highlight=False, **options)


def render(rows: Sequence[Row], narrow: bool, note: str = "") -> Group:
    """Returns the table of jobs, with error lines of crashed jobs and `note` below it, for rich to print.

    narrow: fit the table to a terminal; text that does not fit is truncated, the last columns first.
    """
    table = Table(box=box.SIMPLE_HEAD if narrow else None, pad_edge=False, padding=(0, 1 if narrow else 2, 0, 0))
    for name in ("id", "name", "experiment", "state", "verdict"):
        keep = name in ("id", "verdict")
        table.add_column(name, no_wrap=True, overflow="ellipsis", min_width=6 if keep else 4, ratio=None)
    for name in ("iteration", "loss", "tokens/s", "ETA"):
        table.add_column(name, no_wrap=True, overflow="ellipsis", justify="right" if narrow else "left")
    table.add_column("scores", no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*_cells(row))
    return Group(table, *(Text(line, overflow="fold") for line in [*_notes(rows), *filter(None, [note])]))


def duration(seconds: float) -> str:
    """Formats a duration in one or two units, such as `2 d 4 h`, `12 min` or `40 s`."""
    minutes, hours = seconds / 60, seconds / 3600
    if hours >= 48:
        return f"{int(hours // 24)} d {int(hours % 24)} h"
    if hours >= 1:
        return f"{int(hours)} h {int(minutes % 60)} min"
    return f"{minutes:.0f} min" if minutes >= 2 else f"{seconds:.0f} s"


def _cells(row: Row) -> list[Text]:
    done = row.progress
    share = f"{done.iteration}/{done.total} ({done.iteration / max(1, done.total):.0%})" if done else ""
    texts = [
        row.job.id, row.job.name, row.experiment or "", row.job.state, str(row.verdict), share,
        f"{done.loss:.4g}" if done else "",
        f"{row.tokens_per_s:,.0f}" if row.tokens_per_s is not None else "",
        duration(row.eta_s) if row.eta_s is not None else "",
        " ".join(f"{name} {value:.4g}" for name, value in row.scores.items() if "_stderr" not in name),
    ]  # fmt: skip
    cells = [Text(text) for text in texts]
    cells[4].stylize(_COLOURS.get(row.verdict.kind, ""))
    return cells


def _notes(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in rows:
        verdict = row.verdict
        if row.needs_a_person:
            log_note = f"; log {row.job.log}" if row.job.log is not None else ""
            lines += [f"{row.job.id}: {verdict.kind} {verdict.detail}".rstrip() + log_note]
            lines += [f"    {line}" for line in verdict.error_lines]
        elif verdict.detail:
            lines.append(f"{row.job.id}: {verdict.kind}: {verdict.detail}")
        lines += [f"{row.job.id}: {line}" for line in row.problems]
    return lines
