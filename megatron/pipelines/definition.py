"""pipeline.yml: the stages of a pipeline, checked key by key."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from megatron.neox_arguments.addresses import without_secrets
from megatron.neox_arguments.errors import ErrorCollector
from megatron.neox_arguments.frozen import freeze
from megatron.neox_arguments.keys.declaration import REQUIRED, new_key
from megatron.neox_arguments.reading.declared_file import read_declared
from megatron.neox_arguments.validation.types import check_keys
from megatron.pipelines.errors import PipelineError

FILE = "pipeline.yml"
_NAME = re.compile(r"[a-z][a-z0-9_-]*")
OF_PIPELINE = (
    "save", "load", "iteration", "finetune", "log_dir", "lora", "eval_output_dir", "eval_results_prefix", "init_only",
)  # fmt: skip
"""Keys that the pipeline says: neither `evaluation` nor --set may."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_OF_KIND = {
    "data": {"kind", "sources", "commands", "inputs", "outputs", "slurm"},
    "init": {"kind", "configs", "slurm"},
    "train": {"kind", "configs", "starts_from", "merge_adapters", "evaluation", "slurm"},
}


@dataclass(frozen=True)
class Source:
    """One entry of `sources`: a file or folder that comes into data/raw from one of `path`, `url`, `hub`."""

    name: str = new_key(REQUIRED, "File, or folder of what comes from the hub, below data/raw")
    license: str = new_key(REQUIRED, "Under which the data may be used, as an SPDX name or in words")
    path: str | None = new_key(None, "A file or folder here; relative to pipeline.yml")
    url: str | None = new_key(None, "http, https or file address of one file; needs sha256")
    hub: str | None = new_key(None, "A dataset or model of the HuggingFace Hub, as ORG/NAME")
    hub_type: Literal["dataset", "model"] = new_key("dataset", "hub: what it is there")
    sha256: str | None = new_key(
        None, "What the file's SHA-256 is to be; of a folder: of the digests that sources.json notes"
    )
    revision: str | None = new_key(None, "hub: branch, tag or commit; unset: main, whose commit is noted")
    files: tuple[str, ...] | None = new_key(None, "hub: patterns of the files to take, as data/train-*; unset: all")

    @property
    def origin(self) -> str:
        """The place that the source comes from, as messages and the page show it."""
        if self.hub is not None:
            return f"hub {self.hub}" + (f" at {self.revision}" if self.revision else "")
        return without_secrets(self.url or self.path or "")


@dataclass(frozen=True)
class Stage:
    """One entry of `stages`. name: its key; it is not written inside."""

    name: str = ""
    kind: Literal["data", "init", "train"] = new_key(
        "train", "data: sources, then commands; init: weights from a seed; train: a run of train.py and its gate"
    )
    configs: tuple[str, ...] = new_key((), "Configuration files after the pipeline's; relative to pipeline.yml")
    starts_from: str | None = new_key(None, "train: the stage whose promoted weights are loaded; unset: as configs say")
    merge_adapters: bool = new_key(False, "train: the result is the weights with the adapters (`lora`) merged in")
    evaluation: Mapping[str, Any] | None = new_key(
        None, "train: keys of eval.py for the result, as {eval_tasks: [piqa], eval_limit: 200}; unset: no evaluation"
    )
    sources: tuple[Source, ...] = new_key((), "data: what comes into data/raw")
    commands: tuple[str, ...] = new_key((), "data: lines for bash in the pipeline's folder; $NEOX is the repository")
    inputs: tuple[str, ...] = new_key((), "data: further files that the commands read, whose change runs them again")
    outputs: tuple[str, ...] = new_key((), "data: files, folders or prefixes of .bin/.idx that the commands make")
    slurm: tuple[str, ...] = new_key((), "Options of sbatch for this stage, as --nodes=16")


@dataclass(frozen=True)
class PipelineKeys:
    """The keys of pipeline.yml itself."""

    stages: Mapping[str, Any] = new_key(REQUIRED, "Stages by name, in the order in which they run")
    configs: tuple[str, ...] = new_key((), "Configuration files of every stage that has a model")
    gates: str | None = new_key(None, "File of promotion gates; unset: no gates")
    title: str | None = new_key(None, "What the page and the table call it; unset: the name of the folder")


@dataclass(frozen=True)
class Pipeline:
    """A pipeline: file: its pipeline.yml; folder: where it works; configs, gates: absolute paths; stages: in
    order."""

    file: Path
    title: str
    configs: tuple[Path, ...]
    gates: Path | None
    stages: tuple[Stage, ...]

    @property
    def folder(self) -> Path:
        """Where all stages work and `checkpoints`, `data` and `logs` lie: that of pipeline.yml."""
        return self.file.parent

    def stage(self, name: str) -> Stage:
        """The stage of that name. Raises PipelineError with those there are."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise PipelineError(
            f"{name}: {self.file} has no such stage; there are {', '.join(s.name for s in self.stages)}"
        )

    def final(self, name: str) -> Path:
        """`checkpoints/<stage>_final`, which names the promoted weights of a stage."""
        return self.folder / "checkpoints" / f"{name}_final"

    def save(self, name: str) -> Path:
        """`checkpoints/<stage>`, where a stage's run saves."""
        return self.folder / "checkpoints" / name

    def config_files(self, stage: Stage) -> list[Path]:
        """The configuration files of a stage in the order in which they are merged."""
        return [*self.configs, *(self.folder / name for name in stage.configs)]


def find_pipeline(place: str | Path) -> Path:
    """The pipeline.yml that a folder or a file names. Raises PipelineError where there is none."""
    path = Path(place).expanduser()
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise PipelineError(
            f"{file}: no such pipeline; `deepy.py pipeline init {path if not path.suffix else path.parent}` writes one"
        )
    return file.absolute()


def read_pipeline(file: Path) -> Pipeline:
    """The pipeline that a file describes. Raises ConfigError, a line `FILE:LINE: key: what is wrong` for each
    mistake."""
    origins: dict[str, str] = {}
    problems = ErrorCollector(origins)
    raw = read_declared(file, origins, problems)
    values = check_keys(PipelineKeys, raw, problems)
    stages = [_stage(name, given, problems) for name, given in (values["stages"] or {}).items()]
    problems.raise_if_any()
    if not stages:
        problems.add("stages", "is empty; name at least one stage")
    _check(stages, problems)
    pipeline = Pipeline(
        file.absolute(), values["title"] or file.absolute().parent.name,
        tuple(file.absolute().parent / name for name in values["configs"]),
        file.absolute().parent / values["gates"] if values["gates"] else None, tuple(stages),
    )  # fmt: skip
    _check_files(pipeline, problems)
    problems.raise_if_any()
    return pipeline


def _stage(name: str, given: Any, problems: ErrorCollector) -> Stage:
    path = f"stages.{name}"
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name.endswith("_final"):
        problems.add(path, "is no name of a stage: small letters, digits, _ and -, and no _final at its end")
    if not isinstance(given, Mapping):
        problems.add(path, "expected a mapping, as {configs: [sft.yml], starts_from: pretrain}")
        return Stage(name=str(name))
    sources = given.get("sources") or ()
    values = check_keys(Stage, {key: value for key, value in given.items() if key != "sources"}, problems, f"{path}.")
    if not isinstance(sources, list | tuple) or not all(isinstance(source, Mapping) for source in sources):
        problems.add(
            f"{path}.sources", "expected a list of mappings, as [{name: a.jsonl, path: a.jsonl, license: MIT}]"
        )
        sources = ()
    values["sources"] = tuple(
        Source(**check_keys(Source, dict(source), problems, f"{path}.sources.{i}.")) for i, source in enumerate(sources)
    )
    for key in sorted(set(given) - _OF_KIND[values["kind"]]):
        if key in {item.name for item in fields(Stage)}:
            problems.add(f"{path}.{key}", f"says nothing in a stage of kind {values['kind']}; remove it, or set kind")
    return Stage(name=str(name), **{key: freeze(value) for key, value in values.items()})


def _check(stages: list[Stage], problems: ErrorCollector) -> None:
    before: list[Stage] = []
    for stage in stages:
        path = f"stages.{stage.name}"
        known = [one.name for one in before if one.kind != "data"]
        if stage.starts_from is not None and stage.starts_from not in known:
            earlier = f"those before it with weights: {', '.join(known) or 'none'}"
            problems.add(f"{path}.starts_from", f"{stage.starts_from} is no earlier stage; {earlier}")
        for key in stage.evaluation or {}:
            if key in OF_PIPELINE:
                problems.add(f"{path}.evaluation.{key}", "the pipeline says it; remove it")
        if stage.kind == "data" and not stage.outputs:
            problems.add(path, "a data stage says its outputs: by them it is known whether it is done")
        if stage.kind == "data" and not (stage.sources or stage.commands):
            problems.add(path, "has neither sources nor commands")
        names: set[str] = set()
        for i, source in enumerate(stage.sources):
            _check_source(f"{path}.sources.{i}", source, names, problems)
        before.append(stage)


def _check_source(path: str, source: Source, names: set[str], problems: ErrorCollector) -> None:
    given = [key for key in ("path", "url", "hub") if getattr(source, key) is not None]
    if len(given) != 1:
        problems.add(path, f"{source.name}: expected one of path, url and hub, got {' and '.join(given) or 'none'}")
    if source.name in names:
        problems.add(f"{path}.name", f"{source.name} is another source's name too")
    if source.name and (Path(source.name).is_absolute() or ".." in Path(source.name).parts):
        problems.add(f"{path}.name", f"{source.name}: expected a name below data/raw")
    names.add(source.name)
    if source.url is not None and source.sha256 is None:
        problems.add(f"{path}.sha256", f"{source.name}: an address needs the SHA-256 of what is to be there")
    if "@" in urlsplit(source.url or "").netloc:
        problems.add(f"{path}.url", f"{source.name}: no user or password is sent; remove it, or presign the address")
    if source.sha256 is not None and not _SHA256.fullmatch(source.sha256):
        problems.add(f"{path}.sha256", "expected 64 hexadecimal digits in small letters")
    for key in ("revision", "files"):
        if getattr(source, key) is not None and source.hub is None:
            problems.add(f"{path}.{key}", "says nothing without hub")


def _check_files(pipeline: Pipeline, problems: ErrorCollector) -> None:
    if pipeline.gates is not None and not pipeline.gates.is_file():
        problems.add("gates", f"{pipeline.gates}: no such file")
    for path in pipeline.configs:
        if not path.is_file():
            problems.add("configs", f"{path}: no such file")
    for stage in pipeline.stages:
        for name in stage.configs:
            if not (pipeline.folder / name).is_file():
                problems.add(f"stages.{stage.name}.configs", f"{pipeline.folder / name}: no such file")
        if stage.kind != "data" and not pipeline.config_files(stage):
            problems.add(f"stages.{stage.name}", "has no configuration: name files in configs")
