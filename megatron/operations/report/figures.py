"""Draws plots with bokeh. All plots of a page share one range of iterations, so they zoom together.

The load of experts is drawn as one heat map per run: iterations across, experts up, one layer at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from bokeh import models
from bokeh.models.annotations import ColorBar, Legend, LegendItem
from bokeh.plotting import figure

from megatron.operations.report.curves import PERPLEXITY, Curve, Plot
from megatron.operations.report.events import Event, Kind
from megatron.operations.report.router_loads import CODES, OCTAVES, LoadMap, code_of

Scale = Literal["linear", "log"]
SCALES: tuple[Scale, ...] = ("linear", "log")

# Colours of matplotlib's tab10, ordered so that neighbours differ most; one for each run or metric
COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#17becf", "#bcbd22", "#7f7f7f")
EVENTS: dict[Kind, tuple[str, str, str]] = {
    "save": ("saves", "#9aa0a6", "dotted"),
    "restart": ("restarts", "#6a3d9a", "dashed"),
    "skipped": ("skipped steps", "#e6a100", "dashdot"),
    "spike": ("spikes", "#d62728", "dashed"),
    "stop": ("stops", "#202124", "solid"),
}
"""Name on the page, colour and dash style for each kind of event. First starts appear only in the table."""
MOST_EVENTS = 400  # most events of one kind and run in the plots
MANY_EVENTS = 40  # more events than this are drawn pale, to keep curves visible
MARKED_POINTS = 60  # curves of at most so many points have markers, because a line through one point is invisible
POINT = (("tokens", "@tokens{0.00a}"), ("value", "@y{%.6g}"))
EVENT = (("iteration", "@x{0,0}"), ("", "@text"))  # tooltip
HEIGHT, LEGEND_ROW = 300, 21  # pixels: height of a plot, and of each row of the legend above it
LEGEND_CHARACTERS = 44  # characters of a legend's row, to fit a narrow window
IDLE = "#000000"
# ColorBrewer's RdBu with a pale grey in the middle: seldom chosen, as the mean, often chosen.
_STOPS = ("#1f63b5", "#4f9bd0", "#9ecae1", "#f2f2f2", "#fcae7b", "#ef5a3c", "#99000d")
_NAMES = {0.125: "1/8", 0.25: "1/4", 0.5: "1/2", 1.0: "1", 2.0: "2", 4.0: "4", 8.0: "8"}
_SHORT, _TALL, _ROW, _MARGINS = 150, 520, 12, 60  # pixels: least and largest height of a map, height of an expert, axes


class Positions(NamedTuple):
    """The meaning of a curve's positions.

    number_format: of bokeh; None: as many digits as needed. dtype: of the positions in the page."""

    name: str
    number_format: str | None
    dtype: type[np.generic]


ITERATIONS = Positions("iteration", "0,0", np.int32)


@dataclass(frozen=True)
class PlotModels:
    """A plot, and its bokeh figures: one with a linear scale; for losses also a hidden one with a log
    scale."""

    plot: Plot
    models: tuple[Any, ...]


def iterations_of(plots: Sequence[Plot], maps: Sequence[LoadMap] = ()) -> models.Range1d:
    """Returns a bokeh range of iterations that covers all plots and maps. At least one plot is needed."""
    curves = [curve for plot in plots for curve in plot.curves]
    low = min(float(curve.iterations[0]) for curve in curves)
    high = max(float(curve.iterations[-1]) for curve in curves)
    room = 0.02 * (high - low) or 1.0
    ends = [load_map.first_iteration + (load_map.codes.shape[-1] - 0.5) * load_map.step for load_map in maps]
    starts = [load_map.first_iteration - 0.5 * load_map.step for load_map in maps]
    return models.Range1d(start=min([low - room, *starts]), end=max([high + room, *ends]))


def draw(
    plots: Sequence[Plot], events: Sequence[Sequence[Event]], iteration_range: models.Range1d | None = None,
    positions: Positions = ITERATIONS,
) -> list[PlotModels]:  # fmt: skip
    """Returns the plots as bokeh figures, which are named `plot-0`, `plot-0-log`, `plot-1` and so on.

    events: events of each run.
    iteration_range: the iterations to show; None: those of `plots`.
    positions: what the curves have as `iterations`.
    """
    if not plots:
        return []
    iteration_range = iterations_of(plots) if iteration_range is None else iteration_range
    event_sources, plot_models = list(_event_sources(events)), []
    for number, plot in enumerate(plots):
        sources = [_source(curve, positions) for curve in plot.curves]
        scales, scale_models = _scales(plot), []
        for scale in scales:
            model = _figure(plot, sources, iteration_range, event_sources, len(events) > 1, scale, positions)
            model.name = f"plot-{number}" if scale == scales[0] else f"plot-{number}-log"
            model.visible = scale == scales[0]
            scale_models.append(model)
        plot_models.append(PlotModels(plot, tuple(scale_models)))
    return plot_models


def _scales(plot: Plot) -> tuple[Scale, ...]:
    """Returns the scales of a plot: a perplexity is the exponential of a loss, which may be drawn on both."""
    group, is_positive = plot.title.partition(":")[0], all((curve.values > 0).all() for curve in plot.curves)
    if group == PERPLEXITY and is_positive:
        return ("log",)
    return SCALES if group == "Loss" and is_positive else ("linear",)


def _source(curve: Curve, positions: Positions) -> models.ColumnDataSource:
    """Returns a bokeh source with the points of a curve as arrays, which bokeh embeds in binary form."""
    columns = {"x": curve.iterations.astype(positions.dtype), "y": curve.values.astype(np.float32)}
    return models.ColumnDataSource({**columns, "tokens": curve.tokens.astype(np.float32)}, name="curve")


def _event_sources(events: Sequence[Sequence[Event]]) -> Iterator[tuple[int, Kind, models.ColumnDataSource]]:
    """Yields (index of the run, kind, bokeh source with positions and texts) for the events of each run and
    kind.

    Of more than 400 events of a kind, only evenly chosen ones are in the source."""
    for run, run_events in enumerate(events):
        for kind in EVENTS:
            selected = [event for event in run_events if event.kind == kind]
            selected = selected[:: -(-len(selected) // MOST_EVENTS) or 1]
            if selected:
                texts = [f"{event.text} ({event.timestamp})" if event.timestamp else event.text for event in selected]
                data = {"x": [event.iteration for event in selected], "text": texts}
                yield run, kind, models.ColumnDataSource(data, name=f"event {kind}")


def _empty_figure(
    iteration_range: models.Range1d, y_label: str | None, grid_color: str | None, positions: Positions = ITERATIONS,
    **options: Any,
) -> Any:  # fmt: skip
    """Returns an empty bokeh figure with iterations as x axis, and tools to pan and zoom. options: for
    bokeh."""
    tools = [models.PanTool(), models.BoxZoomTool(), models.WheelZoomTool(dimensions="width"), models.ResetTool()]
    empty: Any = figure(
        sizing_mode="stretch_width", x_range=iteration_range, min_border_right=12, active_drag="auto", tools=tools,
        toolbar_location="right", x_axis_label=positions.name, y_axis_label=y_label, **options,
    )  # fmt: skip
    empty.toolbar.logo, empty.toolbar.autohide = None, True
    if positions.number_format is not None:
        empty.xaxis.formatter = models.NumeralTickFormatter(format=positions.number_format)
    empty.grid.grid_line_color, empty.outline_line_color = grid_color, None
    return empty


def _figure(
    plot: Plot, sources: Sequence[models.ColumnDataSource], iteration_range: models.Range1d,
    events: Sequence[tuple[int, Kind, models.ColumnDataSource]], several: bool, scale: Scale, positions: Positions,
) -> Any:  # fmt: skip
    """Returns the bokeh figure of one plot. The lines of its events are named `event KIND`.

    sources: points of each curve. several: whether the page has several runs; then colours stand for runs,
    else for metrics."""
    plot_figure = _empty_figure(
        iteration_range, plot.unit or None, grid_color="#e8eaed", positions=positions, y_axis_type=scale
    )
    if scale == "linear":
        plot_figure.yaxis.formatter = models.BasicTickFormatter(power_limit_high=9)
    spans = []
    for run, kind, source in events:
        _, color, dash = EVENTS[kind]
        color = COLORS[run % len(COLORS)] if several else color
        alpha = 0.7 if len(source.data["x"]) <= MANY_EVENTS else 0.25
        look = {"line_color": color, "line_dash": dash, "line_width": 1.2, "line_alpha": alpha}
        span = plot_figure.vspan(x="x", source=source, **look)
        span.level, span.name = "underlay", f"event {kind}"  # below the curves
        spans.append(span)
    lines: dict[str, list[Any]] = {}
    for position, (curve, source) in enumerate(zip(plot.curves, sources, strict=True)):
        color = COLORS[(curve.run if several else position) % len(COLORS)]
        parts = [plot_figure.line("x", "y", source=source, line_color=color, line_width=1.6)]
        if curve.mean is not None:  # drawn pale, because the thinned curve is a band that would hide other curves
            parts[0].glyph.update(line_alpha=0.35, line_width=1.0)
            columns = {"x": curve.mean.iterations.astype(np.float32), "y": curve.mean.values.astype(np.float32)}
            mean = models.ColumnDataSource(columns, name="mean")
            mean_line = plot_figure.line("x", "y", source=mean, line_color=color, line_width=2, level="annotation")
            parts.insert(0, mean_line)
        if len(curve.values) <= MARKED_POINTS:
            parts.append(plot_figure.scatter("x", "y", source=source, size=5, color=color))
        lines.setdefault(curve.label, []).extend(parts)
        place = (positions.name, "@x" if positions.number_format is None else f"@x{{{positions.number_format}}}")
        plot_figure.add_tools(_hover(parts[-1:], (("", _escape_columns(curve.label)), place, *POINT)))
    if spans:
        plot_figure.add_tools(_hover(spans, EVENT))
    values = np.concatenate([curve.values for curve in plot.curves])
    if scale == "log":  # bokeh computes no range for a plot that is hidden at first
        plot_figure.y_range = models.Range1d(values.min() / 1.05, values.max() * 1.05)
    elif values.min() == values.max():  # bokeh's default would be an axis from value - 1 to value + 1
        plot_figure.y_range.default_span = 0.2 * abs(float(values[0])) or 1.0
    legend, rows = _legend(lines)
    plot_figure.add_layout(legend, "above")
    plot_figure.height = HEIGHT + LEGEND_ROW * rows
    return plot_figure


def _hover(renderers: list[Any], tips: Sequence[tuple[str, str]]) -> models.HoverTool:
    return models.HoverTool(renderers=renderers, tooltips=list(tips), formatters={"@y": "printf"}, visible=False)


def _escape_columns(text: str) -> str:
    """Replaces `@` and `$` in the text of a tooltip, because bokeh reads words after them as names of
    columns."""
    return text.replace("@", "(at)").replace("$", "(dollar)")


def _legend(entries: dict[str, list[Any]]) -> tuple[Any, int]:
    """Returns (bokeh legend, its number of rows). The legend has as many columns as fit into a narrow window.

    entries: parts of each curve's drawing by label. A click on a label hides the curve."""
    longest = max(len(label) for label in entries) + 6  # the line beside it
    columns = max(1, min(len(entries), LEGEND_CHARACTERS // longest))
    items = [LegendItem(label={"value": label}, renderers=parts) for label, parts in entries.items()]
    legend = Legend(
        items=items, ncols=columns, orientation="horizontal", location="top_left", click_policy="hide",
        border_line_color=None, padding=2,  # type: ignore[arg-type] # bokeh's stubs have no plain number
        spacing=8, margin=2, label_text_font_size="12px", glyph_height=14, glyph_width=18,
    )  # fmt: skip
    return legend, -(-len(items) // columns)


def draw_maps(maps: Sequence[LoadMap], iteration_range: models.Range1d) -> list[Any]:
    """Returns a bokeh figure for each map of expert loads, named `load-0`, `load-1` and so on.

    A figure has one image per layer, named `layer N`; only the first is visible. iteration_range: shared by
    all plots of the page."""
    return [_map_figure(f"load-{number}", load_map, iteration_range) for number, load_map in enumerate(maps)]


def palette() -> list[str]:
    """Returns the colours of the load codes 1 to CODES, from blue (low) to red (high), such as `#1f63b5`."""
    stops = [[int(stop[i : i + 2], 16) for i in (1, 3, 5)] for stop in _STOPS]
    colors = []
    for i in range(CODES):
        place, part = divmod(i * (len(stops) - 1) / (CODES - 1), 1)
        low, high = stops[int(place)], stops[min(int(place) + 1, len(stops) - 1)]
        mixed = (round(a + part * (b - a)) for a, b in zip(low, high, strict=True))
        colors.append("#" + "".join(f"{channel:02x}" for channel in mixed))
    return colors


def _map_figure(name: str, load_map: LoadMap, iteration_range: models.Range1d) -> Any:
    _, experts, columns = load_map.codes.shape
    map_figure = _empty_figure(
        iteration_range, "expert", grid_color=None, name=name, y_range=models.Range1d(start=-0.5, end=experts - 0.5),
        height=min(max(_SHORT, _ROW * experts), _TALL) + _MARGINS,
    )  # fmt: skip
    map_figure.yaxis.ticker = models.BasicTicker(min_interval=1, num_minor_ticks=0)
    colors = models.LinearColorMapper(palette=palette(), low=0.5, high=CODES + 0.5, low_color=IDLE)
    for layer, codes in zip(load_map.layers, load_map.codes, strict=True):
        left, width = load_map.first_iteration - load_map.step / 2, columns * load_map.step
        place = {"x": [left], "y": [-0.5], "dw": [width], "dh": [experts]}
        source = models.ColumnDataSource({"image": [codes], **place}, name="load")
        image = map_figure.image("image", "x", "y", "dw", "dh", source=source, color_mapper=colors)
        image.name, image.visible = f"layer {layer}", layer == load_map.layers[0]
    map_figure.add_tools(_load_hover())
    ticks: dict[Any, Any] = {code_of(load): text for load, text in _NAMES.items()}
    bar = ColorBar(
        color_mapper=colors, width=10, padding=4, border_line_color=None,
        ticker=models.FixedTicker(ticks=list(ticks)), major_label_overrides=ticks,
    )  # fmt: skip
    map_figure.add_layout(bar, "right")
    return map_figure


def _load_hover() -> models.HoverTool:
    """Returns a tooltip that shows the load under the mouse, computed from its code; exact to about 1 %."""
    place = f"(value - 1) / {CODES - 1} * {2 * OCTAVES} - {OCTAVES}"
    bounds = f"value == 1 ? 'at most {2**-OCTAVES}' : value == {CODES} ? 'at least {2**OCTAVES}'"
    code = f"return value == 0 ? 'no token' : {bounds} : Math.pow(2, {place}).toFixed(2)"
    tips = [("iteration", "$x{0,0}"), ("expert", "$y{0}"), ("load", "@image{custom}")]
    return models.HoverTool(tooltips=tips, formatters={"@image": models.CustomJSHover(code=code)}, visible=False)
