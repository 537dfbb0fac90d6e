"""Does the work of one run of a sweep: skips, resumes or starts it, and records what came of it."""

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from megatron.data.files import replace_text, sha256, write_json
from megatron.experiments.errors import RunError
from megatron.experiments.storage import checkpoint_bytes, refuse_without_space
from megatron.experiments.sweep_file import Link, Sweep
from megatron.launch import install_root
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.errors import ErrorCollector, UserError
from megatron.neox_arguments.frozen import thaw
from megatron.neox_arguments.neox_args import load_assignments
from megatron.neox_arguments.reading.declared_file import read_declared
from megatron.pipelines.definition import FILE, Pipeline, read_pipeline
from megatron.pipelines.digests import changes, digest, loaded_inputs, numbered, run_inputs
from megatron.pipelines.errors import GATE_FAILED, METRIC_MISSING, STOPPED, StageFailed
from megatron.pipelines.gate_verdicts import gates_of
from megatron.pipelines.options import Options, parse_words, train_words
from megatron.pipelines.processes import Processes
from megatron.pipelines.stage_work import StageWork
from megatron.pipelines.state import PROMOTED, STATE, State, is_locked, locked
from megatron.process.run_files import read_object

RECORD, LOG, LOCK = "sweep_run.json", "output.log", "run"
WAITING, RUNNING, STOPPED_, FAILED, REFUSED, FINISHED = "waiting", "running", "stopped", "failed", "refused", "finished"
_ERROR = re.compile(r"\berror: |^[\w.]*(?:Error|Exception)\b")
_NOT_TRAINING = ("experiments", "finetuning", "operations", "pages", "pipelines", "planning")  # they start or show runs
_RESULTS = ("checkpoints", "logs", STATE)  # what a run leaves in its folder


@dataclass(frozen=True)
class LinkRecord:
    """The content of sweep_run.json.

    inputs: everything that the result depends on, by name. starts: how often the run was started.
    bytes: estimated size of its checkpoints; 0: not estimated. reason: why it failed or stopped.
    """

    status: str = WAITING
    inputs: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    starts: int = 0
    reason: str = ""
    bytes: int = 0
    start_time: float | None = None
    end_time: float | None = None


def read_record(link: Link) -> LinkRecord:
    """Returns the record of a run, as it was written last. Raises RunError if it cannot be read."""
    path = link.folder / RECORD
    if not path.is_file():
        return LinkRecord()
    try:
        return LinkRecord(**read_object(path))
    except (OSError, ValueError, TypeError) as problem:
        raise RunError(f"{path}: cannot be read ({problem}); remove the file, and the run goes on") from None


def state_of(link: Link) -> str:
    """Returns the state of a run in a word; a run that is recorded as running, but is not, is interrupted."""
    status = read_record(link).status
    return "interrupted" if status == RUNNING and not is_locked(link.folder, LOCK) else status


@cache
def code_digest() -> str:
    """Returns a SHA-256 of the code that trains: train.py, and the packages that training imports."""
    root = install_root()
    folders = [path for path in (root / "megatron").iterdir() if path.is_dir() and path.name not in _NOT_TRAINING]
    files = [root / "train.py", *sorted(file for folder in folders for file in folder.rglob("*.py"))]
    return digest({str(file.relative_to(root)): sha256(file) for file in files})


@dataclass(frozen=True)
class LinkWork:
    """The work of one run.

    cwd: folder to which relative paths in configurations refer. say: called with each line to print."""

    sweep: Sweep
    link: Link
    cwd: Path
    say: Callable[[str], None]

    # -- what the run is -------------------------------------------------------------------------------------

    def args(self) -> NeoXArgs:
        """Returns the run's configuration. Raises ConfigError, with places in sweep.yml."""
        if self.sweep.pipeline is not None:
            with self._in_folder() as pipeline:
                return parse_words(train_words(pipeline, pipeline.stages[0], self._options()))
        with contextlib.chdir(self.cwd):
            return load_assignments(self.sweep.configs, self._assignments())

    def _assignments(self) -> list[tuple[str, Any, str]]:
        """Returns (key, value, place) of everything that is set over the base."""
        link, output = self.link, self.link.output
        settings = [(key, value, link.origins.get(key, str(self.sweep.file))) for key, value in link.settings.items()]
        base = load_assignments(self.sweep.configs, settings)
        own_settings: dict[str, Any] = {"save": str(output.save), "log_dir": str(output.logs)}
        if "load" not in link.settings and base.load is not None and base.load == base.save:
            own_settings["load"] = None  # this makes the base resume; a run of the sweep resumes from its save
        if base.tensorboard_dir is not None:
            own_settings["tensorboard_dir"] = str(link.folder / "tensorboard")
        if base.use_wandb:
            own_settings["wandb_run_name"] = link.name
        return [*settings, *((key, value, str(self.sweep.file)) for key, value in own_settings.items())]

    def _options(self) -> Options:
        return Options(settings=tuple(self.link.pairs))

    @contextlib.contextmanager
    def _in_folder(self) -> Iterator[Pipeline]:
        """Writes the pipeline of one stage into the run's folder, and works there within the block."""
        self._write_pipeline()
        with contextlib.chdir(self.link.folder):
            yield read_pipeline(self.link.folder / FILE)

    def _write_pipeline(self) -> None:
        """Writes the pipeline of this stage alone. It starts from the weights of the run that has the stage
        before it. Files of the pipeline's folder are linked, so that relative paths lead to them."""
        link, full_pipeline, stage = self.link, self.sweep.pipeline, self.link.stage
        assert full_pipeline is not None and stage is not None
        link.folder.mkdir(parents=True, exist_ok=True)
        for entry in full_pipeline.folder.iterdir():
            place = link.folder / entry.name
            is_ours = entry.name.startswith(".") or entry.name in (*_RESULTS, FILE, "pipeline.html", "overrides.jsonl")
            if not is_ours and not place.is_symlink() and not place.exists() and entry != self.sweep.root:
                with contextlib.suppress(FileExistsError):  # another process prepares the folder too
                    place.symlink_to(entry)
        configs = [str(path) for path in full_pipeline.config_files(stage)]
        if stage.starts_from is not None:
            start = self._start_of(stage.starts_from)
            weights = {"load": str(start.folder / "checkpoints" / f"{stage.starts_from}_final"), "finetune": True}
            replace_text(link.folder / "starts_from.yml", yaml.safe_dump(weights))
            configs.append("starts_from.yml")
        declared: dict[str, Any] = {"kind": stage.kind, "configs": configs}
        if stage.kind == "train":
            evaluation = thaw(stage.evaluation) if stage.evaluation is not None else None
            declared |= {"merge_adapters": stage.merge_adapters, "evaluation": evaluation}
        content: dict[str, Any] = {"title": link.name, "stages": {stage.name: declared}}
        if stage.name in gates_of(full_pipeline):
            gates = read_declared(full_pipeline.gates, {}, ErrorCollector({}))  # type: ignore[arg-type]
            replace_text(link.folder / "gate.yml", yaml.safe_dump({stage.name: gates[stage.name]}))
            content["gates"] = "gate.yml"
        replace_text(link.folder / FILE, yaml.safe_dump(content, sort_keys=False))

    def _start_of(self, stage: str) -> Link:
        """Returns the run of an earlier stage of the chain."""
        link = self.link.parent
        while link is not None and (link.stage is None or link.stage.name != stage):
            link = link.parent
        assert link is not None  # read_pipeline has checked starts_from
        return link

    def inputs(self) -> dict[str, Any]:
        """Returns everything that the result depends on: configuration, data, initial weights and code."""
        code = {"code": code_digest()}
        if self.sweep.pipeline is not None:
            with self._in_folder() as pipeline:
                return {**self._stage_work(pipeline).inputs(), **code}
        args = self.args().check_training()
        with contextlib.chdir(self.cwd):
            inputs = run_inputs(args, self.link.folder, None)
            return {**inputs, "starts_from": loaded_inputs(args, self.cwd), **code}

    def _stage_work(self, pipeline: Pipeline) -> StageWork:
        stage = pipeline.stages[0]
        return StageWork(
            pipeline, stage, self._options(), gates_of(pipeline).get(stage.name), State(pipeline.folder), self.say
        )

    def is_done(self) -> bool:
        """Returns whether the run has finished with the present configuration, data and code."""
        record = read_record(self.link)
        if record.status != FINISHED:
            return False
        inputs = self.inputs()
        if self._differences(record, inputs):
            return False
        if self.sweep.pipeline is not None:
            with self._in_folder() as pipeline:
                work = self._stage_work(pipeline)
                return work.is_unchanged(work.inputs())
        return self._has_finished()

    def _has_finished(self) -> bool:
        """Whether the run has come to its end, also if a signal came in its last moments."""
        if self.link.stage is not None:
            return State(self.link.folder)[self.link.stage.name].status == PROMOTED
        return self.link.output.status().get("status") == "finished"

    def _differences(self, record: LinkRecord, inputs: Mapping[str, Any]) -> list[str]:
        """Returns what has changed since the run was started, as texts."""
        if self.sweep.keys.compare_code:
            return changes(record.inputs, inputs)
        return changes(_without_code(record.inputs), _without_code(inputs))

    # -- doing it --------------------------------------------------------------------------------------------

    def do(self, launcher: str | None = None) -> int:
        """Trains the run to its end, unless it has finished. Returns the exit code.

        Raises RunError if another process does it, or its folder holds what it cannot go on with.
        """
        self.link.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.link.folder, self.say, LOCK) as lock:
            if self.is_done():
                self.say("finished earlier, skipped")
                return 0
            if self.link.parent is not None and not replace(self, link=self.link.parent).is_done():
                raise RunError(f"{self.link.name}: needs {self.link.parent.name}, which has not finished; run it first")
            try:
                self._begin()
            except UserError as problem:
                for line in str(problem).splitlines():
                    self.say(f"error: {line}")
                self._note(status=FAILED, reason=str(problem).splitlines()[0], end_time=time.time())
                return 1
            processes = Processes(self.cwd, lock, lambda: None)
            with processes.signals_passed_on():
                return self._train(processes, launcher)

    def _begin(self) -> None:
        """Puts results of other inputs aside, checks the free space, and records the start."""
        link, record, inputs = self.link, read_record(self.link), self.inputs()
        has_results = link.output.status() or (link.folder / STATE).exists()
        if not record.inputs and has_results:
            raise RunError(f"{link.folder}: holds a run that this sweep did not start; move it away")
        differences = self._differences(record, inputs) if record.inputs else []
        # In a chain, the pipeline in the folder moves results of other settings, but not those of other code.
        if differences and (link.stage is None or "code" in differences):
            self._move_results(differences)
            record = LinkRecord()
        size = checkpoint_bytes(self.args(), self.folder()) if self.sweep.keys.min_free is not None else 0
        self._note(
            status=RUNNING, inputs=inputs, settings=dict(link.settings), starts=record.starts + 1, reason="",
            bytes=size, start_time=time.time(), end_time=None,
        )  # fmt: skip
        if self.sweep.keys.min_free is not None:
            # Recorded before it is checked, so that runs that start together count each other.
            running = [run for run in self.sweep.links if state_of(run) == RUNNING]
            sizes = [(run.folder, read_record(run).bytes) for run in running]
            refuse_without_space(link.name, self.sweep.root, sizes, self.sweep.keys.min_free)
        self.say("starts" if not record.starts else "goes on")

    def folder(self) -> Path:
        """The folder to which relative paths in the run's configuration refer."""
        return self.cwd if self.link.stage is None else self.link.folder

    def _move_results(self, differences: list[str]) -> None:
        moved = []
        for name in _RESULTS:
            path = self.link.folder / name
            if path.exists():
                target = numbered(path)
                os.replace(path, target)
                moved.append(target.name)
        note = f"; the earlier results are now in {', '.join(moved)}" if moved else ""
        self.say(f"starts anew: {', '.join(differences)}{note}")

    def _note(self, **changed: Any) -> None:
        write_json(self.link.folder / RECORD, asdict(replace(read_record(self.link), **changed)))

    def _train(self, processes: Processes, launcher: str | None) -> int:
        log = self.link.folder / LOG
        deepy = [sys.executable, os.fspath(install_root() / "deepy.py")]
        flags = ["--launcher", launcher] if launcher is not None else []
        if self.sweep.pipeline is not None:
            settings = ["--set", *self.link.pairs] if self.link.pairs else []
            words = [*deepy, "pipeline", "run", str(self.link.folder), *flags, *settings]
        else:
            pairs = [f"{key}={json.dumps(value)}" for key, value, _ in self._assignments()]
            words = [*deepy, *flags, str(install_root() / "train.py"), *self.sweep.configs, "--set", *pairs]
        start = log.stat().st_size if log.is_file() else 0
        try:
            code = processes.run(self.link.name, words, log, self.say)
        except StageFailed as problem:
            self._note(status=STOPPED_, reason=str(problem).splitlines()[0], end_time=time.time())
            return problem.code
        if code == 0 and self._has_finished():
            self._note(status=FINISHED, reason="", end_time=time.time())
            self.say("finished")
            return 0
        if code in (0, STOPPED) or processes.stopped is not None:
            self._note(status=STOPPED_, reason="", end_time=time.time())
            self.say("stopped; the same command goes on")
            return processes.exit_code
        reason = first_error(log, start) or f"ended with code {code}"
        status = REFUSED if code in (GATE_FAILED, METRIC_MISSING) and self.sweep.pipeline is not None else FAILED
        self._note(status=status, reason=reason, end_time=time.time())
        self.say(f"{status}: {reason}; log: {log}")
        return code if status == REFUSED else 1


def _without_code(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if name != "code"}


def first_error(log: Path, start: int) -> str:
    """Returns the first line of a log after its byte `start` that tells of an error; "" if none does."""
    with log.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").splitlines()
    return next(
        (line.strip()[:300] for line in lines if _ERROR.search(line.strip()) and not line.startswith("====")), ""
    )
