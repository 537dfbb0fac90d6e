"""Renders the report on training runs as a page of HTML, and writes it to a file."""

import logging
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from megatron.neox_arguments import NeoXArgs, UserError
from megatron.neox_arguments.optional_packages import import_optional
from megatron.neox_arguments.reports.config_dump import differing_values
from megatron.neox_arguments.values.local_paths import with_home
from megatron.neox_arguments.values.remote_paths import is_remote
from megatron.operations.report.curves import Plot, not_finite_only, plots_of
from megatron.operations.report.events import Event, events_of
from megatron.operations.report.facts import config_rows, data_facts, model_facts, scores_of, summary_facts
from megatron.operations.report.router_loads import LoadMap, maps_of
from megatron.operations.report.run_data import Run, names_of, read_run, read_runs
from megatron.operations.run_folder import RunFolder
from megatron.pages import page_template

PAGE = "report.html"
MAX_EVENTS = 300  # most events in a run's table


class ReportError(UserError):
    """Raised if a report cannot be made or written; the message says why."""


def write_report(paths: Sequence[str | Path], target: str | Path | None = None) -> Path:
    """Writes a report on the runs, one HTML page, and returns its path.

    paths: for each run its `save`, its log folder or its metrics.jsonl.
    target: path of the page; None: report.html in `save` of a single run (in its log folder if `save` is in a
        bucket), or in the current folder for several runs.

    Raises RunFolderError for a path without a run, and ReportError if bokeh is not installed or the page
    cannot be written.
    """
    runs = read_runs(paths)
    if target is None:
        target = _place(runs[0].folder, runs[0].args) if len(runs) == 1 else Path(PAGE)
    return _write(runs, with_home(target))


def report_at_end(args: NeoXArgs, logs: Path, logger: logging.Logger) -> None:
    """Writes the report on the run that this process has trained, whether the run finished or failed.

    logs: the run's log folder. If the report cannot be written, a warning is logged and nothing is raised."""
    save = with_home(args.save_dir).absolute() if args.save_dir is not None else None
    folder = RunFolder(save, logs.absolute())
    try:
        (name,) = names_of([folder])
        logger.info(f"report: {_write([read_run(folder, name, args)], _place(folder, args))}")
    except Exception as problem:  # a failed report must not change how the run ended
        logger.warning(f"report: true, but the report could not be written: {type(problem).__name__}: {problem}")


def render(runs: Sequence[Run]) -> str:
    """Returns the HTML text of the report on these runs. Raises ReportError if bokeh is not installed."""
    require_bokeh()
    from megatron.operations.report import figures

    plots, events = plots_of(runs), [events_of(run) for run in runs]
    maps = maps_of([run.load for run in runs]) if plots else []
    iteration_range = figures.iterations_of(plots, maps) if plots else None
    plot_models = figures.draw(plots, events, iteration_range)
    load_figures = figures.draw_maps(maps, iteration_range) if iteration_range is not None else []
    entries = [
        {"title": item.plot.title, "note": _note(item.plot), "places": [model.name for model in item.models]}
        for item in plot_models
    ]
    return page_template("megatron.operations.report").render(
        title=" and ".join(run.name for run in runs) if len(runs) < 3 else f"{len(runs)} runs",
        made=time.strftime("%Y-%m-%d %H:%M:%S"), sections=[_section(*pair) for pair in zip(runs, events, strict=True)],
        colors=figures.COLORS, kinds=figures.EVENTS, plots=entries,
        maps=[_map(runs, item, model.name) for item, model in zip(maps, load_figures, strict=True)],
        happened=[kind for kind in figures.EVENTS if any(event.kind == kind for event in chain.from_iterable(events))],
        lost=not_finite_only(runs),
        most_events=figures.MOST_EVENTS, differing=_differing(runs), scores=_scores(runs),
        **embedded([*(model for item in plot_models for model in item.models), *load_figures]),
    )  # fmt: skip


def require_bokeh() -> None:
    """Raises ReportError if bokeh is not installed."""
    import_optional("bokeh", ReportError("a report needs bokeh for its plots; install: pip install 'neox[report]'"))


def embedded(models: Sequence[Any]) -> dict[str, Any]:
    """Returns the variables with which an HTML template draws bokeh models without network access.

    `bokeh` has the library's scripts, `data` the JSON for `Bokeh.embed.embed_items`. Each model is drawn into
    the HTML element whose id is the model's name.
    """
    from bokeh.core.json_encoder import serialize_json
    from bokeh.document import Document
    from bokeh.resources import Resources

    document = Document()
    with document.models.freeze():  # otherwise each added model would have all models counted again
        for model in models:
            document.add_root(model)
    places = {model.id: model.name for model in document.roots}
    data = {
        "documents": {"report": document.to_json(deferred=False)},
        "items": [{"docid": "report", "roots": places, "root_ids": list(places)}],
    }
    scripts = Resources(mode="inline", components=["bokeh"], minified=True).js_raw
    # Without "<", no text in the data can begin or end an HTML element.
    return {"bokeh": scripts, "data": serialize_json(data, pretty=False).replace("<", "\\u003c")}


def _place(folder: RunFolder, args: NeoXArgs | None) -> Path:
    """Returns the default path of a run's report: in `save`, or in the log folder if `save` is in a
    bucket."""
    in_bucket = args is not None and args.save is not None and is_remote(args.save)
    return (folder.logs if folder.save is None or in_bucket else folder.save) / PAGE


def _write(runs: Sequence[Run], path: Path) -> Path:
    text = render(runs)
    unfinished = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8", errors="replace")
        os.replace(unfinished, path)
    except OSError as problem:
        unfinished.unlink(missing_ok=True)
        raise ReportError(f"{path}: the report cannot be written ({problem.strerror or problem})") from None
    return path.absolute()


def _section(run: Run, events: Sequence[Event]) -> dict[str, Any]:
    """Returns the template's variables for one run: its tables, events, answers and problems, but no
    curves."""
    chosen, defaults = config_rows(run.args) if run.args is not None else ([], [])
    return {
        "name": run.name, "rows": run.rows, "summary": summary_facts(run), "model": model_facts(run),
        "data": data_facts(run), "has_args": run.args is not None, "config": chosen, "defaults": defaults,
        "events": _events_of_table(events), "unlisted": max(0, len(events) - MAX_EVENTS), "answers": run.answers,
        "answers_at": run.answers_at, "rollouts": run.rollouts, "problems": run.problems,
    }  # fmt: skip


def _events_of_table(events: Sequence[Event]) -> Sequence[Event]:
    """Returns the events that the table of a run shows, sorted by iteration.

    Of more than MAX_EVENTS events, those of the rarest kinds are chosen."""
    if len(events) <= MAX_EVENTS:
        return events
    counts = Counter(event.kind for event in events)
    rare_first = sorted(events, key=lambda event: (counts[event.kind], event.iteration))
    return sorted(rare_first[:MAX_EVENTS], key=lambda event: event.iteration)


def _note(plot: Plot) -> str:
    """Returns the note below a plot: its numbers of drawn points, of all points, and of NaN or infinite
    values."""
    num_drawn = sum(len(curve.values) for curve in plot.curves)
    num_points = sum(curve.num_finite for curve in plot.curves)
    note = f"{num_points:,} points"
    if num_drawn < num_points:
        note = f"{num_drawn:,} of {num_points:,} points: the lowest and highest of each interval, and a mean curve"
    missing = sum(curve.not_finite for curve in plot.curves)
    return note + (f"; {missing:,} NaN or infinite values are not drawn" if missing else "")


def _map(runs: Sequence[Run], load_map: LoadMap, place: str) -> dict[str, Any]:
    """Returns the template's variables for a map of expert loads; `layers` has (image's name, label) per
    layer.

    place: id of the HTML element for the map."""
    _, experts, columns = load_map.codes.shape
    title = "Load of experts" + (f": {runs[load_map.run].name}" if len(runs) > 1 else "")
    layers = [
        (f"layer {layer}", f"layer {layer}" + (f" ({idle} of {experts} without a token at the end)" if idle else ""))
        for layer, idle in zip(load_map.layers, load_map.idle, strict=True)
    ]
    note = f"{load_map.lines:,} logged steps"
    if columns < load_map.lines:
        note = f"{columns:,} of {load_map.lines:,} logged steps, evenly spaced"
    return {"title": title, "place": place, "layers": layers, "note": f"{note}; {experts} experts"}


def _differing(runs: Sequence[Run]) -> Mapping[str, Sequence[str]] | None:
    """Returns the configuration keys whose values differ between runs, with each run's value as text.

    None for a single run, or if a run has no configuration to compare."""
    configurations = [run.args for run in runs if run.args is not None]
    return differing_values(configurations) if len(runs) > 1 and len(configurations) == len(runs) else None


def _scores(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Returns for each score its last value in each run as text; "" for a run without the score."""
    scores_by_run = [scores_of(run) for run in runs]
    names = dict.fromkeys(name for scores in scores_by_run for name in scores)
    return {name: [f"{scores[name]:.4f}" if name in scores else "" for scores in scores_by_run] for name in names}
