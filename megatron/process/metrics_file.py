"""Reads and writes `metrics.jsonl`, the file of a run's metrics.

It also defines the names of the files beside it: memory profile, expert load and rollouts.
"""

import io
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.process.logfile import LogFile, say
from megatron.process.run_files import ROW_SHAPE, Problems, Unfit, count, fields_of, number, open_file, parse, to_json

METRICS_FILE = "metrics.jsonl"
MEMORY_FILE = "memory_parts.json"
LOAD_FILE = "router_load.jsonl"
"""The file has a line for each logged step: `iteration`, `run_id`, `layers` (NeoX indices) and `load`.

`load` holds, for each layer, the number of tokens of each expert divided by the mean over the experts."""
SPIKES_FILE = "spikes.jsonl"
"""The file has a line for each step that `log_spikes_above_sigma` reports."""
ROLLOUTS_FILE = "rollouts.jsonl"
"""The file has a line for each answer that the model generates in training with rewards."""
POSITION = ("iteration", "consumed_samples", "consumed_tokens")
"""The fields that give the position of the run; every other field of a row is a metric."""
_BLOCK = 1 << 20  # bytes that `read_lines_backwards` reads at a time


def read_metrics(path: Path, problems: Problems) -> Iterator[dict[str, Any]]:
    """Yields the rows of a `metrics.jsonl` in order. A row is {metric name: number}, with the text `run_id`.

    Values that are not numbers are dropped and noted in `problems`. Lines that are not valid JSON objects are
    skipped (`read_lines`).
    """
    for _, row in read_lines(path, problems):
        yield _checked_row(path, row, problems)


def read_last_metrics(path: Path, size: int, problems: Problems) -> list[dict[str, Any]]:
    """Returns the complete rows in the last `size` bytes of a `metrics.jsonl`, as `read_metrics` yields
    them."""
    with open_file(path) as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - size))
        lines = file.read(size).splitlines(keepends=True)
    rows = (_row(path, line, problems) for line in (lines if end <= size else lines[1:]))
    return [_checked_row(path, row, problems) for row in rows if row is not None]


def read_lines(path: Path, problems: Problems) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (byte offset of the line's end, row) for each valid line, in order. A valid line is a JSON
    object with an `iteration`.

    Other values of the row are not checked. Invalid lines, as from a damaged disk, are skipped and noted in
    `problems`. An invalid last line without a line break is skipped silently, because a run may still be
    writing it or was killed while writing.
    """
    end = 0
    with open_file(path) as file:
        for line in file:
            end += len(line)
            if (row := _row(path, line, problems)) is not None:
                yield end, row


def read_lines_backwards(path: Path, problems: Problems) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the same pairs as `read_lines`, but from the last line backwards. Reads only as much of the file
    as the caller consumes."""
    with open_file(path) as file:
        start = end = file.seek(0, os.SEEK_END)
        partial_line = b""  # a line whose beginning is not read yet
        while start > 0:
            size = min(_BLOCK, start)
            start = file.seek(start - size)
            lines = io.BytesIO(file.read(size) + partial_line).readlines()
            partial_line = lines.pop(0) if start > 0 else b""
            for line in reversed(lines):
                if (row := _row(path, line, problems)) is not None:
                    yield end, row
                end -= len(line)


def _row(path: Path, line: bytes, problems: Problems) -> dict[str, Any] | None:
    try:
        row = parse(line)
        if not isinstance(row, dict):
            raise ValueError("not a JSON object")
        count(row.get("iteration"))
    except (ValueError, Unfit) as problem:
        if line.endswith(b"\n") and line.strip():
            reason = "has no iteration" if isinstance(problem, Unfit) else problem
            problems.note(path, "", f"a line is not a valid row ({reason}) and was skipped")
        return None
    return row


def _checked_row(path: Path, row: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
    fields = fields_of(row, ROW_SHAPE, lambda name, reason: problems.note(path, name, reason), default=number)
    return {name: value for name, value in fields.items() if value is not None}


class JsonlLogger:
    """Writes `metrics.jsonl` or a similar file: one JSON object per line, floats in full precision, NaN as
    null.

    When a run resumes at `iteration`, rows of later iterations are removed in place, which needs no disk
    space. At iteration 0 all rows are removed: the validation before the first step is computed again. If an
    existing file belongs to another run (`log_dir` may be shared), that file is renamed to `metrics.1.jsonl`
    and so on.

    say: called with a message if the file cannot be written.
    """

    def __init__(self, path: Path, iteration: int, run_id: str, say: Callable[[str], None] = say) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and any(
            row.get("run_id") != run_id for _, row in itertools.islice(read_lines_backwards(path, Problems()), 1)
        ):
            candidates = (path.with_suffix(f".{i}.jsonl") for i in itertools.count(1))
            os.replace(path, next(name for name in candidates if not name.exists()))
        if path.exists():
            backwards = read_lines_backwards(path, Problems())
            kept_sizes = (end for end, row in backwards if 0 < iteration and row["iteration"] <= iteration)
            os.truncate(path, next(kept_sizes, 0))
        else:
            path.touch()
        self._file = LogFile(path, say)
        self._run_id = run_id

    def write(self, row: Mapping[str, Any]) -> None:
        self._file.write((to_json({**row, "run_id": self._run_id}) + "\n").encode())

    def close(self) -> None:
        self._file.close()
