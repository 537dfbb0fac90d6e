"""Reads the load of experts from `router_load.jsonl`, and reduces it to small images with one byte per load.

The load of an expert is its number of tokens, divided by the mean over the experts of its layer."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.process.metrics_file import LOAD_FILE, read_lines
from megatron.process.run_files import Problems, Unfit, count, list_of

COLUMNS = 400  # most columns of a map
FEWEST = 20  # columns that each map may have even if the page then has more than PAGE_CELLS
PAGE_CELLS = 1_500_000  # most cells of all maps of a page together; a cell takes 4/3 bytes
OCTAVES = 3  # colours stand for loads from 2**-3 to 2**3
CODES = 254  # number of codes for loads above 0; load 0 has code 0


@dataclass(frozen=True)
class RouterLoad:
    """The load of experts in the logged steps of a run.

    layers: layer numbers, as in the names of checkpoint files.
    iterations: `[lines]`, iteration of each logged step.
    load: `[lines, layers, experts]`, tokens of an expert divided by the mean of its layer's experts.
    """

    layers: tuple[int, ...]
    iterations: NDArray[np.int64]
    load: NDArray[np.float32]


@dataclass(frozen=True)
class LoadMap:
    """The load of experts in a run as images, one per layer.

    run: index in the list of runs.
    first_iteration, step: iteration of the first column, and iterations from one column to the next.
    codes: `[layers, experts, columns]` uint8, loads as `encode` returns them.
    lines: number of logged steps.
    idle: `[layers]`, number of experts without a token in the last logged step.
    """

    run: int
    layers: tuple[int, ...]
    first_iteration: float
    step: float
    codes: NDArray[np.uint8]
    lines: int
    idle: tuple[int, ...]


def read_load(logs: Path, problems: Problems) -> RouterLoad | None:
    """Returns the load of experts in router_load.jsonl in a run's log folder; None if there is none.

    Lines with other layers or another number of experts than the last line are ignored. So are unusable
    lines, with a message in `problems`."""
    loads_by_shape: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, NDArray[np.float32]]]] = {}
    last_shape = None
    path = logs / LOAD_FILE
    for _, row in read_lines(path, problems) if path.is_file() else ():
        try:
            layers, load = tuple(list_of(count)(row["layers"])), np.asarray(row["load"], np.float32)
        except (KeyError, TypeError, ValueError, OverflowError, Unfit) as problem:
            problems.note(
                path, "", f"a line has no usable layers and load ({type(problem).__name__}: {problem}); skipped"
            )
            continue
        if load.ndim == 2 and load.size and len(layers) == len(load) and np.isfinite(load).all() and load.min() >= 0:
            last_shape = layers, load.shape
            loads_by_shape.setdefault(last_shape, []).append((row["iteration"], load))
        else:
            problems.note(path, "load", "is not a list of finite numbers for each layer; line skipped")
    if last_shape is None:
        return None
    lines = dict(loads_by_shape[last_shape])  # the last line of each iteration
    iterations = np.array(sorted(lines))
    return RouterLoad(last_shape[0], iterations, np.stack([lines[iteration] for iteration in sorted(lines)]))


def maps_of(loads: Sequence[RouterLoad | None]) -> list[LoadMap]:
    """Returns the maps of a report, one for each run that has a load of experts."""
    cells = sum(load.load[0].size for load in loads if load is not None)
    columns = min(COLUMNS, max(FEWEST, PAGE_CELLS // max(cells, 1)))
    return [_map(run, load, columns) for run, load in enumerate(loads) if load is not None]


def encode(load: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Encodes loads as bytes. Load 0 gets code 0, other loads codes 1 to CODES in proportion to their
    logarithm.

    Code 1 is for 2**-OCTAVES and below, CODES for 2**OCTAVES and above."""
    position = (np.log2(np.maximum(load, 1e-9)) + OCTAVES) / (2 * OCTAVES)
    code = 1 + np.rint(np.clip(position, 0, 1) * (CODES - 1))
    return np.where(load > 0, code, 0).astype(np.uint8)


def code_of(load: float) -> float:
    """Returns the code of a load as `encode` computes it, but before rounding and clipping."""
    return 1 + (np.log2(load) + OCTAVES) / (2 * OCTAVES) * (CODES - 1)


def _map(run: int, load: RouterLoad, columns: int) -> LoadMap:
    """Returns the map of one run, with `columns` evenly spaced columns at most.

    A column shows the newest load that was logged up to its iteration. run: index in the list of runs."""
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
