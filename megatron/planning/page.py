"""Writes a plan as a page for a browser, in one file that loads nothing."""

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from megatron.pages import page_template
from megatron.planning.output import facts, part_name, readable_count, sections
from megatron.planning.plan import GIB, Plan
from megatron.process.text_tables import Section, Table

_COLORS = ("#1a73e8", "#e8710a", "#188038", "#a142f4", "#12a4af", "#b06000", "#5f6368", "#c5221f", "#80868b", "#f29900")
_LEFT, _RIGHT = 110, 880  # of bars, in a picture 1000 wide
_BAR = 28  # from one bar to the next


class _Bar(NamedTuple):
    """A bar of a chart. parts: sizes, by name."""

    label: str
    parts: Mapping[str, float]


def write_page(plan: Plan, path: Path) -> None:
    """Writes the page. Raises OSError if it cannot be written."""
    path.write_text(_render(plan), encoding="utf-8")


def _render(plan: Plan) -> str:
    charts = {"Memory": _memory_chart(plan), "Seconds of a step": _time_chart(plan) if plan.time else None}
    return str(page_template("megatron.planning").render(
        title=f"Plan of {readable_count(plan.size.total)} parameters on {plan.args.world_size} GPUs",
        made=time.strftime("%Y-%m-%d %H:%M:%S"), facts=list(facts(plan)), is_bad=plan.fits_memory is False,
        sections=[_section(section, charts.get(section.title)) for section in sections(plan)],
        lines=[*(f"Note: {note}" for note in plan.notes), *(f"Problem: {problem}" for problem in plan.problems)],
    ))  # fmt: skip


def _section(section: Section, chart: Any) -> dict[str, Any]:
    items = [{"table": item} if isinstance(item, Table) else {"text": item} for item in section.items]
    return {"title": section.title, "chart": chart, "items": items}


def _memory_chart(plan: Plan) -> dict[str, Any]:
    bars = []
    for number, stage in enumerate(plan.stages):
        memory = stage.memory
        parts = {**memory.parts, "other": memory.kept_bytes - sum(memory.parts.values())}
        parts["activations"] = memory.step - memory.kept_bytes
        bars.append(_Bar(f"stage {number}", {part: size / GIB for part, size in parts.items()}))
    limit = None if plan.gpu_memory is None else plan.gpu_memory / GIB
    return _chart(bars, "GiB", limit)


def _time_chart(plan: Plan) -> dict[str, Any]:
    assert plan.time is not None
    parts = sorted(plan.time.parts.items(), key=lambda item: -item[1])
    bars = [_Bar("this run", {part_name(part): seconds for part, seconds in parts})]
    if plan.search is not None and plan.search.best:
        fastest = plan.search.best[0].parts
        bars.append(_Bar("fastest layout", {part_name(part): seconds for part, seconds in fastest.items()}))
    return _chart(bars, "s", None)


def _chart(bars: Sequence[_Bar], unit: str, limit: float | None) -> dict[str, Any]:
    """Returns stacked bars, in pixels. limit: a value to mark."""
    names = list(dict.fromkeys(chain.from_iterable(bar.parts for bar in bars)))
    names = [name for name in names if any(bar.parts.get(name, 0.0) > 0.0 for bar in bars)]
    colors = {name: _COLORS[i % len(_COLORS)] for i, name in enumerate(names)}
    full = max(*(sum(bar.parts.values()) for bar in bars), limit or 0.0) or 1.0
    scale = (_RIGHT - _LEFT) / full

    def boxes(bar: _Bar) -> Iterator[dict[str, Any]]:
        x = float(_LEFT)
        for name in names:
            size = max(bar.parts.get(name, 0.0), 0.0)
            text = f"{name}: {size:.3g} {unit}"
            yield {"x": round(x, 2), "width": round(size * scale, 2), "color": colors[name], "text": text}
            x += size * scale

    bar_boxes = [
        {"label": bar.label, "y": _BAR * number, "boxes": list(boxes(bar)),
         "end": _LEFT + scale * sum(bar.parts.values()), "total": f"{sum(bar.parts.values()):.3g} {unit}"}
        for number, bar in enumerate(bars)
    ]  # fmt: skip
    mark = None if limit is None else {"x": round(_LEFT + limit * scale, 2), "text": f"{limit:.4g} {unit} of the GPU"}
    return {"bars": bar_boxes, "colors": colors, "height": _BAR * len(bars) + (20 if mark else 0), "limit": mark}
