"""`metrics.jsonl`, the file of a run's metrics: its name, the fields that say where a row is, and reading
it; and the names of the files of `profile_memory` and of the load of experts beside it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
MEMORY_FILE = "memory_parts.json"
LOAD_FILE = "router_load.jsonl"
"""A line a logged step: `iteration`, `run_id`, `layers` (NeoX indices) and `load`, of each of these the
tokens of each expert in units of the mean."""
POSITION = ("iteration", "consumed_samples", "consumed_tokens")
"""Where the run is; everything else in a row is a metric."""


def read_metrics(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(byte at which its line ends, row) of each step in a `metrics.jsonl`, in order. What is no row is
    passed over: a line that a run was killed in, bytes that a disk has damaged."""
    end = 0
    with path.open("rb") as file:
        for line in file:
            end += len(line)
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and isinstance(row.get("iteration"), int):
                yield end, row
