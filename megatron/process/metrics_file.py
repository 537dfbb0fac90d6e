"""`metrics.jsonl`, the file of a run's metrics: its name, the fields that say where a row is, reading and
writing it; and the names of the files beside it, of `profile_memory`, the load of experts and rollouts."""

import io
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.process.logfile import LogFile, say

METRICS_FILE = "metrics.jsonl"
MEMORY_FILE = "memory_parts.json"
LOAD_FILE = "router_load.jsonl"
"""A line a logged step: `iteration`, `run_id`, `layers` (NeoX indices) and `load`, of each of these the
tokens of each expert in units of the mean."""
ROLLOUTS_FILE = "rollouts.jsonl"
"""A line an answer of a run that is trained with rewards."""
POSITION = ("iteration", "consumed_samples", "consumed_tokens")
"""Where the run is; everything else in a row is a metric."""
_BLOCK = 1 << 20  # bytes that are read at a time from the end


def read_metrics(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(byte at which its line ends, row) of each step in a `metrics.jsonl`, in order. What is no row is
    passed over: a line that a run was killed in, bytes that a disk has damaged."""
    end = 0
    with path.open("rb") as file:
        for line in file:
            end += len(line)
            if (row := _row(line)) is not None:
                yield end, row


def read_metrics_backwards(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """As of `read_metrics`, from the last row on; no more of the file is read than is asked for."""
    with path.open("rb") as file:
        start = end = file.seek(0, os.SEEK_END)
        begun = b""  # a line whose beginning is not read yet
        while start > 0:
            size = min(_BLOCK, start)
            start = file.seek(start - size)
            lines = io.BytesIO(file.read(size) + begun).readlines()
            begun = lines.pop(0) if start > 0 else b""
            for line in reversed(lines):
                if (row := _row(line)) is not None:
                    yield end, row
                end -= len(line)


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("iteration"), int) else None


class JsonlLogger:
    """`metrics.jsonl`, or another such file: one object a line in full precision, each step once.

    When a run goes on, its rows after `iteration` are cut: in place, for which a full disk has room. A file
    of another run (`log_dir` may be shared) is set aside as `metrics.1.jsonl` and so on. say: is told of a
    disk that is full.
    """

    def __init__(self, path: Path, iteration: int, run_id: str, say: Callable[[str], None] = say) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and any(
            row.get("run_id") != run_id for _, row in itertools.islice(read_metrics_backwards(path), 1)
        ):
            taken = (path.with_suffix(f".{i}.jsonl") for i in itertools.count(1))
            os.replace(path, next(name for name in taken if not name.exists()))
        if path.exists():
            backwards = read_metrics_backwards(path)
            os.truncate(path, next((end for end, row in backwards if row["iteration"] <= iteration), 0))
        else:
            path.touch()
        self._file = LogFile(path, say)
        self._run_id = run_id

    def write(self, row: Mapping[str, Any]) -> None:
        self._file.write((json.dumps({**row, "run_id": self._run_id}) + "\n").encode())

    def close(self) -> None:
        self._file.close()
