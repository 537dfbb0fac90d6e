"""Runs for reports to be made of, and what stands in a page, read with bokeh."""

import html
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bokeh.document import Document

from megatron.neox_arguments import NeoXArgs

Row = dict[str, Any]


def write_run(save: Path, rows: Iterable[Row], values: dict[str, Any] | None = None,
              status: dict[str, Any] | None = None) -> Path:  # fmt: skip
    """A run's folders with these rows, and with the configuration and the status where they are given."""
    logs = save / "logs"
    logs.mkdir(parents=True)
    (logs / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if values is not None:
        (logs / "neox_args.train.20260101-000000.here.1.json").write_text(NeoXArgs.from_dict(values).to_json())
    if status is not None:
        (save / "status.json").write_text(json.dumps(status))
    return save


def rows_of(steps: int, extra_keys: Callable[[int], Row] = lambda step: {}) -> Iterable[Row]:
    """Rows of a run whose loss falls. extra_keys: further keys of a row, or replaced ones."""
    for step in range(1, steps + 1):
        yield {"iteration": step, "consumed_samples": 8 * step, "consumed_tokens": 256 * step, "run_id": "a",
               "train/lm_loss": 2.0 + 1.0 / step, "train/grad_norm": 1.0 + step % 7, "runtime/start_time": 1.7e9,
               "runtime/restarts": 0, **extra_keys(step)}  # fmt: skip


def figures(page: Path) -> list[Any]:
    """The plots of a page, as bokeh reads them."""
    (text,) = re.findall(r'<script type="application/json" id="report-data">(.*?)</script>', page.read_text(), re.S)
    return Document.from_json(json.loads(text)["documents"]["report"]).roots


def points(figure: Any, name: str = "curve") -> list[Any]:
    """The columns of what a plot draws under this name: of each curve, or of the events of a kind."""
    return [part.data_source.data for part in figure.renderers if part.data_source.name == name]


def titles(page: Path) -> list[str]:
    headings = re.findall(r'<div class="plot">.*?<h3>(.*?)</h3>', page.read_text(), re.S)
    return [html.unescape(title) for title in headings]


def table(page: Path, name: str) -> list[list[str]]:
    """The rows of a table of the page, by its class or its id, as text."""
    match = re.search(rf'<table[^>]*(?:class|id)="{name}".*?<tbody>(.*?)</tbody>', page.read_text(), re.S)
    assert match is not None, name
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row, re.S) for row in re.findall(r"<tr>(.*?)</tr>", match[1], re.S)]
    return [[html.unescape(cell) for cell in row] for row in cells]
