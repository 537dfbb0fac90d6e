"""Writes pipeline.html, a page that shows all stages of a pipeline and needs no network access."""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron.data.files import temporary
from megatron.operations.report.curves import plots_of
from megatron.operations.report.events import events_of
from megatron.operations.report.page import ReportError, embedded, require_bokeh
from megatron.operations.report.run_data import read_run
from megatron.operations.run_folder import RunFolder
from megatron.pages import page_template
from megatron.pipelines.definition import Pipeline, Stage
from megatron.pipelines.errors import PipelineError
from megatron.pipelines.gate_verdicts import has_moved, read_verdicts
from megatron.pipelines.measurements import read_measurements
from megatron.pipelines.sources import read_notes
from megatron.pipelines.state import State, read_overrides
from megatron.pipelines.table import rows_of

PAGE = "pipeline.html"
_TITLES = ("loss", "reward", "validation", "scores")  # only plots whose title contains one of these are shown


def write_page(pipeline: Pipeline, state: State, say: Callable[[str], None]) -> Path:
    """Writes pipeline.html into the pipeline's folder, and returns its path.

    say: called with a message if plots are left out because bokeh is not installed. Raises PipelineError if
    the page cannot be written.
    """
    path = pipeline.folder / PAGE
    unfinished = temporary(path)
    try:
        unfinished.write_text(render(pipeline, state, say), encoding="utf-8", errors="replace")
        os.replace(unfinished, path)
    except OSError as problem:
        unfinished.unlink(missing_ok=True)
        raise PipelineError(f"{path}: the page cannot be written ({problem.strerror or problem})") from None
    return path


def render(pipeline: Pipeline, state: State, say: Callable[[str], None]) -> str:
    """Returns the HTML text of pipeline.html.

    say: called with a message if plots are left out because bokeh is not installed."""
    overrides = read_overrides(pipeline.folder)
    sections = [_section(pipeline, stage, state) for stage in pipeline.stages]
    stage_plots, models = {}, []
    problem = None
    try:
        require_bokeh()
        for stage in pipeline.stages:
            stage_plots[stage.name], stage_models = _plots(pipeline, stage)
            models += stage_models
    except ReportError as missing:
        problem = str(missing)
        say(f"{PAGE} is written without plots: {missing}")
    drawing = embedded(models) if models else {"bokeh": [], "data": "null"}
    return str(page_template("megatron.pipelines").render(
        title=pipeline.title, made=time.strftime("%Y-%m-%d %H:%M:%S"), table=rows_of(pipeline, state, works=True),
        sections=sections, overrides=overrides, plots=stage_plots, plots_problem=problem,
        when=lambda seconds: time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds)) if seconds else "",
        number=lambda value: f"{value:.6g}" if isinstance(value, int | float) else value or "",
        file=pipeline.file.name, **drawing,
    ))  # fmt: skip


def _section(pipeline: Pipeline, stage: Stage, state: State) -> dict[str, Any]:
    """Returns the template's variables for one stage, except its plots: record, sources, verdicts, scores."""
    record = state[stage.name]
    verdicts = read_verdicts(pipeline.folder, stage.name)
    notes = read_notes(pipeline.folder) if stage.sources else {}
    report = pipeline.save(stage.name) / "report.html"
    return {
        "name": stage.name, "kind": stage.kind, "record": record, "stage": stage,
        "sources": [notes[source.name] for source in stage.sources if source.name in notes],
        "configs": [os.path.relpath(path, pipeline.folder) for path in pipeline.config_files(stage)]
        if stage.kind != "data" else [],
        "verdicts": [{**verdict, "moved": has_moved(pipeline, verdict)} for verdict in reversed(verdicts)],
        "report": os.path.relpath(report, pipeline.folder) if report.is_file() else None,
        "scores": _scores(pipeline.folder, record.evaluation),
    }  # fmt: skip


def _scores(folder: Path, evaluation: Mapping[str, str]) -> dict[str, str]:
    """Returns each score of a stage's evaluation as text with its standard error, such as `0.7123 ± 0.0103`.

    evaluation: `StageRecord.evaluation`, which names the file of scores."""
    if not evaluation:
        return {}
    scores = read_measurements(folder / "-", folder / evaluation["scores"]).scores
    texts = {}
    for name, value in scores.items():
        if not name.endswith("_stderr"):
            error = scores.get(f"{name}_stderr")
            texts[name] = f"{value:.4f}" + (f" ± {error:.4f}" if error is not None else "")
    return texts


def _plots(pipeline: Pipeline, stage: Stage) -> tuple[list[dict[str, Any]], list[Any]]:
    """Returns (template's variables for each plot, bokeh figures) for the losses, rewards and scores of a
    stage."""
    from megatron.operations.report import figures

    save = pipeline.save(stage.name)
    folder = RunFolder(save, save / "logs")
    if stage.kind != "train" or not folder.metrics_file.is_file():
        return [], []
    run = read_run(folder, stage.name)
    plots = [plot for plot in plots_of([run]) if any(word in plot.title.lower() for word in _TITLES)]
    descriptions, models = [], []
    for figure in figures.draw(plots, [events_of(run)]):
        linear = figure.models[0]
        linear.name = f"{stage.name}-{linear.name}"
        descriptions.append({"title": figure.plot.title, "place": linear.name})
        models.append(linear)
    return descriptions, models


