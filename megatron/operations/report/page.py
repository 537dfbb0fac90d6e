"""The page of a report: its parts put together, and written."""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from megatron.neox_arguments import NeoXArgs, UserError
from megatron.neox_arguments.optional_packages import import_optional
from megatron.neox_arguments.reports.config_dump import differing_values
from megatron.neox_arguments.values.remote_paths import is_remote
from megatron.operations.report.curves import Plot, not_finite_only, plots_of
from megatron.operations.report.events import Event, events_of
from megatron.operations.report.facts import config_rows, data_facts, model_facts, scores_of, summary_facts
from megatron.operations.report.router_loads import LoadMap, maps_of
from megatron.operations.report.run_data import Run, names_of, read_run, read_runs
from megatron.operations.run_folder import RunFolder

PAGE = "report.html"
LISTED = 300  # events in a table


class ReportError(UserError):
    """A report that cannot be made."""


def write_report(paths: Sequence[str | Path], target: str | Path | None = None) -> Path:
    """Write the page of the runs that paths name (as `open_run`), and return where it is.

    target: where; None: into the `save` of a single run, or its log folder where checkpoints are in a
    bucket; for several runs into the current folder. Raises RunFolderError, and ReportError where bokeh is
    not installed or the page cannot be written.
    """
    runs = read_runs(paths)
    if target is None:
        target = _place(runs[0].folder, runs[0].args) if len(runs) == 1 else Path(PAGE)
    return _write(runs, Path(target).expanduser())


def report_at_end(args: NeoXArgs, logs: Path, logger: logging.Logger) -> None:
    """Write the page of the run that this process has trained (`report: true`), however it has ended. That it
    cannot be made is only said. logs: its log folder."""
    save = Path(args.save_dir).expanduser().absolute() if args.save_dir is not None else None
    folder = RunFolder(save, logs.absolute())
    try:
        (name,) = names_of([folder])
        logger.info(f"report: {_write([read_run(folder, name, args)], _place(folder, args))}")
    except Exception as problem:  # of whatever kind: how the run ended stays as it is
        logger.warning(f"report: true, but the page was not made: {type(problem).__name__}: {problem}")


def render(runs: Sequence[Run]) -> str:
    """The page as text. Raises ReportError without bokeh."""
    require_bokeh()
    from megatron.operations.report import figures, heat_map

    plots, events = plots_of(runs), [events_of(run) for run in runs]
    maps = maps_of([run.load for run in runs]) if plots else []
    together = figures.iterations_of(plots, maps) if plots else None
    drawn = figures.draw(plots, events, together)
    of_load = heat_map.draw_maps(maps, together) if together is not None else []
    shown = [
        {"title": one.plot.title, "note": _note(one.plot), "places": [model.name for model in one.models]}
        for one in drawn
    ]
    return _template().render(
        title=" and ".join(run.name for run in runs) if len(runs) < 3 else f"{len(runs)} runs",
        made=time.strftime("%Y-%m-%d %H:%M:%S"), sections=[_section(*pair) for pair in zip(runs, events, strict=True)],
        colors=figures.COLORS, kinds=figures.EVENTS, plots=shown,
        maps=[_map(runs, one, model.name) for one, model in zip(maps, of_load, strict=True)],
        happened=[kind for kind in figures.EVENTS if any(event.kind == kind for of_run in events for event in of_run)],
        lost=not_finite_only(runs),
        most_events=figures.MOST_EVENTS, differing=_differing(runs), scores=_scores(runs),
        **embedded([*(model for one in drawn for model in one.models), *of_load]),
    )  # fmt: skip


def require_bokeh() -> None:
    """Raises ReportError where bokeh is not installed."""
    import_optional("bokeh", ReportError("the plots of a report need bokeh: pip install 'neox[report]'"))


def embedded(models: Sequence[Any]) -> dict[str, Any]:
    """What a template needs to draw bokeh's models without a network: `bokeh`, the library's scripts, and
    `data`, JSON for `Bokeh.embed.embed_items`. Each model is drawn into the element that has its name for an
    id."""
    from bokeh.document import Document
    from bokeh.resources import Resources

    document = Document()
    with document.models.freeze():  # else all models are counted again with each
        for model in models:
            document.add_root(model)
    places = {model.id: model.name for model in document.roots}
    data = {
        "documents": {"report": document.to_json(deferred=False)},
        "items": [{"docid": "report", "roots": places, "root_ids": list(places)}],
    }
    scripts = Resources(mode="inline", components=["bokeh"], minified=True).js_raw
    return {"bokeh": scripts, "data": _in_script(data)}


def _place(folder: RunFolder, args: NeoXArgs | None) -> Path:
    """Where the page of a run is. What stands for a bucket on this machine holds checkpoints on their way
    and is emptied."""
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
    """What the page says of one run beside its curves."""
    chosen, defaults = config_rows(run.args) if run.args is not None else ([], [])
    return {
        "name": run.name, "rows": run.rows, "summary": summary_facts(run), "model": model_facts(run),
        "data": data_facts(run), "has_args": run.args is not None, "config": chosen, "defaults": defaults,
        "events": _listed(events), "unlisted": max(0, len(events) - LISTED), "answers": run.answers,
        "answers_at": run.answers_at, "rollouts": run.rollouts, "problems": run.problems,
    }  # fmt: skip


def _listed(events: Sequence[Event]) -> Sequence[Event]:
    """The events of the table: those that are rare before those that are many."""
    if len(events) <= LISTED:
        return events
    counts: dict[str, int] = {}
    for event in events:
        counts[event.kind] = counts.get(event.kind, 0) + 1
    rare_first = sorted(events, key=lambda event: (counts[event.kind], event.iteration))
    return sorted(rare_first[:LISTED], key=lambda event: event.iteration)


def _note(plot: Plot) -> str:
    """How many points a plot shows of how many, and how many could not be drawn."""
    shown, of = (sum(counts) for counts in zip(*((len(c.values), c.of) for c in plot.curves), strict=True))
    note = f"{of:,} points"
    if shown < of:
        note = f"{shown:,} of {of:,} points: the lowest and highest of each stretch, and a mean"
    missing = sum(curve.not_finite for curve in plot.curves)
    return note + (f"; {missing:,} NaN or infinite values are not drawn" if missing else "")


def _map(runs: Sequence[Run], one: LoadMap, place: str) -> dict[str, Any]:
    """What the page says of a map beside its picture; layers: (name of what is drawn, words)."""
    _, experts, columns = one.codes.shape
    title = "Load of experts" + (f": {runs[one.run].name}" if len(runs) > 1 else "")
    layers = [
        (f"layer {layer}", f"layer {layer}" + (f" ({idle} of {experts} without a token at the end)" if idle else ""))
        for layer, idle in zip(one.layers, one.idle, strict=True)
    ]
    shown = f"{one.lines:,} logged steps"
    if columns < one.lines:
        shown = f"{columns:,} of {one.lines:,} logged steps, at equal distances"
    return {"title": title, "place": place, "layers": layers, "note": f"{shown}; {experts} experts"}


def _differing(runs: Sequence[Run]) -> Mapping[str, Sequence[str]] | None:
    """The values that differ between runs; None where a run has no configuration to compare."""
    known = [run.args for run in runs if run.args is not None]
    return differing_values(known) if len(runs) > 1 and len(known) == len(runs) else None


def _scores(runs: Sequence[Run]) -> dict[str, list[str]]:
    """A row for each score, with its last value in each run."""
    of_runs = [scores_of(run) for run in runs]
    names = dict.fromkeys(name for scores in of_runs for name in scores)
    return {name: [f"{scores[name]:.4f}" if name in scores else "" for scores in of_runs] for name in names}


def _in_script(data: Any) -> str:
    """JSON that no text in it can end or begin an element of HTML in."""
    from bokeh.core.json_encoder import serialize_json

    return serialize_json(data, pretty=False).replace("<", "\\u003c")


@cache
def _template() -> Any:
    from jinja2 import Environment

    text = files("megatron.operations.report").joinpath("page.html").read_text(encoding="utf-8")
    return Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(text)
