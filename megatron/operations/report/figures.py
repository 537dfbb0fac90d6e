"""Draws the plots of a report with bokeh. All plots share one range of iterations, so that they zoom
together."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from bokeh.models import (
    BasicTickFormatter,
    BoxZoomTool,
    ColumnDataSource,
    HoverTool,
    NumeralTickFormatter,
    PanTool,
    Range1d,
    ResetTool,
    WheelZoomTool,
)
from bokeh.models.annotations import Legend, LegendItem
from bokeh.plotting import figure

from megatron.operations.report.curves import Curve, Plot
from megatron.operations.report.events import Event, Kind
from megatron.operations.report.router_loads import LoadMap

Scale = Literal["linear", "log"]

# Colours of matplotlib's tab10, ordered so that neighbours differ most; one for each run or metric
COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#17becf", "#bcbd22", "#7f7f7f")
EVENTS: dict[Kind, tuple[str, str, str]] = {
    "save": ("saves", "#9aa0a6", "dotted"),
    "restart": ("restarts", "#6a3d9a", "dashed"),
    "skipped": ("skipped steps", "#e6a100", "dashdot"),
    "spike": ("spikes", "#d62728", "dashed"),
    "stop": ("stops", "#202124", "solid"),
}
"""Name on the page, colour and dashes of each kind of event. First starts are only in the table."""
MOST_EVENTS = 400  # of a kind and run in the plots
MANY_EVENTS = 40  # from which on they are drawn pale, to keep curves visible
MARKED_POINTS = 60  # up to which points have markers, since a line through one point is invisible
POINT = (("iteration", "@x{0,0}"), ("tokens", "@tokens{0.00a}"), ("value", "@y{%.6g}"))
EVENT = (("iteration", "@x{0,0}"), ("", "@text"))  # tooltip
HEIGHT, LEGEND_ROW = 300, 21  # pixels: of a plot, and of each row of its legend above it
LEGEND_CHARACTERS = 44  # of a row, to fit a narrow window


@dataclass(frozen=True)
class PlotModels:
    """A plot as bokeh models: one with a linear scale, and a hidden one with a logarithmic scale where
    useful."""

    plot: Plot
    models: tuple[Any, ...]


def iterations_of(plots: Sequence[Plot], maps: Sequence[LoadMap] = ()) -> Range1d:
    """Returns the range of iterations that covers all plots and maps. Needs at least one plot."""
    curves = [curve for plot in plots for curve in plot.curves]
    low = min(float(curve.iterations[0]) for curve in curves)
    high = max(float(curve.iterations[-1]) for curve in curves)
    room = 0.02 * (high - low) or 1.0
    ends = [load_map.first_iteration + (load_map.codes.shape[-1] - 0.5) * load_map.step for load_map in maps]
    return Range1d(
        start=min([low - room, *(load_map.first_iteration - 0.5 * load_map.step for load_map in maps)]),
        end=max([high + room, *ends]),
    )


def draw(
    plots: Sequence[Plot], events: Sequence[Sequence[Event]], iteration_range: Range1d | None = None
) -> list[PlotModels]:
    """Draws the plots; their models are named `plot-0`, `plot-0-log` and so on.

    events: events of each run.
    iteration_range: the iterations to show; None: those of `plots`.
    """
    if not plots:
        return []
    iteration_range = iterations_of(plots) if iteration_range is None else iteration_range
    event_sources, plot_models = list(_event_sources(events)), []
    for number, plot in enumerate(plots):
        sources = [_source(curve) for curve in plot.curves]
        has_log = plot.title.partition(":")[0] == "Loss" and all((curve.values > 0).all() for curve in plot.curves)
        models = []
        scales: tuple[Scale, ...] = ("linear", "log") if has_log else ("linear",)
        for scale in scales:
            model = _figure(plot, sources, iteration_range, event_sources, len(events) > 1, scale)
            model.name = f"plot-{number}" if scale == "linear" else f"plot-{number}-log"
            model.visible = scale == "linear"
            models.append(model)
        plot_models.append(PlotModels(plot, tuple(models)))
    return plot_models


def _source(curve: Curve) -> ColumnDataSource:
    """The points of a curve as 32-bit arrays, which bokeh embeds unchanged."""
    columns = {"x": curve.iterations.astype(np.int32), "y": curve.values.astype(np.float32)}
    return ColumnDataSource({**columns, "tokens": curve.tokens.astype(np.float32)}, name="curve")


def _event_sources(events: Sequence[Sequence[Event]]) -> Iterator[tuple[int, Kind, ColumnDataSource]]:
    """Yields (index of the run, kind, bokeh source with positions and texts) of events to draw."""
    for run, run_events in enumerate(events):
        for kind in EVENTS:
            selected = [event for event in run_events if event.kind == kind]
            selected = selected[:: -(-len(selected) // MOST_EVENTS) or 1]
            if selected:
                texts = [f"{event.text} ({event.timestamp})" if event.timestamp else event.text for event in selected]
                data = {"x": [event.iteration for event in selected], "text": texts}
                yield run, kind, ColumnDataSource(data, name=f"event {kind}")


def _figure(
    plot: Plot, sources: Sequence[ColumnDataSource], iteration_range: Range1d,
    events: Sequence[tuple[int, Kind, ColumnDataSource]], several: bool, scale: Scale,
) -> Any:  # fmt: skip
    """Returns the bokeh figure of one plot. Its models of events are named `event KIND`.

    several: whether there are several runs; then colours stand for runs, else for metrics."""
    plot_figure: Any = figure(
        sizing_mode="stretch_width", x_range=iteration_range, y_axis_type=scale, min_border_right=12,
        tools=[PanTool(), BoxZoomTool(), WheelZoomTool(dimensions="width"), ResetTool()], active_drag="auto",
        toolbar_location="right", x_axis_label="iteration", y_axis_label=plot.unit or None,
    )  # fmt: skip
    plot_figure.toolbar.logo, plot_figure.toolbar.autohide = None, True
    plot_figure.xaxis.formatter = NumeralTickFormatter(format="0,0")
    if scale == "linear":
        plot_figure.yaxis.formatter = BasicTickFormatter(power_limit_high=9)
    plot_figure.grid.grid_line_color, plot_figure.outline_line_color = "#e8eaed", None
    spans = []
    for run, kind, source in events:
        _, color, dash = EVENTS[kind]
        color = COLORS[run % len(COLORS)] if several else color
        alpha = 0.7 if len(source.data["x"]) <= MANY_EVENTS else 0.25
        span = plot_figure.vspan(
            x="x", source=source, line_color=color, line_dash=dash, line_width=1.2, line_alpha=alpha
        )
        span.level, span.name = "underlay", f"event {kind}"  # curves lie over them
        spans.append(span)
    lines: dict[str, list[Any]] = {}
    for position, (curve, source) in enumerate(zip(plot.curves, sources, strict=True)):
        color = COLORS[(curve.run if several else position) % len(COLORS)]
        parts = [plot_figure.line("x", "y", source=source, line_color=color, line_width=1.6)]
        if curve.mean is not None:  # the thinned curve is then a band that would hide other curves
            parts[0].glyph.update(line_alpha=0.35, line_width=1.0)
            columns = {"x": curve.mean.iterations.astype(np.float32), "y": curve.mean.values.astype(np.float32)}
            mean = ColumnDataSource(columns, name="mean")
            mean_line = plot_figure.line("x", "y", source=mean, line_color=color, line_width=2, level="annotation")
            parts.insert(0, mean_line)
        if len(curve.values) <= MARKED_POINTS:
            parts.append(plot_figure.scatter("x", "y", source=source, size=5, color=color))
        lines.setdefault(curve.label, []).extend(parts)
        plot_figure.add_tools(_hover(parts[-1:], (("", _escape_columns(curve.label)), *POINT)))
    if spans:
        plot_figure.add_tools(_hover(spans, EVENT))
    values = np.concatenate([curve.values for curve in plot.curves])
    if scale == "log":  # bokeh computes no range for a plot that is hidden at first
        plot_figure.y_range = Range1d(values.min() / 1.05, values.max() * 1.05)
    elif values.min() == values.max():  # bokeh's default would be an axis from value - 1 to value + 1
        plot_figure.y_range.default_span = 0.2 * abs(float(values[0])) or 1.0
    legend, rows = _legend(lines)
    plot_figure.add_layout(legend, "above")
    plot_figure.height = HEIGHT + LEGEND_ROW * rows
    return plot_figure


def _hover(renderers: list[Any], tips: Sequence[tuple[str, str]]) -> HoverTool:
    return HoverTool(renderers=renderers, tooltips=list(tips), formatters={"@y": "printf"}, visible=False)


def _escape_columns(text: str) -> str:
    """Replaces `@` and `$` in a tooltip's text, which bokeh would read as names of columns."""
    return text.replace("@", "(at)").replace("$", "(dollar)")


def _legend(entries: dict[str, list[Any]]) -> tuple[Any, int]:
    """Returns (legend above a plot, its number of rows), with columns for a narrow window.

    A click on an entry hides its curve."""
    longest = max(len(label) for label in entries) + 6  # the line beside it
    columns = max(1, min(len(entries), LEGEND_CHARACTERS // longest))
    items = [LegendItem(label={"value": label}, renderers=parts) for label, parts in entries.items()]
    legend = Legend(
        items=items, ncols=columns, orientation="horizontal", location="top_left", click_policy="hide",
        border_line_color=None, padding=2,  # type: ignore[arg-type] # bokeh's stubs have no plain number
        spacing=8, margin=2, label_text_font_size="12px", glyph_height=14,
        glyph_width=18,
    )  # fmt: skip
    return legend, -(-len(items) // columns)
