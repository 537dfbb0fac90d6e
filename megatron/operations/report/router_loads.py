"""Reads the load of experts from `router_load.jsonl`, and reduces it to images: fewer lines, one byte per
load."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.process.metrics_file import LOAD_FILE, read_lines
from megatron.process.run_files import Problems, Unfit, count, list_of

COLUMNS = 400  # of a map at most
FEWEST = 20
PAGE_CELLS = 1_500_000  # of all maps of a page, unless that leaves fewer than FEWEST columns; a cell takes 4/3 bytes
OCTAVES = 3  # colours reach from 2**-3 to 2**3
CODES = 254  # number of codes for loads above 0; load 0 has code 0


@dataclass(frozen=True)
class RouterLoad:
    """The load of experts over a run.

    layers: NeoX's layer indices.
    iterations: `[lines]`.
    load: `[lines, layers, experts]`, relative to the mean of the layer's experts.
    """

    layers: tuple[int, ...]
    iterations: NDArray[np.int64]
    load: NDArray[np.float32]


@dataclass(frozen=True)
class LoadMap:
    """One image for each layer of a run.

    run: index in the list of runs.
    first_iteration, step: iterations of the columns.
    codes: `[layers, experts, columns]` uint8, as `encode` returns them.
    lines: number of lines before thinning.
    idle: `[layers]`, number of experts without a token in the last line.
    """

    run: int
    layers: tuple[int, ...]
    first_iteration: float
    step: float
    codes: NDArray[np.uint8]
    lines: int
    idle: tuple[int, ...]


def read_load(logs: Path, problems: Problems) -> RouterLoad | None:
    """The load in a run's log folder; None if there is none. Lines whose layers or experts differ from the
    last line's are ignored. Lines without a load are also noted in `problems`."""
    loads_by_shape: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, NDArray[np.float32]]]] = {}
    last_shape = None
    path = logs / LOAD_FILE
    for _, row in read_lines(path, problems) if path.is_file() else ():
        try:
            layers, load = tuple(list_of(count)(row["layers"])), np.asarray(row["load"], np.float32)
        except (KeyError, TypeError, ValueError, OverflowError, Unfit) as problem:
            problems.note(path, "", f"a line holds no load ({type(problem).__name__}: {problem}); skipped")
            continue
        if load.ndim == 2 and load.size and len(layers) == len(load) and np.isfinite(load).all() and load.min() >= 0:
            last_shape = layers, load.shape
            loads_by_shape.setdefault(last_shape, []).append((row["iteration"], load))
        else:
            problems.note(path, "load", "no finite numbers by layer and expert; skipped")
    if last_shape is None:
        return None
    lines = dict(loads_by_shape[last_shape])  # of each iteration the last
    iterations = np.array(sorted(lines))
    return RouterLoad(last_shape[0], iterations, np.stack([lines[iteration] for iteration in sorted(lines)]))


def maps_of(loads: Sequence[RouterLoad | None]) -> list[LoadMap]:
    """The maps of a page, one for each run that logged its load."""
    cells = sum(load.load[0].size for load in loads if load is not None)
    columns = min(COLUMNS, max(FEWEST, PAGE_CELLS // max(cells, 1)))
    return [_map(run, load, columns) for run, load in enumerate(loads) if load is not None]


def encode(load: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Encodes loads as bytes: 0 for 0, else 1 to CODES in equal steps of the logarithm. Code 1 is for
    2**-OCTAVES and below, CODES for 2**OCTAVES and above."""
    position = (np.log2(np.maximum(load, 1e-9)) + OCTAVES) / (2 * OCTAVES)
    code = 1 + np.rint(np.clip(position, 0, 1) * (CODES - 1))
    return np.where(load > 0, code, 0).astype(np.uint8)


def code_of(load: float) -> float:
    """Returns the colour code of a load before rounding (see `encode`)."""
    return 1 + (np.log2(load) + OCTAVES) / (2 * OCTAVES) * (CODES - 1)


def _map(run: int, load: RouterLoad, columns: int) -> LoadMap:
    """Returns a map with equally spaced columns; each shows the newest load logged up to its iteration."""
    iterations = load.iterations
    first_iteration, last_iteration, lines = int(iterations[0]), int(iterations[-1]), len(iterations)
    narrowest = min((b - a for a, b in itertools.pairwise(iterations.tolist())), default=1)
    columns = min(columns, (last_iteration - first_iteration) // narrowest + 1)
    step = (last_iteration - first_iteration) / (columns - 1) if columns > 1 else float(narrowest)
    column_iterations = first_iteration + step * np.arange(columns)
    chosen = np.searchsorted(iterations, column_iterations + 1e-6 * step, side="right") - 1
    idle = tuple((load.load[-1] == 0).sum(1).tolist())
    codes = np.ascontiguousarray(encode(load.load[chosen]).transpose(1, 2, 0))
    return LoadMap(run, load.layers, first_iteration, step, codes, lines, idle)
