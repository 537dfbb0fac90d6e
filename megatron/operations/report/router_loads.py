"""How busy the experts of a run were, from `router_load.jsonl`, and how it becomes a picture: fewer lines,
and a byte a load."""

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
PAGE_CELLS = 1_500_000  # of all maps of a page, if more than FEWEST columns are left; one takes 4/3 bytes
OCTAVES = 3  # colours reach from 2**-3 to 2**3
CODES = 254  # of loads that are not 0, which has code 0


@dataclass(frozen=True)
class RouterLoad:
    """The load of experts over a run. layers: NeoX's indices; iterations: `[lines]`; load: `[lines, layers,
    experts]`, 1 is the mean of a layer's experts."""

    layers: tuple[int, ...]
    iterations: NDArray[np.int64]
    load: NDArray[np.float32]


@dataclass(frozen=True)
class LoadMap:
    """A picture of each layer of a run. run: its place in the list of runs. first, step: iterations of the
    columns; codes: `[layers, experts, columns]` uint8, of `encode`; lines: before they were thinned; idle:
    `[layers]`, experts without a token in the last line."""

    run: int
    layers: tuple[int, ...]
    first: float
    step: float
    codes: NDArray[np.uint8]
    lines: int
    idle: tuple[int, ...]


def read_load(logs: Path, problems: Problems) -> RouterLoad | None:
    """The load in a run's log folder; None where there is none. Lines that do not fit the last one's layers
    and experts are passed over; those that hold no load are noted too."""
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, NDArray[np.float32]]]] = {}
    last = None
    path = logs / LOAD_FILE
    for _, row in read_lines(path, problems) if path.is_file() else ():
        try:
            layers, load = tuple(list_of(count)(row["layers"])), np.asarray(row["load"], np.float32)
        except (KeyError, TypeError, ValueError, OverflowError, Unfit) as problem:
            problems.note(path, "", f"a line holds no load ({type(problem).__name__}: {problem}); passed over")
            continue
        if load.ndim == 2 and load.size and len(layers) == len(load) and np.isfinite(load).all() and load.min() >= 0:
            last = layers, load.shape
            found.setdefault(last, []).append((row["iteration"], load))
        else:
            problems.note(path, "load", "no finite numbers by layer and expert; passed over")
    if last is None:
        return None
    lines = dict(found[last])  # of each iteration the last
    iterations = np.array(sorted(lines))
    return RouterLoad(last[0], iterations, np.stack([lines[iteration] for iteration in sorted(lines)]))


def maps_of(loads: Sequence[RouterLoad | None]) -> list[LoadMap]:
    """The maps of a page, one of each run that has logged its load."""
    cells = sum(load.load[0].size for load in loads if load is not None)
    columns = min(COLUMNS, max(FEWEST, PAGE_CELLS // max(cells, 1)))
    return [_map(run, load, columns) for run, load in enumerate(loads) if load is not None]


def encode(load: NDArray[np.float32]) -> NDArray[np.uint8]:
    """0 for 0, else 1 to CODES in equal steps of the logarithm, from 2**-OCTAVES and below to 2**OCTAVES and
    above."""
    position = (np.log2(np.maximum(load, 1e-9)) + OCTAVES) / (2 * OCTAVES)
    code = 1 + np.rint(np.clip(position, 0, 1) * (CODES - 1))
    return np.where(load > 0, code, 0).astype(np.uint8)


def code_of(load: float) -> float:
    """The place of a load among the codes."""
    return 1 + (np.log2(load) + OCTAVES) / (2 * OCTAVES) * (CODES - 1)


def _map(run: int, load: RouterLoad, columns: int) -> LoadMap:
    """Columns of equal width; each shows the newest line until its iteration."""
    iterations = load.iterations
    first, last, lines = int(iterations[0]), int(iterations[-1]), len(iterations)
    narrowest = min((b - a for a, b in itertools.pairwise(iterations.tolist())), default=1)
    columns = min(columns, (last - first) // narrowest + 1)
    step = (last - first) / (columns - 1) if columns > 1 else float(narrowest)
    at = first + step * np.arange(columns)
    chosen = np.searchsorted(iterations, at + 1e-6 * step, side="right") - 1
    idle = tuple((load.load[-1] == 0).sum(1).tolist())
    codes = np.ascontiguousarray(encode(load.load[chosen]).transpose(1, 2, 0))
    return LoadMap(run, load.layers, first, step, codes, lines, idle)
