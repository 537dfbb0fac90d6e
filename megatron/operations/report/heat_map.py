"""Draws the load of experts with bokeh: for each run a map of iterations and experts, one layer at a time."""

from collections.abc import Sequence
from typing import Any

from bokeh.models import (
    BasicTicker,
    BoxZoomTool,
    ColumnDataSource,
    CustomJSHover,
    FixedTicker,
    HoverTool,
    LinearColorMapper,
    NumeralTickFormatter,
    PanTool,
    Range1d,
    ResetTool,
    WheelZoomTool,
)
from bokeh.models.annotations import ColorBar
from bokeh.plotting import figure

from megatron.operations.report.router_loads import CODES, OCTAVES, LoadMap, code_of

IDLE = "#000000"
# ColorBrewer's RdBu with a pale grey in the middle: seldom chosen, as the mean, often chosen.
_STOPS = ("#1f63b5", "#4f9bd0", "#9ecae1", "#f2f2f2", "#fcae7b", "#ef5a3c", "#99000d")
_NAMES = {0.125: "1/8", 0.25: "1/4", 0.5: "1/2", 1.0: "1", 2.0: "2", 4.0: "4", 8.0: "8"}
_SHORT, _TALL, _ROW, _MARGINS = 150, 520, 12, 60  # pixels: height of a map's frame (from, to), of an expert, of axes


def draw_maps(maps: Sequence[LoadMap], iteration_range: Range1d) -> list[Any]:
    """A figure for each map, named `load-0` and so on. Its renderers are named `layer N`; the first is
    visible. iteration_range: shared by all plots."""
    return [_figure(f"load-{number}", load_map, iteration_range) for number, load_map in enumerate(maps)]


def palette() -> list[str]:
    """The colours of codes 1 to CODES, as hexadecimal strings."""
    stops = [[int(stop[i : i + 2], 16) for i in (1, 3, 5)] for stop in _STOPS]
    colors = []
    for i in range(CODES):
        place, part = divmod(i * (len(stops) - 1) / (CODES - 1), 1)
        low, high = stops[int(place)], stops[min(int(place) + 1, len(stops) - 1)]
        mixed = (round(a + part * (b - a)) for a, b in zip(low, high, strict=True))
        colors.append("#" + "".join(f"{channel:02x}" for channel in mixed))
    return colors


def _figure(name: str, load_map: LoadMap, iteration_range: Range1d) -> Any:
    _, experts, columns = load_map.codes.shape
    map_figure: Any = figure(
        name=name, sizing_mode="stretch_width", x_range=iteration_range, y_range=Range1d(start=-0.5, end=experts - 0.5),
        min_border_right=12, active_drag="auto", toolbar_location="right", x_axis_label="iteration",
        tools=[PanTool(), BoxZoomTool(), WheelZoomTool(dimensions="width"), ResetTool()], y_axis_label="expert",
        height=min(max(_SHORT, _ROW * experts), _TALL) + _MARGINS,
    )  # fmt: skip
    map_figure.toolbar.logo, map_figure.toolbar.autohide = None, True
    map_figure.xaxis.formatter = NumeralTickFormatter(format="0,0")
    map_figure.yaxis.ticker = BasicTicker(min_interval=1, num_minor_ticks=0)
    map_figure.grid.grid_line_color, map_figure.outline_line_color = None, None
    colors = LinearColorMapper(palette=palette(), low=0.5, high=CODES + 0.5, low_color=IDLE)
    for layer, codes in zip(load_map.layers, load_map.codes, strict=True):
        place = {
            "x": [load_map.first_iteration - load_map.step / 2],
            "y": [-0.5],
            "dw": [columns * load_map.step],
            "dh": [experts],
        }
        source = ColumnDataSource({"image": [codes], **place}, name="load")
        image = map_figure.image("image", "x", "y", "dw", "dh", source=source, color_mapper=colors)
        image.name, image.visible = f"layer {layer}", layer == load_map.layers[0]
    map_figure.add_tools(_hover())
    ticks: dict[Any, Any] = {code_of(load): text for load, text in _NAMES.items()}
    bar = ColorBar(
        color_mapper=colors, width=10, padding=4, border_line_color=None,
        ticker=FixedTicker(ticks=list(ticks)), major_label_overrides=ticks,
    )  # fmt: skip
    map_figure.add_layout(bar, "right")
    return map_figure


def _hover() -> HoverTool:
    """A tooltip that computes the load from its colour's code, exact to 1 %."""
    place = f"(value - 1) / {CODES - 1} * {2 * OCTAVES} - {OCTAVES}"
    bounds = f"value == 1 ? 'at most {2**-OCTAVES}' : value == {CODES} ? 'at least {2**OCTAVES}'"
    code = f"return value == 0 ? 'no token' : {bounds} : Math.pow(2, {place}).toFixed(2)"
    tips = [("iteration", "$x{0,0}"), ("expert", "$y{0}"), ("load", "@image{custom}")]
    return HoverTool(tooltips=tips, formatters={"@image": CustomJSHover(code=code)}, visible=False)
