"""`metrics.jsonl`, the file of a run's metrics: its name, the fields that say where a row is, reading and
writing it; and the names of the files beside it, of `profile_memory`, the load of experts and rollouts."""

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
"""A line a logged step: `iteration`, `run_id`, `layers` (NeoX indices) and `load`, of each of these the
tokens of each expert in units of the mean."""
ROLLOUTS_FILE = "rollouts.jsonl"
"""A line an answer of a run that is trained with rewards."""
POSITION = ("iteration", "consumed_samples", "consumed_tokens")
"""Where the run is; everything else in a row is a metric."""
_BLOCK = 1 << 20  # bytes that are read at a time from the end


def read_metrics(path: Path, problems: Problems) -> Iterator[dict[str, Any]]:
    """The row of each step in a `metrics.jsonl`, in order: numbers by name, and `run_id`. A value that is no
    number is dropped and noted; lines that are no rows, as `read_lines`."""
    for _, row in read_lines(path, problems):
        yield _typed(path, row, problems)


def read_last_metrics(path: Path, size: int, problems: Problems) -> list[dict[str, Any]]:
    """As `read_metrics`, of the last `size` bytes of a file, which may have gigabytes."""
    with open_file(path) as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - size))
        lines = file.read(size).splitlines(keepends=True)
    found = (_row(path, line, problems) for line in (lines if end <= size else lines[1:]))
    return [_typed(path, row, problems) for row in found if row is not None]


def read_lines(path: Path, problems: Problems) -> Iterator[tuple[int, dict[str, Any]]]:
    """(byte at which its line ends, row) of each object with an `iteration` in a file of lines, in order; its
    other values are of any kind. What is no row is passed over and noted: bytes that a disk has damaged. The
    last line may be one that a run was killed in, or is writing."""
    end = 0
    with open_file(path) as file:
        for line in file:
            end += len(line)
            if (row := _row(path, line, problems)) is not None:
                yield end, row


def read_lines_backwards(path: Path, problems: Problems) -> Iterator[tuple[int, dict[str, Any]]]:
    """As of `read_lines`, from the last row on; no more of the file is read than is asked for."""
    with open_file(path) as file:
        start = end = file.seek(0, os.SEEK_END)
        begun = b""  # a line whose beginning is not read yet
        while start > 0:
            size = min(_BLOCK, start)
            start = file.seek(start - size)
            lines = io.BytesIO(file.read(size) + begun).readlines()
            begun = lines.pop(0) if start > 0 else b""
            for line in reversed(lines):
                if (row := _row(path, line, problems)) is not None:
                    yield end, row
                end -= len(line)


def _row(path: Path, line: bytes, problems: Problems) -> dict[str, Any] | None:
    try:
        row = parse(line)
        if not isinstance(row, dict):
            raise ValueError("no object")
        count(row.get("iteration"))
    except (ValueError, Unfit) as problem:
        if line.endswith(b"\n") and line.strip():
            why = "has no iteration" if isinstance(problem, Unfit) else problem
            problems.note(path, "", f"a line is no row ({why}); passed over")
        return None
    return row


def _typed(path: Path, row: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
    fields = fields_of(row, ROW_SHAPE, lambda name, why: problems.note(path, name, why), others=number)
    return {name: value for name, value in fields.items() if value is not None}


class JsonlLogger:
    """`metrics.jsonl`, or another such file: one object a line in full precision, each step once; null for
    what is no number.

    When a run goes on, its rows after `iteration` are cut: in place, for which a full disk has room. A file
    of another run (`log_dir` may be shared) is set aside as `metrics.1.jsonl` and so on. say: is told of a
    disk that is full.
    """

    def __init__(self, path: Path, iteration: int, run_id: str, say: Callable[[str], None] = say) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and any(
            row.get("run_id") != run_id for _, row in itertools.islice(read_lines_backwards(path, Problems()), 1)
        ):
            taken = (path.with_suffix(f".{i}.jsonl") for i in itertools.count(1))
            os.replace(path, next(name for name in taken if not name.exists()))
        if path.exists():
            backwards = read_lines_backwards(path, Problems())
            os.truncate(path, next((end for end, row in backwards if row["iteration"] <= iteration), 0))
        else:
            path.touch()
        self._file = LogFile(path, say)
        self._run_id = run_id

    def write(self, row: Mapping[str, Any]) -> None:
        self._file.write((to_json({**row, "run_id": self._run_id}) + "\n").encode())

    def close(self) -> None:
        self._file.close()
