"""Reads and checks pipeline.yml, the file that declares the stages of a pipeline."""

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
from megatron.neox_arguments.values.local_paths import with_home
from megatron.pipelines.errors import PipelineError

FILE = "pipeline.yml"
_NAME = re.compile(r"[a-z][a-z0-9_-]*")
PIPELINE_KEYS = (
    "save", "load", "iteration", "finetune", "log_dir", "lora", "eval_output_dir", "eval_results_prefix", "init_only",
)  # fmt: skip
"""Configuration keys that the pipeline sets itself. Neither `evaluation` nor --set may set them."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_KEYS_BY_KIND = {
    "data": {"kind", "sources", "commands", "inputs", "outputs", "slurm"},
    "init": {"kind", "configs", "slurm"},
    "train": {"kind", "configs", "starts_from", "merge_adapters", "evaluation", "slurm"},
}


@dataclass(frozen=True)
class Source:
    """One entry of `sources` in pipeline.yml: a file or folder to fetch into data/raw.

    Exactly one of `path`, `url` and `hub` says where it comes from."""

    name: str = new_key(REQUIRED, "Name of the file below data/raw; with hub: name of the folder for its files")
    license: str = new_key(REQUIRED, "License of the data, as an SPDX name or in words")
    path: str | None = new_key(None, "A local file or folder; relative to pipeline.yml")
    url: str | None = new_key(None, "URL (http, https or file) of one file; needs sha256")
    hub: str | None = new_key(None, "A dataset or model on the HuggingFace Hub, as ORG/NAME")
    hub_type: Literal["dataset", "model"] = new_key("dataset", "hub: the kind of repository")
    sha256: str | None = new_key(
        None, "Expected SHA-256 of the file; for a folder: the sha256 that sources.json has for it"
    )
    revision: str | None = new_key(None, "hub: branch, tag or commit; unset: main, with its commit recorded")
    files: tuple[str, ...] | None = new_key(
        None, "hub: patterns of the files to download, such as data/train-*; unset: all"
    )

    @property
    def origin(self) -> str:
        """The place that the source comes from, as text for messages and the page; secrets in a URL are
        removed."""
        if self.hub is not None:
            return f"hub {self.hub}" + (f" at {self.revision}" if self.revision else "")
        return without_secrets(self.url or self.path or "")


@dataclass(frozen=True)
class Stage:
    """One entry of `stages` in pipeline.yml: a stage of the pipeline. name: the key of the entry."""

    name: str = ""
    kind: Literal["data", "init", "train"] = new_key(
        "train",
        "data: fetches sources, then runs commands; init: writes random weights; train: a run of train.py with a gate",
    )
    configs: tuple[str, ...] = new_key(
        (), "Configuration files, merged after those of the pipeline; relative to pipeline.yml"
    )
    starts_from: str | None = new_key(
        None, "train: start from the promoted weights of this stage; unset: from `load` in configs"
    )
    merge_adapters: bool = new_key(False, "train: merge the trained adapters (`lora`) into the weights of the result")
    evaluation: Mapping[str, Any] | None = new_key(
        None,
        "train: keys of eval.py to evaluate the result, such as {eval_tasks: [piqa], eval_limit: 200}; unset: no "
        "evaluation",
    )
    sources: tuple[Source, ...] = new_key((), "data: files and folders to fetch into data/raw")
    commands: tuple[str, ...] = new_key(
        (), "data: bash command lines to run in the pipeline's folder; $NEOX is the repository"
    )
    inputs: tuple[str, ...] = new_key((), "data: files that commands read; if one changes, the commands run again")
    outputs: tuple[str, ...] = new_key((), "data: files, folders or .bin/.idx prefixes that the commands write")
    slurm: tuple[str, ...] = new_key((), "Options of sbatch for this stage, such as --nodes=16")


@dataclass(frozen=True)
class PipelineKeys:
    """The top-level keys of pipeline.yml."""

    stages: Mapping[str, Any] = new_key(REQUIRED, "Stages by name, in the order in which they run")
    configs: tuple[str, ...] = new_key((), "Configuration files of every stage of kind init or train")
    gates: str | None = new_key(None, "File of promotion gates; unset: no gates")
    title: str | None = new_key(None, "Title of pipeline.html and of the table of stages; unset: name of the folder")


@dataclass(frozen=True)
class Pipeline:
    """A pipeline, as declared by its pipeline.yml.

    file: absolute path of pipeline.yml.
    configs, gates: absolute paths of the configuration files for all stages, and of the gates file.
    stages: in the order in which they run.
    """

    file: Path
    title: str
    configs: tuple[Path, ...]
    gates: Path | None
    stages: tuple[Stage, ...]

    @property
    def folder(self) -> Path:
        """The folder of pipeline.yml, in which all stages run; it contains `checkpoints`, `data` and
        `logs`."""
        return self.file.parent

    def stage(self, name: str) -> Stage:
        """Returns the stage with this name. Raises PipelineError, with the names of all stages, if there is
        none."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise PipelineError(
            f"{name}: {self.file} has no such stage; its stages are {', '.join(s.name for s in self.stages)}"
        )

    def final(self, name: str) -> Path:
        """Returns the path `checkpoints/<name>_final`, a link to the promoted weights of the stage `name`."""
        return self.folder / "checkpoints" / f"{name}_final"

    def save(self, name: str) -> Path:
        """Returns the folder in which the run of the stage `name` saves: `checkpoints/<name>`."""
        return self.folder / "checkpoints" / name

    def config_files(self, stage: Stage) -> list[Path]:
        """Returns the configuration files of a stage in the order in which they are merged."""
        return [*self.configs, *(self.folder / name for name in stage.configs)]


def find_pipeline(place: str | Path) -> Path:
    """Returns the absolute path of a pipeline's file: `place` itself, or pipeline.yml in the folder `place`.

    Raises PipelineError if the file does not exist.
    """
    path = with_home(place)
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise PipelineError(
            f"{file}: no such file; to create a pipeline, type: deepy.py pipeline init "
            f"{path if not path.suffix else path.parent}"
        )
    return file.absolute()


def read_pipeline(file: Path) -> Pipeline:
    """Reads and checks a pipeline.yml. Raises ConfigError with a line `FILE:LINE: key: problem` per
    mistake."""
    origins: dict[str, str] = {}
    problems = ErrorCollector(origins)
    raw = read_declared(file, origins, problems)
    values = check_keys(PipelineKeys, raw, problems)
    stages = [_stage(name, raw_stage, problems) for name, raw_stage in (values["stages"] or {}).items()]
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


def _stage(name: str, raw_stage: Any, problems: ErrorCollector) -> Stage:
    path = f"stages.{name}"
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name.endswith("_final"):
        problems.add(
            path,
            "invalid stage name: use lower-case letters, digits, _ and -, begin with a letter, do not end with _final",
        )
    if not isinstance(raw_stage, Mapping):
        problems.add(path, "expected a mapping, such as {configs: [sft.yml], starts_from: pretrain}")
        return Stage(name=str(name))
    sources = raw_stage.get("sources") or ()
    without_sources = {key: value for key, value in raw_stage.items() if key != "sources"}
    values = check_keys(Stage, without_sources, problems, f"{path}.")
    if not isinstance(sources, list | tuple) or not all(isinstance(source, Mapping) for source in sources):
        problems.add(
            f"{path}.sources", "expected a list of mappings, such as [{name: a.jsonl, path: a.jsonl, license: MIT}]"
        )
        sources = ()
    values["sources"] = tuple(
        Source(**check_keys(Source, dict(source), problems, f"{path}.sources.{i}.")) for i, source in enumerate(sources)
    )
    for key in sorted(set(raw_stage) - _KEYS_BY_KIND[values["kind"]]):
        if key in {item.name for item in fields(Stage)}:
            problems.add(
                f"{path}.{key}", f"has no effect in a stage of kind {values['kind']}; remove it, or set another kind"
            )
    return Stage(name=str(name), **{key: freeze(value) for key, value in values.items()})


def _check(stages: list[Stage], problems: ErrorCollector) -> None:
    previous_stages: list[Stage] = []
    for stage in stages:
        path = f"stages.{stage.name}"
        start_names = [previous.name for previous in previous_stages if previous.kind != "data"]
        if stage.starts_from is not None and stage.starts_from not in start_names:
            fix = f"write one of: {', '.join(start_names)}" if start_names else "remove it, as there is none"
            problems.add(f"{path}.starts_from", f"{stage.starts_from} is not an earlier stage with weights; {fix}")
        for key in stage.evaluation or {}:
            if key in PIPELINE_KEYS:
                problems.add(f"{path}.evaluation.{key}", "the pipeline sets this key itself; remove it")
        if stage.kind == "data" and not stage.outputs:
            problems.add(path, "has no outputs; list the files that its commands write, which show whether it is done")
        if stage.kind == "data" and not (stage.sources or stage.commands):
            problems.add(path, "has neither sources nor commands; add at least one of them")
        names: set[str] = set()
        for i, source in enumerate(stage.sources):
            _check_source(f"{path}.sources.{i}", source, names, problems)
        previous_stages.append(stage)


def _check_source(path: str, source: Source, names: set[str], problems: ErrorCollector) -> None:
    origin_keys = [key for key in ("path", "url", "hub") if getattr(source, key) is not None]
    if len(origin_keys) != 1:
        present = " and ".join(origin_keys) or "none"
        problems.add(path, f"{source.name}: expected exactly one of path, url and hub, got {present}")
    if source.name in names:
        problems.add(f"{path}.name", f"{source.name} is another source's name too; choose a different name")
    if source.name and (Path(source.name).is_absolute() or ".." in Path(source.name).parts):
        problems.add(f"{path}.name", f"{source.name}: expected a path below data/raw, neither absolute nor with ..")
    names.add(source.name)
    if source.url is not None and source.sha256 is None:
        problems.add(f"{path}.sha256", f"{source.name}: with url, set sha256 to the SHA-256 of the file at that URL")
    if "@" in urlsplit(source.url or "").netloc:
        problems.add(
            f"{path}.url", f"{source.name}: a user or password in a URL is not sent; remove it, or use a presigned URL"
        )
    if source.sha256 is not None and not _SHA256.fullmatch(source.sha256):
        problems.add(f"{path}.sha256", "expected 64 hexadecimal digits in lower case")
    for key in ("revision", "files"):
        if getattr(source, key) is not None and source.hub is None:
            problems.add(f"{path}.{key}", "has no effect without hub; remove it, or set hub")


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
            problems.add(f"stages.{stage.name}", "has no configuration file; list files in configs")
