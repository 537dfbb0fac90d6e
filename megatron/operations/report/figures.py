"""The plots of a report, drawn with bokeh: one range of iterations for all of them, so that they are zoomed
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

# Of matplotlib's tab10 in the order in which neighbours differ most; a run's, or a metric's
COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#17becf", "#bcbd22", "#7f7f7f")
EVENTS: dict[Kind, tuple[str, str, str]] = {
    "save": ("saves", "#9aa0a6", "dotted"),
    "restart": ("restarts", "#6a3d9a", "dashed"),
    "skipped": ("skipped steps", "#e6a100", "dashdot"),
    "spike": ("spikes", "#d62728", "dashed"),
    "stop": ("stops", "#202124", "solid"),
}
"""What the page calls them, colour, dashes. A first start is in the table alone."""
MOST_EVENTS = 400  # of a kind and run in the plots
MANY_EVENTS = 40  # which would hide curves if they were not pale
FEW = 60  # points, which are drawn as such, since a line of one is not seen
POINT = (("iteration", "@x{0,0}"), ("tokens", "@tokens{0.00a}"), ("value", "@y{%.6g}"))
EVENT = (("iteration", "@x{0,0}"), ("", "@text"))  # of what is pointed at
HEIGHT, LEGEND_ROW = 300, 21  # pixels: of a plot, and of each row of its legend above it
LEGEND_CHARACTERS = 44  # of a row: as many as a narrow window has room for


@dataclass(frozen=True)
class Drawn:
    """A plot as bokeh's models: with a linear scale, and a hidden one with a logarithmic scale where that
    makes sense."""

    plot: Plot
    models: tuple[Any, ...]


def iterations_of(plots: Sequence[Plot], maps: Sequence[LoadMap] = ()) -> Range1d:
    """The iterations that all plots show; there is one at least."""
    curves = [curve for plot in plots for curve in plot.curves]
    low = min(float(curve.iterations[0]) for curve in curves)
    high = max(float(curve.iterations[-1]) for curve in curves)
    room = 0.02 * (high - low) or 1.0
    ends = [one.first + (one.codes.shape[-1] - 0.5) * one.step for one in maps]
    return Range1d(
        start=min([low - room, *(one.first - 0.5 * one.step for one in maps)]), end=max([high + room, *ends])
    )


def draw(plots: Sequence[Plot], events: Sequence[Sequence[Event]], together: Range1d | None = None) -> list[Drawn]:
    """Draw the plots; events: of each run; together: the iterations shown, None: those of `plots`. Names of
    models are `plot-0`, `plot-0-log` and so on."""
    if not plots:
        return []
    together = iterations_of(plots) if together is None else together
    of_events, drawn = list(_event_sources(events)), []
    for number, plot in enumerate(plots):
        sources = [_source(curve) for curve in plot.curves]
        has_log = plot.title.partition(":")[0] == "Loss" and all((curve.values > 0).all() for curve in plot.curves)
        models = []
        scales: tuple[Scale, ...] = ("linear", "log") if has_log else ("linear",)
        for scale in scales:
            model = _figure(plot, sources, together, of_events, len(events) > 1, scale)
            model.name = f"plot-{number}" if scale == "linear" else f"plot-{number}-log"
            model.visible = scale == "linear"
            models.append(model)
        drawn.append(Drawn(plot, tuple(models)))
    return drawn


def _source(curve: Curve) -> ColumnDataSource:
    """Four bytes a number, which bokeh keeps as they are."""
    columns = {"x": curve.iterations.astype(np.int32), "y": curve.values.astype(np.float32)}
    return ColumnDataSource({**columns, "tokens": curve.tokens.astype(np.float32)}, name="curve")


def _event_sources(events: Sequence[Sequence[Event]]) -> Iterator[tuple[int, Kind, ColumnDataSource]]:
    """(run, kind, places and texts) of the events that plots show."""
    for run, of_run in enumerate(events):
        for kind in EVENTS:
            shown = [event for event in of_run if event.kind == kind]
            shown = shown[:: -(-len(shown) // MOST_EVENTS) or 1]
            if shown:
                texts = [f"{event.text} ({event.when})" if event.when else event.text for event in shown]
                data = {"x": [event.iteration for event in shown], "text": texts}
                yield run, kind, ColumnDataSource(data, name=f"event {kind}")


def _figure(
    plot: Plot, sources: Sequence[ColumnDataSource], together: Range1d,
    events: Sequence[tuple[int, Kind, ColumnDataSource]], several: bool, scale: Scale,
) -> Any:  # fmt: skip
    """One plot; what draws an event is named `event KIND`. several: whether colours are those of runs, else
    of metrics."""
    made: Any = figure(
        sizing_mode="stretch_width", x_range=together, y_axis_type=scale, min_border_right=12,
        tools=[PanTool(), BoxZoomTool(), WheelZoomTool(dimensions="width"), ResetTool()], active_drag="auto",
        toolbar_location="right", x_axis_label="iteration", y_axis_label=plot.unit or None,
    )  # fmt: skip
    made.toolbar.logo, made.toolbar.autohide = None, True
    made.xaxis.formatter = NumeralTickFormatter(format="0,0")
    if scale == "linear":
        made.yaxis.formatter = BasicTickFormatter(power_limit_high=9)
    made.grid.grid_line_color, made.outline_line_color = "#e8eaed", None
    spans = []
    for run, kind, source in events:
        _, color, dash = EVENTS[kind]
        color = COLORS[run % len(COLORS)] if several else color
        alpha = 0.7 if len(source.data["x"]) <= MANY_EVENTS else 0.25
        span = made.vspan(x="x", source=source, line_color=color, line_dash=dash, line_width=1.2, line_alpha=alpha)
        span.level, span.name = "underlay", f"event {kind}"  # curves lie over them
        spans.append(span)
    lines: dict[str, list[Any]] = {}
    for position, (curve, source) in enumerate(zip(plot.curves, sources, strict=True)):
        color = COLORS[(curve.run if several else position) % len(COLORS)]
        parts = [made.line("x", "y", source=source, line_color=color, line_width=1.6)]
        if curve.mean is not None:  # the curve is then a band, in which others would disappear
            parts[0].glyph.update(line_alpha=0.35, line_width=1.0)
            columns = {"x": curve.mean.iterations.astype(np.float32), "y": curve.mean.values.astype(np.float32)}
            mean = ColumnDataSource(columns, name="mean")
            over_all_bands = made.line("x", "y", source=mean, line_color=color, line_width=2, level="annotation")
            parts.insert(0, over_all_bands)
        if len(curve.values) <= FEW:
            parts.append(made.scatter("x", "y", source=source, size=5, color=color))
        lines.setdefault(curve.label, []).extend(parts)
        made.add_tools(_hover(parts[-1:], (("", _plain(curve.label)), *POINT)))
    if spans:
        made.add_tools(_hover(spans, EVENT))
    values = np.concatenate([curve.values for curve in plot.curves])
    if scale == "log":  # bokeh finds no range of what is hidden at first
        made.y_range = Range1d(values.min() / 1.05, values.max() * 1.05)
    elif values.min() == values.max():  # else the axis goes from one below to one above
        made.y_range.default_span = 0.2 * abs(float(values[0])) or 1.0
    legend, rows = _legend(lines)
    made.add_layout(legend, "above")
    made.height = HEIGHT + LEGEND_ROW * rows
    return made


def _hover(renderers: list[Any], tips: Sequence[tuple[str, str]]) -> HoverTool:
    return HoverTool(renderers=renderers, tooltips=list(tips), formatters={"@y": "printf"}, visible=False)


def _plain(text: str) -> str:
    """Text of a tooltip in which bokeh finds no columns: `@` and `$` begin their names."""
    return text.replace("@", "(at)").replace("$", "(dollar)")


def _legend(entries: dict[str, list[Any]]) -> tuple[Any, int]:
    """What stands above the plot, in as many columns as a narrow window has room for, and its rows; a click
    hides what it names."""
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
