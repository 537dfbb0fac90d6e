"""The work on one stage, part by part: each is skipped where its result is there for the same inputs."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.data.files import write_json
from megatron.launch import install_root
from megatron.neox_arguments.errors import UserError
from megatron.operations.jobs.joblog import last_lines
from megatron.operations.run_folder import RunFolder
from megatron.pipelines.definition import Pipeline, Stage
from megatron.pipelines.digests import (
    changes,
    digest,
    file_digests,
    init_inputs,
    loaded_inputs,
    only_longer,
    run_inputs,
    weights_digest,
)
from megatron.pipelines.errors import PipelineError, StageFailed
from megatron.pipelines.gates import Gate
from megatron.pipelines.measurements import scores_of_results
from megatron.pipelines.options import Options, eval_words, parse_words, train_words
from megatron.pipelines.processes import Processes
from megatron.pipelines.promotion import promote, promoted_verdict, promoted_weights
from megatron.pipelines.sources import fetch_sources, pending_sources
from megatron.pipelines.state import DONE, FAILED, PROMOTED, REFUSED, RUNNING, STOPPED, State
from megatron.pipelines.verdicts import find_override, gates_of, has_moved, judge_stage, logs_of, requirements_digest
from megatron.process.run_files import STATUS

_REQUEUE = 124  # exit code of deepy.py in a job of Slurm: stopped, saved, not finished
_SHOWN = 15  # lines of the end of a log


@dataclass(frozen=True)
class StageWork:
    """What is needed to work on a stage of a pipeline."""

    pipeline: Pipeline
    stage: Stage
    options: Options
    gate: Gate | None
    state: State
    say: Callable[[str], None]

    # -- what it is made of ----------------------------------------------------------------------------------

    def inputs(self) -> dict[str, Any]:
        """All that the stage's result depends on. Raises PipelineError, ConfigError and DataError for what is
        not there."""
        stage, folder = self.stage, self.pipeline.folder
        if stage.kind == "data":
            given = file_digests(folder, stage.inputs)
            return {"commands": list(stage.commands), "outputs": list(stage.outputs), "inputs": given}
        args = parse_words(train_words(self.pipeline, stage, self.options))
        if stage.kind == "init":
            return init_inputs(args, folder)
        if stage.starts_from is None:
            made = run_inputs(args.check_training(), folder, None)
            made["starts_from"] = loaded_inputs(args, folder)
        else:
            self._check_earlier()
            start = promoted_weights(self.pipeline.final(stage.starts_from))
            if start is None:
                final = self.pipeline.final(stage.starts_from)
                raise PipelineError(f"starts from {final}, which is not there or not whole: run {stage.starts_from}")
            made = run_inputs(args.check_training(), folder, start)
        return {**made, "merge_adapters": True} if stage.merge_adapters else made

    def _check_earlier(self) -> None:
        """Raise PipelineError where what the stage is made of is being replaced: promoted weights of an
        earlier attempt are not taken in silence."""
        for stage in self.pipeline.stages:
            if stage.name == self.stage.name:
                return
            status = self.state[stage.name].status
            if status in (REFUSED, FAILED, RUNNING, STOPPED) and (
                stage.kind == "data" or stage.name == self.stage.starts_from
            ):
                raise PipelineError(f"{stage.name} comes before it and is {status}: `resume` finishes that first")

    def is_unchanged(self, inputs: Mapping[str, Any]) -> bool:
        """Whether the stage's result is there, made of the same inputs, and past its gate as it is now."""
        record, stage = self.state[self.stage.name], self.stage
        if stage.kind == "data":
            same = record.inputs == {**inputs, "sources": record.inputs.get("sources")}
            is_done = record.status == DONE and same and self._has_outputs()
            return is_done and not pending_sources(self.pipeline.folder, stage.sources)
        if record.inputs != inputs or not record.promoted:
            return False
        if record.weights.get("sha256") != record.promoted["sha256"]:
            return False
        if record.promoted["requirements"] != requirements_digest(self.gate):
            return False
        if has_moved(self.pipeline, promoted_verdict(self.pipeline.final(stage.name))):
            return False
        if stage.evaluation is not None and record.evaluation.get("id") != self._evaluation_id(
            record.promoted["sha256"]
        ):
            return False
        return bool(promoted_weights(self.pipeline.final(stage.name)) == record.promoted["sha256"])

    def reason_to_run(self, inputs: Mapping[str, Any]) -> str:
        """Why the stage is run, in words."""
        record = self.state[self.stage.name]
        if not record.inputs:
            return "not begun"
        known = {**record.inputs} if self.stage.kind != "data" else {k: record.inputs.get(k) for k in inputs}
        found = changes(known, inputs)
        found += [f"source {name}" for name in pending_sources(self.pipeline.folder, self.stage.sources)]
        if found:
            return "changed: " + ", ".join(found)
        return {
            REFUSED: "refused by its gate",
            FAILED: f"failed: {record.reason}",
            RUNNING: "interrupted",
            STOPPED: "stopped",
        }.get(record.status, "its gate, baseline, evaluation or result changed")

    def _has_outputs(self) -> bool:
        """Whether all files that the commands made are there as they made them; others may lie beside."""
        made = self.state[self.stage.name].outputs
        try:
            return bool(made) and file_digests(self.pipeline.folder, list(made)) == made
        except PipelineError:
            return False

    def _evaluation_id(self, sha256: str) -> str:
        return digest([sha256, dict(self.stage.evaluation or {})])

    # -- doing it --------------------------------------------------------------------------------------------

    def run(self, processes: Processes) -> None:
        """Do what is left to do. Raises StageFailed with the pipeline's exit code."""
        name, began = self.stage.name, time.time()
        before = self.state[name].seconds
        try:
            {"data": self._data, "init": self._init, "train": self._train}[self.stage.kind](processes)
        except StageFailed as problem:
            record = self.state[name]
            status = record.status if record.status == REFUSED else STOPPED if processes.stopped is not None else FAILED
            reason = str(problem).splitlines()[0].removeprefix(f"{name}: ")
            try:
                self.state.update(
                    name, status=status, reason=reason, ended=time.time(), seconds=before + time.time() - began
                )
            except PipelineError as full:  # often why the stage failed, which is told too
                self.say(f"error: {full}")
            raise
        self.state.update(name, reason="", ended=time.time(), seconds=before + time.time() - began)

    def _data(self, processes: Processes) -> None:
        stage, folder = self.stage, self.pipeline.folder
        sources = fetch_sources(folder, stage.sources, self.say)
        inputs = {**self.inputs(), "sources": sources}
        record = self.state[stage.name]
        if record.inputs != inputs:
            self.state.update(stage.name, inputs=inputs, commands=(), outputs={}, started=time.time())
        elif record.status == DONE and self._has_outputs():
            return self.say("unchanged, skipped")
        elif record.status == DONE:
            self.state.update(stage.name, commands=(), outputs={})  # files are gone or others
        self.state.update(stage.name, status=RUNNING)
        for number, command in enumerate(stage.commands):
            done, identity = self.state[stage.name].commands, digest([number, command])
            if identity not in done:
                self.say(command)
                self._command(processes, ["bash", "-e", "-o", "pipefail", "-c", command], is_shell=True)
                self.state.update(stage.name, commands=(*done, identity))
        try:
            outputs = file_digests(folder, stage.outputs)
        except PipelineError as problem:
            raise StageFailed(f"{stage.name}: its commands are done, but {problem}") from None
        self.state.update(stage.name, status=DONE, outputs=outputs)
        return None

    def _init(self, processes: Processes) -> None:
        self._begin(self.inputs())
        if not self.has_weights():
            words = train_words(self.pipeline, self.stage, self.options, "--init-only")
            self._deepy(processes, words)
            self._note_weights(self.pipeline.save(self.stage.name))
        self._promote(None)

    def _train(self, processes: Processes) -> None:
        stage, save = self.stage, self.pipeline.save(self.stage.name)
        self._begin(self.inputs())
        if not self.has_weights():
            self._deepy(processes, train_words(self.pipeline, stage, self.options))
            run = RunFolder(save, save / "logs")
            status = run.status()
            if status.get("status") != "finished":
                said = f"stopped at iteration {status.get('iteration')}; resume goes on"
                said = "; ".join([said, *run.problems.lines()])
                raise StageFailed(f"{stage.name}: {said}", processes.exit_code)
            if stage.merge_adapters:
                save = self._merge(processes)
            self._note_weights(save)
        if stage.evaluation is not None:
            self._evaluate(processes)
        elif self.state[stage.name].evaluation:
            self.state.update(stage.name, evaluation={})
        self.judge_and_promote()

    def _begin(self, inputs: Mapping[str, Any]) -> None:
        """Note what the stage is now made of. What an attempt with other inputs has left is kept under
        another name, unless this one is that attempt, trained on; an attempt with these inputs is taken
        back."""
        stage, record = self.stage, self.state[self.stage.name]
        save = self.pipeline.save(stage.name)
        if record.inputs == inputs:
            self.state.update(stage.name, status=RUNNING)
            return
        new: dict[str, Any] = {"inputs": inputs, "weights": {}, "evaluation": {}, "previous": {}}
        retired = list(record.retired)
        if record.previous.get("inputs") == inputs and self._is_whole(record.previous["weights"]):
            self.say(f"goes back to what it was: {', '.join(changes(record.inputs, inputs))}")
            new |= record.previous
        elif record.inputs and only_longer(record.inputs, inputs) and save.exists():
            self.say(f"goes on: {', '.join(changes(record.inputs, inputs))}")
            new["previous"] = {key: getattr(record, key) for key in ("inputs", "weights", "evaluation")}
        elif record.inputs:
            found = ", ".join(changes(record.inputs, inputs))
            again = next((one for one in retired if one["inputs"] == inputs and self._there(one)), None)
            if kept := self._retire(save):
                attempt = {key: getattr(record, key) for key in ("inputs", "weights", "evaluation")}
                retired.append({"folder": kept, **attempt})
            what_was = f"; what there was is {kept}" if kept else ""
            if again is None:
                self.say(f"begins anew: {found}{what_was}")
            else:
                retired.remove(again)
                os.replace(self.pipeline.folder / again["folder"], save)
                new |= {key: again[key] for key in ("inputs", "weights", "evaluation")}
                self.say(f"takes {again['folder']} back, which has these inputs: {found}{what_was}")
        elif (save / STATUS).exists() or (save / "latest").exists():
            raise StageFailed(f"{stage.name}: {save} holds a run that this pipeline has not begun; move it away")
        self.state.update(stage.name, status=RUNNING, retired=tuple(retired), started=time.time(), **new)

    def _there(self, attempt: Mapping[str, Any]) -> bool:
        return (self.pipeline.folder / attempt["folder"]).is_dir()

    def _retire(self, save: Path) -> str:
        """Give the folder of an earlier attempt another name; "" where there is none."""
        if not save.exists():
            return ""
        for number in range(1, 1_000_000):
            kept = save.with_name(f"{save.name}.{number}")
            if not kept.exists():
                os.replace(save, kept)
                return str(kept.relative_to(self.pipeline.folder))
        return ""

    def has_weights(self) -> bool:
        """Whether the result of the training is there as it was noted, in its folder or promoted."""
        noted = self.state[self.stage.name].weights
        if self._is_whole(noted):
            return True
        final = self.pipeline.final(self.stage.name)
        if noted and promoted_weights(final) == noted["sha256"]:
            promoted = final.resolve() / Path(noted["checkpoint"]).name
            shown = str(promoted.relative_to(self.pipeline.folder.resolve()))
            self.state.update(self.stage.name, weights={**noted, "checkpoint": shown})
            return True
        return False

    def _is_whole(self, noted: Mapping[str, str]) -> bool:
        """Whether a checkpoint is there with the digest that was noted."""
        checkpoint = self.pipeline.folder / noted.get("checkpoint", "-")
        try:
            return checkpoint.is_dir() and weights_digest(checkpoint) == noted["sha256"]
        except PipelineError:
            return False

    def _note_weights(self, save: Path) -> None:
        checkpoint = save / (save / "latest").read_text(encoding="utf-8").strip()
        shown = str(checkpoint.relative_to(self.pipeline.folder))
        self.state.update(self.stage.name, weights={"checkpoint": shown, "sha256": weights_digest(checkpoint)})

    def _merge(self, processes: Processes) -> Path:
        """The folder of the weights with the adapters merged in."""
        merged = self.pipeline.save(self.stage.name) / "merged"
        shutil.rmtree(merged, ignore_errors=True)
        self.say("merging the adapters")
        tool = [os.fspath(install_root() / "tools/ckpts/adapter.py"), "merge"]
        save = f"checkpoints/{self.stage.name}"
        self._python(processes, [*tool, "--adapter", save, "--output_dir", f"{save}/merged"])
        return merged

    def _evaluate(self, processes: Processes) -> None:
        stage, folder = self.stage, self.pipeline.folder
        weights = self.state[stage.name].weights
        identity = self._evaluation_id(weights["sha256"])
        results = folder / f"logs/{stage.name}_evaluation"
        scores = results / f"scores_{identity[:12]}.json"
        if self.state[stage.name].evaluation.get("id") == identity and scores.is_file():
            return
        self.say("evaluating")
        checkpoint = folder / weights["checkpoint"]
        prefix = identity[:12]
        self._deepy(processes, eval_words(self.pipeline, stage, self.options, checkpoint, prefix))
        files = sorted(results.glob(f"{prefix}_eval_results_*.json"), key=lambda file: file.stat().st_mtime_ns)
        if not files:
            raise StageFailed(f"{stage.name}: eval.py left no results in {results}")
        write_json(scores, scores_of_results(files[-1]))
        shown = str(scores.relative_to(folder))
        self.state.update(stage.name, evaluation={"id": identity, "scores": shown})

    def judge_and_promote(self) -> None:
        """Judge the result, and promote it where the gate passes or a person has overridden this verdict.
        Raises StageFailed with the gate's exit code."""
        stage, folder = self.stage, self.pipeline.folder
        self._say_of_an_edited_gate()
        if self.gate is None:
            self.say("no gate: promoted as it is")
            return self._promote(None)
        record = self.state[stage.name]
        verdict = judge_stage(self.pipeline, stage, self.gate, record)
        self.state.update(stage.name, verdict=verdict["file"])
        for line in verdict["lines"]:
            self.say(line)
        if verdict["result"] == "pass":
            return self._promote(verdict)
        override = find_override(folder, verdict)
        if override is not None:
            self.say(f"overridden by {override.by}: {override.reason}")
            return self._promote({**verdict, "override": {"by": override.by, "reason": override.reason}})
        self.state.update(stage.name, status=REFUSED)
        raise StageFailed(
            f"{stage.name}: gate {verdict['result']}; {verdict['file']} has every number; mend and `resume`, or "
            f"`override {stage.name} --reason ...`",
            verdict["exit_code"],
        )

    def _say_of_an_edited_gate(self) -> None:
        """A gate counts as it was when the pipeline began: it may be half written by now."""
        edited = f"warning: {self.pipeline.gates}: edited since this began; its gate is as it was then"
        try:
            if requirements_digest(gates_of(self.pipeline).get(self.stage.name)) != requirements_digest(self.gate):
                self.say(f"{edited}: the next `run` judges by the new one")
        except UserError as problem:
            self.say(f"{edited}, and the new one is refused: {str(problem).splitlines()[0]}")

    def _promote(self, verdict: Mapping[str, Any] | None) -> None:
        stage, folder, record = self.stage, self.pipeline.folder, self.state[self.stage.name]
        final = self.pipeline.final(stage.name)
        sha256 = record.weights["sha256"]
        said = verdict or {"stage": stage.name, "result": "no gate", "weights_sha256": sha256, "time": time.time()}
        number = Path(said.get("file", "-0")).stem.rpartition("-")[2]
        logs = logs_of(self.pipeline, stage, record)
        scores = folder / record.evaluation["scores"] if record.evaluation else None
        name = f"{stage.name}-{sha256[:12]}-{number}"
        promote(final, folder / record.weights["checkpoint"], name, said, logs, scores)
        promoted = {
            "sha256": sha256, "time": time.time(), "verdict": said.get("file"), "override": said.get("override"),
            "requirements": requirements_digest(self.gate),
        }  # fmt: skip
        self.state.update(stage.name, status=PROMOTED, promoted=promoted)
        self.say(f"promoted: {final.relative_to(folder)} is {record.weights['checkpoint']}")

    # -- commands --------------------------------------------------------------------------------------------

    @property
    def log(self) -> Path:
        """The log of all commands of the stage."""
        return self.pipeline.folder / "logs" / f"{self.stage.name}.log"

    def _deepy(self, processes: Processes, words: list[str]) -> None:
        self._python(processes, [os.fspath(install_root() / "deepy.py"), *words])

    def _python(self, processes: Processes, words: list[str]) -> None:
        self._command(processes, [sys.executable, *words])

    def _command(self, processes: Processes, command: list[str], is_shell: bool = False) -> None:
        code = processes.run(self.stage.name, command, self.log, self.say, with_children=is_shell)
        if code == _REQUEUE or (code and processes.stopped is not None):
            if is_shell and processes.stopped == signal.SIGUSR1:
                # Queued again it would begin from its beginning, for ever.
                raise StageFailed(f"{self.stage.name}: its time is over; give its command more (--time), then resume")
            raise StageFailed(f"{self.stage.name}: stopped; resume goes on", processes.exit_code)
        if code:
            lines = last_lines(self.log, _SHOWN)
            said = [line.strip() for line in lines if "error: " in line and "its output is above" not in line]
            reason = said[-1] if said else f"ended with code {code}"
            shown = "\n".join(f"  {line}" for line in lines)
            where = self.log.relative_to(self.pipeline.folder)
            raise StageFailed(f"{self.stage.name}: {reason}\nended with code {code}; the end of {where}:\n{shown}")
