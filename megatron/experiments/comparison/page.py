"""Writes a comparison of runs as a page for a browser, in one file that loads nothing."""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron.data.files import replace_text
from megatron.experiments.comparison.comparison import Comparison
from megatron.experiments.comparison.curves import Axis
from megatron.experiments.comparison.tables import sections
from megatron.experiments.errors import RunError
from megatron.neox_arguments.values.local_paths import with_home
from megatron.operations.report.curves import plots_of
from megatron.operations.report.page import embedded, require_bokeh
from megatron.pages import page_template
from megatron.process.text_tables import Table


def write_page(comparison: Comparison, path: Path) -> None:
    """Writes the page.

    Raises ReportError if bokeh is not installed, and RunError if the page cannot be written."""
    text = _render(comparison)
    try:
        replace_text(with_home(path), text)
    except OSError as problem:
        raise RunError(f"--html {path}: {problem.strerror or problem}; name another file") from None


def _render(comparison: Comparison) -> str:
    require_bokeh()
    from megatron.operations.report import figures

    positions: dict[Axis, figures.Positions] = {
        "step": figures.ITERATIONS, "tokens": figures.Positions("tokens", "0.[00]a", np.float64),
        "flops": figures.Positions("FLOPs of the model", None, np.float64),
    }  # fmt: skip
    runs = [
        replace(run, series={name: run.series[name] for name in comparison.plotted if name in run.series})
        for run in comparison.placed_runs
    ]
    items = figures.draw(plots_of(runs), [()] * len(runs), positions=positions[comparison.axis])
    names = [run.name for run in comparison.runs]
    return str(page_template("megatron.experiments.comparison").render(
        title=" and ".join(names) if len(names) < 3 else f"{len(names)} runs compared",
        made=time.strftime("%Y-%m-%d %H:%M:%S"),
        colors={name: figures.COLORS[number % len(figures.COLORS)] for number, name in enumerate(names)},
        sections=[
            {"title": section.title,
             "items": [{"table" if isinstance(item, Table) else "text": item} for item in section.items]}
            for section in sections(comparison)
        ],
        plots=[{"title": item.plot.title, "places": [model.name for model in item.models]} for item in items],
        problems=comparison.problems, **embedded([model for item in items for model in item.models]),
    ))  # fmt: skip
