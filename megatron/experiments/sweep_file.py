"""Reads sweep.yml, and turns it into cells (rows of the table) and links (the runs of a cell, in order)."""

import contextlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.launch import install_root
from megatron.neox_arguments.errors import ErrorCollector
from megatron.neox_arguments.keys.declaration import new_key
from megatron.neox_arguments.reading.declared_file import read_declared
from megatron.neox_arguments.reading.presets import files_of
from megatron.neox_arguments.validation.types import check_keys
from megatron.neox_arguments.values.local_paths import with_home
from megatron.operations.run_folder import RunFolder
from megatron.pipelines.definition import PIPELINE_KEYS, Pipeline, Stage, find_pipeline, read_pipeline
from megatron.pipelines.digests import digest
from megatron.pipelines.gates import read_gates

OWN_KEYS = ("save", "log_dir")
"""Configuration keys that the sweep sets itself; in a chain, those of pipelines too."""
_LONGEST_NAME = 100
_UNSAFE = re.compile(r"[^A-Za-z0-9.+-]+")
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


@dataclass(frozen=True)
class SweepFields:
    """The keys of sweep.yml."""

    base: tuple[str, ...] = new_key((), "Configuration files or presets of every run; relative to sweep.yml")
    pipeline: str | None = new_key(None, "Instead of base: folder or file of a pipeline, whose stages each cell runs")
    grid: Mapping[str, Any] | None = new_key(None, "Lists of values by configuration key: a run for each combination")
    runs: tuple[Any, ...] = new_key(
        (), "Mappings of configuration keys, each with a `name` if you like: a run for each"
    )
    save_root: str | None = new_key(None, "Folder of the sweep; relative to sweep.yml; unset: its name without .yml")
    parallel: int = new_key(1, "Runs at a time on this machine; they share its GPUs equally", ge=1)
    retry: int = new_key(0, "Further starts of a run that failed, within one command", ge=0)
    min_free: float | None = new_key(
        None, "GiB that must stay free: a run starts only if its checkpoints fit besides; unset: not checked", ge=0
    )
    compare_code: bool = new_key(True, "Train a run again if the code changed since; false: keep it")
    slurm: tuple[str, ...] = new_key((), "Options of sbatch for every job of `submit`, such as --time=2:00:00")
    gpu: str | None = new_key(None, "GPU by whose speed `submit` and --dry-run estimate GPU hours, as in deepy.py plan")
    gpus: int = new_key(1, "gpu: GPUs of a run", ge=1)
    price: float | None = new_key(None, "gpu: price of a GPU for an hour", gt=0)


@dataclass(frozen=True)
class Link:
    """One run of train.py: of a cell, or shared by cells that agree up to this stage of their chain.

    settings: overridden configuration keys. origins: where sweep.yml sets each.
    parent: the link that must have finished before; None: none. stage: of the pipeline; None without one.
    """

    name: str
    folder: Path
    settings: Mapping[str, Any]
    origins: Mapping[str, str]
    parent: "Link | None" = None
    stage: Stage | None = None

    @property
    def output(self) -> RunFolder:
        """The folders in which the run saves and logs."""
        if self.stage is None:
            return RunFolder(self.folder / "checkpoints", self.folder / "logs")
        save = self.folder / "checkpoints" / self.stage.name
        return RunFolder(save, save / "logs")

    @property
    def pairs(self) -> list[str]:
        """The settings as KEY=VALUE for --set; JSON is YAML."""
        return [f"{key}={json.dumps(value)}" for key, value in self.settings.items()]


@dataclass(frozen=True)
class Cell:
    """One row of the table. values: what differs between cells, by column. links: its runs, the last one has
    its result."""

    name: str
    values: Mapping[str, Any]
    links: tuple[Link, ...]


@dataclass(frozen=True)
class Sweep:
    """A sweep, as declared by its file. file, root: absolute paths."""

    file: Path
    root: Path
    keys: SweepFields
    configs: tuple[str, ...]
    pipeline: Pipeline | None
    cells: tuple[Cell, ...]

    @property
    def links(self) -> list[Link]:
        """All runs, each once, parents first."""
        return list({link.name: link for cell in self.cells for link in cell.links}.values())

    @property
    def columns(self) -> list[str]:
        """The names of the differing keys, in the order of sweep.yml."""
        return list(dict.fromkeys(key for cell in self.cells for key in cell.values))


def read_sweep(place: str | Path) -> Sweep:
    """Reads and checks a sweep.yml. Raises ConfigError with a line `FILE:LINE: key: problem` per mistake.

    The configurations of the runs are not checked here."""
    file = with_home(place).absolute()
    origins: dict[str, str] = {}
    problems = ErrorCollector(origins)
    raw = read_declared(file, origins, problems)
    keys = SweepFields(**check_keys(SweepFields, raw, problems))
    problems.raise_if_any()
    if bool(keys.base) == (keys.pipeline is not None):
        problems.add("base", "expected exactly one of base and pipeline; list configuration files, or name a pipeline")
    if not keys.grid and not keys.runs:
        problems.add("grid", "is missing, and so is runs; write what differs, such as grid: {seed: [1, 2]}")
    if keys.price is not None and keys.gpu is None:
        problems.add("price", "has no effect without gpu; name the GPU, or remove price")
    variants = list(_variants(keys, problems))
    problems.raise_if_any()
    root = file.parent / with_home(keys.save_root) if keys.save_root else file.with_suffix("")
    if root.is_file():
        problems.add("save_root", f"{root}: is a file; name a folder")
    pipeline = read_pipeline(find_pipeline(file.parent / with_home(keys.pipeline))) if keys.pipeline else None
    cells = _cells(root, variants, pipeline, origins, problems)
    base = tuple(_base_files(file.parent, keys.base, problems))
    problems.raise_if_any()
    return Sweep(file, root, keys, base, pipeline, cells)


def _base_files(folder: Path, names: Sequence[str], problems: ErrorCollector) -> Iterator[str]:
    """Yields the paths of configuration files, which may be presets."""
    with contextlib.chdir(folder):
        paths, _ = files_of([str(with_home(name)) for name in names], preset_root=install_root())
    for i, path in enumerate(paths):
        if not (folder / path).is_file():
            problems.add(f"base.{i}", f"{folder / path}: no such file, and no preset has this name")
        yield str(folder / path)


@dataclass(frozen=True)
class _Variant:
    """The settings of one cell, each with the dotted place in sweep.yml where it is set."""

    name: str | None
    settings: Mapping[str, Any]
    places: Mapping[str, str]


def _variants(keys: SweepFields, problems: ErrorCollector) -> Iterator[_Variant]:
    """Yields every run of `runs` with every combination of `grid`."""
    grid = keys.grid or {}
    for key, values in grid.items():
        if not isinstance(values, list | tuple) or not values:
            problems.add(f"grid.{key}", "expected a list of values, such as [1, 2]")
            return
    for key in grid:
        for section in grid:
            if key.startswith(f"{section}."):
                problems.add(f"grid.{key}", f"is a part of {section}, which is in the grid too; keep one of them")
    for i, run in enumerate(keys.runs or ({},)):
        if not isinstance(run, Mapping):
            problems.add(f"runs.{i}", "expected a mapping of configuration keys, such as {name: wide, hidden_size: 64}")
            return
        run_settings = {key: value for key, value in run.items() if key != "name"}
        name = run.get("name")
        if name is not None and not (isinstance(name, str) and _RUN_NAME.fullmatch(name)):
            problems.add(f"runs.{i}.name", "expected a text of letters, digits, and . _ + - after the first of them")
        elif name is not None and (name.startswith("sweep.") or name.endswith(".json")):
            problems.add(f"runs.{i}.name", f"{name} may be a file of the sweep; choose another name")
        for key in run_settings.keys() & grid.keys():
            problems.add(f"runs.{i}.{key}", "is also in grid; keep one of them")
        for combination in itertools.product(*grid.values()):
            places = {key: f"runs.{i}.{key}" for key in run_settings} | {key: f"grid.{key}" for key in grid}
            settings = {**run_settings, **dict(zip(grid, combination, strict=True))}
            yield _Variant(name, settings, places)


def _cells(
    root: Path, variants: Sequence[_Variant], pipeline: Pipeline | None, origins: Mapping[str, str],
    problems: ErrorCollector,
) -> tuple[Cell, ...]:  # fmt: skip
    stages = [] if pipeline is None else [stage for stage in pipeline.stages if stage.kind != "data"]
    if pipeline is not None:
        _check_chain(pipeline, stages, problems)
    columns = _short_names(list(dict.fromkeys(key for variant in variants for key in variant.settings)))
    has_names = any(variant.name is not None for variant in variants)
    links: dict[str, Link] = {}  # by the digest of all settings that it and its parents have
    cells: dict[str, Cell] = {}
    for variant in variants:
        for key, place in variant.places.items():
            if _without_stage(key, stages) in (OWN_KEYS if pipeline is None else PIPELINE_KEYS):
                problems.add(place, "the sweep sets this key itself; remove it")
        values = {"run": variant.name} if has_names else {}
        values |= {column: variant.settings[key] for key, column in columns.items() if key in variant.settings}
        name = _name(variant, list(variant.settings), columns) or variant.name or "base"
        if name in cells:
            problems.add(next(iter(variant.places.values()), "runs"), f"two runs are {name}; remove one of them")
        chain: list[Link] = []
        steps: Sequence[Stage | None] = stages or [None]
        for stage in steps:
            chain_keys = [key for key in variant.settings if _is_of(key, stages, stages[: len(chain) + 1])]
            settings = {
                _without_stage(key, stages): variant.settings[key] for key in chain_keys if _applies(key, stage, stages)
            }
            places = {_without_stage(key, stages): origins.get(variant.places[key], "") for key in chain_keys}
            link_name = name if stage is None else f"{stage.name}_{_name(variant, chain_keys, columns)}".rstrip("_")
            link = Link(link_name, root / link_name, settings, places, chain[-1] if chain else None, stage)
            identity = digest([stage.name if stage else None, {key: variant.settings[key] for key in chain_keys}])
            chain.append(links.setdefault(identity, link))
        cells[name] = Cell(name, values, tuple(chain))
    return tuple(cells.values())


def _check_chain(pipeline: Pipeline, stages: Sequence[Stage], problems: ErrorCollector) -> None:
    if not any(stage.kind == "train" for stage in stages):
        problems.add("pipeline", f"{pipeline.file}: has no training stage")
    gates = {} if pipeline.gates is None else read_gates(pipeline.gates, [s.name for s in stages if s.kind == "train"])
    for gate in gates.values():
        if gate.baseline is not None:
            problems.add(
                "pipeline", f"{pipeline.gates}: {gate.stage}.baseline: a sweep compares cells, not stages; remove it"
            )


def _stage_of(key: str, stages: Sequence[Stage]) -> str | None:
    stage = key.partition(".")[0]
    return stage if stage in [known_stage.name for known_stage in stages] else None


def _is_of(key: str, stages: Sequence[Stage], begun_stages: Sequence[Stage]) -> bool:
    """Whether a key has an effect in one of `begun_stages`. A key without a stage has an effect in all."""
    stage = _stage_of(key, stages)
    return stage is None or stage in [begun_stage.name for begun_stage in begun_stages]


def _applies(key: str, stage: Stage | None, stages: Sequence[Stage]) -> bool:
    return stage is None or _stage_of(key, stages) in (None, stage.name)


def _without_stage(key: str, stages: Sequence[Stage]) -> str:
    return key.partition(".")[2] if _stage_of(key, stages) else key


def _short_names(keys: Sequence[str]) -> dict[str, str]:
    """Returns the shortest ends of dotted keys that differ from each other, by key."""
    names = {}
    for key in keys:
        parts = key.split(".")
        ends = [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]
        names[key] = next(
            end
            for end in ends
            if end == key or not any(_ends(other_key, end) for other_key in keys if other_key != key)
        )
    return names


def _ends(key: str, end: str) -> bool:
    return key == end or key.endswith(f".{end}")


def _name(variant: _Variant, keys: Sequence[str], columns: Mapping[str, str]) -> str:
    """Returns a readable folder name from these keys of a run; a named run's own keys are left out."""
    shown_keys = [key for key in keys if variant.name is None or not variant.places[key].startswith("runs.")]
    values = {key: variant.settings[key] for key in shown_keys}
    words = [f"{columns[key]}-{_UNSAFE.sub('-', _text(value)).strip('-')}" for key, value in values.items()]
    is_named = variant.name is not None and len(shown_keys) < len(keys)
    name = "_".join([*([str(variant.name)] if is_named else []), *words])
    is_exact = all(_UNSAFE.sub("-", _text(value)) == _text(value) for value in values.values())
    if is_exact and len(name) <= _LONGEST_NAME:
        return name
    return f"{name[: _LONGEST_NAME - 9]}-{digest(values)[:8]}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
