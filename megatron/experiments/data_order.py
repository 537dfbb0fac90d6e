"""Writes the order in which a run reads its data to a file: for each sample its step, documents and offsets.

`order.npy` has a record for each part of a document, which numpy maps without reading the file; `order.json`
beside it names the sources. `order.jsonl` has a line for each sample.
"""

import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy

from megatron.data.files import sync, temporary, write_json
from megatron.experiments.errors import RunError
from megatron.experiments.run import Run
from megatron.experiments.run_data import RunData
from megatron.process import look_for_stop
from megatron.process.progress import ProgressBar

RECORD = np.dtype(
    [("step", "<i4"), ("row", "<i4"), ("source", "<i4"), ("document", "<i8"), ("offset", "<i8"), ("place", "<i4"),
     ("tokens", "<i4")]
)  # fmt: skip
"""A part of a document in a row of a step: `tokens` tokens of it from `offset` on, at `place` in the row."""
Part = tuple[int, int, int, int, int]
"""(source, document, offset, place, tokens) of a part of a document in a row."""
_RECORDS = 1 << 16  # written at once


def write_order(run: Run, output: Path, last: int | None, bar: ProgressBar) -> tuple[int, int]:
    """Writes the data order of a run's steps up to `last`; returns the first and the last step.

    A branch's steps begin after those of its parent. output: a `.npy` or `.jsonl` file, which appears when it
    is complete. last: None: the run's planned end. Raises RunError for other files or steps.
    """
    if output.suffix not in (".npy", ".jsonl"):
        raise RunError(f"--output {output}: expected a name that ends in .npy or .jsonl; give one")
    last = run.spans[-1].last if last is None else last
    run.span_of(last)  # raises if there is no such step
    start = run.spans[0].start
    data = run.data(last)
    rows = _rows(data, last, bar)
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = temporary(output)
    try:
        with open(unfinished, "wb") as file:
            if output.suffix == ".npy":
                _write_npy(file, rows)
            else:
                for step, row, pieces in rows:
                    file.write((json.dumps(_line(data, step, row, pieces)) + "\n").encode())
        sync(unfinished)
        if output.suffix == ".npy":
            facts = {"run": str(run.path), "first_step": start, "last_step": last, "seq_length": data.args.seq_length}
            write_json(output.with_suffix(".json"), {**facts, "sources": list(data.sources)})
        os.replace(unfinished, output)
    finally:
        unfinished.unlink(missing_ok=True)
    return start, last


def _rows(data: RunData, last: int, bar: ProgressBar) -> Iterator[tuple[int, int, list[Part]]]:
    """Yields (step, row, its parts) of each sample."""
    for span in data.run.spans:
        for step in range(span.start, min(span.last, last) + 1):
            look_for_stop()
            length = data.length(step)
            for row, sample in enumerate(span.samples(step)):
                parts = [(p.source, p.document, p.offset, p.place, p.count) for p in data.pieces(sample, length)]
                yield step, row, parts
            bar.advance_to(step)


def _write_npy(file: BinaryIO, rows: Iterator[tuple[int, int, list[Part]]]) -> None:
    def header(count: int) -> None:
        file.seek(0)
        npy.write_array_header_1_0(
            file, {"descr": npy.dtype_to_descr(RECORD), "fortran_order": False, "shape": (count,)}
        )  # padded by numpy, so that it has the same length for any count

    header(0)
    start, count = file.tell(), 0
    records = ((step, row, *part) for step, row, parts in rows for part in parts)
    while block := list(islice(records, _RECORDS)):
        file.write(np.array(block, RECORD).tobytes())
        count += len(block)
    header(count)
    assert file.tell() == start


def _line(data: RunData, step: int, row: int, parts: list[Part]) -> dict[str, Any]:
    pieces = [
        {"source": data.sources[source], "document": document, "offset": offset, "place": place, "tokens": tokens}
        for source, document, offset, place, tokens in parts
    ]
    return {"step": step, "row": row, "pieces": pieces}
