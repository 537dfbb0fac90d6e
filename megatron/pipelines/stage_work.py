"""Does the work of one stage in steps (train, evaluate, judge, promote); skips steps whose result exists."""

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
    numbered,
    only_longer,
    run_inputs,
    weights_digest,
)
from megatron.pipelines.errors import PipelineError, StageFailed
from megatron.pipelines.gate_verdicts import (
    find_override,
    gates_of,
    has_moved,
    judge_stage,
    logs_of,
    requirements_digest,
)
from megatron.pipelines.gates import Gate
from megatron.pipelines.measurements import scores_of_results
from megatron.pipelines.options import Options, eval_words, parse_words, train_words
from megatron.pipelines.processes import Processes
from megatron.pipelines.promotion import promote, promoted_verdict, promoted_weights
from megatron.pipelines.sources import fetch_sources, pending_sources
from megatron.pipelines.state import DONE, FAILED, PROMOTED, REFUSED, RUNNING, STOPPED, State
from megatron.process.run_files import STATUS

_REQUEUE = 124  # exit code of deepy.py in a Slurm job that was stopped and has saved, but is not finished
_ATTEMPT = ("inputs", "weights", "evaluation")  # fields of a record that are restored with an earlier attempt
_TAIL_LINES = 15  # lines at the end of a log that are shown if a command fails


@dataclass(frozen=True)
class StageWork:
    """Runs one stage of a pipeline.

    options: command-line options for the stage.
    gate: the stage's gate; None: no gate.
    state: records of all stages; updated while the stage runs.
    say: called with each line to print.
    """

    pipeline: Pipeline
    stage: Stage
    options: Options
    gate: Gate | None
    state: State
    say: Callable[[str], None]

    # -- inputs, and whether they changed
    # ------------------------------------------------------------------------

    def inputs(self) -> dict[str, Any]:
        """Returns everything that the stage's result depends on, by name.

        For example configuration keys, and digests of data and initial weights. Raises PipelineError,
        ConfigError or DataError if something is missing.
        """
        stage, folder = self.stage, self.pipeline.folder
        if stage.kind == "data":
            digests = file_digests(folder, stage.inputs)
            return {"commands": list(stage.commands), "outputs": list(stage.outputs), "inputs": digests}
        args = parse_words(train_words(self.pipeline, stage, self.options))
        if stage.kind == "init":
            return init_inputs(args, folder)
        if stage.starts_from is None:
            result = run_inputs(args.check_training(), folder, None)
            result["starts_from"] = loaded_inputs(args, folder)
        else:
            self._check_earlier()
            start = promoted_weights(self.pipeline.final(stage.starts_from))
            if start is None:
                final = self.pipeline.final(stage.starts_from)
                raise PipelineError(
                    f"starts_from: {final} is missing or incomplete; run the stage {stage.starts_from} first"
                )
            result = run_inputs(args.check_training(), folder, start)
        return {**result, "merge_adapters": True} if stage.merge_adapters else result

    def _check_earlier(self) -> None:
        """Raises PipelineError if a stage that this stage needs is running, stopped, failed or refused.

        Without this check, this stage would start from the outdated weights of an earlier attempt.
        """
        for stage in self.pipeline.stages:
            if stage.name == self.stage.name:
                return
            status = self.state[stage.name].status
            is_needed = stage.kind == "data" or stage.name == self.stage.starts_from
            if is_needed and status in (REFUSED, FAILED, RUNNING, STOPPED):
                raise PipelineError(
                    f"needs the stage {stage.name}, which is {status}; run `resume` to finish that stage"
                )

    def is_unchanged(self, inputs: Mapping[str, Any]) -> bool:
        """Returns whether the stage can be skipped: it has a result from the same inputs, judged by the same
        gate."""
        record, stage = self.state[self.stage.name], self.stage
        if stage.kind == "data":
            is_same = record.inputs == {**inputs, "sources": record.inputs.get("sources")}
            is_done = record.status == DONE and is_same and self._has_outputs()
            return is_done and not pending_sources(self.pipeline.folder, stage.sources)
        if record.inputs != inputs or not record.promoted:
            return False
        final, sha256 = self.pipeline.final(stage.name), record.promoted["sha256"]
        return bool(
            record.weights.get("sha256") == sha256
            and record.promoted["requirements"] == requirements_digest(self.gate)
            and not has_moved(self.pipeline, promoted_verdict(final))
            and (stage.evaluation is None or record.evaluation.get("id") == self._evaluation_id(sha256))
            and promoted_weights(final) == sha256
        )

    def reason_to_run(self, inputs: Mapping[str, Any]) -> str:
        """Returns as text why the stage has to run, such as `not begun` or `changed: seed 1 -> 2`."""
        record = self.state[self.stage.name]
        if not record.inputs:
            return "not begun"
        previous = {**record.inputs} if self.stage.kind != "data" else {k: record.inputs.get(k) for k in inputs}
        differences = changes(previous, inputs)
        differences += [f"source {name}" for name in pending_sources(self.pipeline.folder, self.stage.sources)]
        if differences:
            return "changed: " + ", ".join(differences)
        return {
            REFUSED: "refused by its gate", FAILED: f"failed: {record.reason}", RUNNING: "interrupted",
            STOPPED: "stopped",
        }.get(record.status, "its gate, baseline, evaluation or result changed")  # fmt: skip

    def _has_outputs(self) -> bool:
        """Returns whether all recorded output files of this data stage exist unchanged; added files are
        ignored."""
        digests = self.state[self.stage.name].outputs
        try:
            return bool(digests) and file_digests(self.pipeline.folder, list(digests)) == digests
        except PipelineError:
            return False

    def _evaluation_id(self, sha256: str) -> str:
        return digest([sha256, dict(self.stage.evaluation or {})])

    # -- the steps
    # -----------------------------------------------------------------------------------------------

    def run(self, processes: Processes) -> None:
        """Does the remaining work of the stage, and records its status in pipeline_state.json.

        Raises StageFailed, with the exit code for the pipeline, if the stage fails, is stopped or is refused.
        """
        name, start = self.stage.name, time.time()
        seconds_before = self.state[name].seconds
        try:
            {"data": self._data, "init": self._init, "train": self._train}[self.stage.kind](processes)
        except StageFailed as problem:
            record = self.state[name]
            status = record.status if record.status == REFUSED else STOPPED if processes.stopped is not None else FAILED
            reason = str(problem).splitlines()[0].removeprefix(f"{name}: ")
            try:
                self.state.update(
                    name, status=status, reason=reason, ended=time.time(), seconds=seconds_before + time.time() - start
                )
            except PipelineError as full:  # the disk is full, which is often why the stage failed; raised below
                self.say(f"error: {full}")
            raise
        self.state.update(name, reason="", ended=time.time(), seconds=seconds_before + time.time() - start)

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
            self.state.update(stage.name, commands=(), outputs={})  # output files are missing or changed
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
            raise StageFailed(f"{stage.name}: its commands succeeded, but {problem}") from None
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
                reason = f"stopped at iteration {status.get('iteration')}; run `resume` to continue"
                reason = "; ".join([reason, *run.problems.lines()])
                raise StageFailed(f"{stage.name}: {reason}", processes.exit_code)
            if stage.merge_adapters:
                save = self._merge(processes)
            self._note_weights(save)
        if stage.evaluation is not None:
            self._evaluate(processes)
        elif self.state[stage.name].evaluation:
            self.state.update(stage.name, evaluation={})
        self.judge_and_promote()

    def _begin(self, inputs: Mapping[str, Any]) -> None:
        """Records the inputs of this attempt, and prepares the stage's folder in `checkpoints` for it.

        With the inputs of the last attempt, or if only the training is longer, the run in the folder
        continues. Otherwise the folder is renamed and listed in the record's `retired`. If a retired attempt
        had the same inputs, its folder is renamed back and used.
        """
        stage, record = self.stage, self.state[self.stage.name]
        save = self.pipeline.save(stage.name)
        if record.inputs == inputs:
            self.state.update(stage.name, status=RUNNING)
            return
        new: dict[str, Any] = {"inputs": inputs, "weights": {}, "evaluation": {}, "previous": {}}
        retired = list(record.retired)
        if record.previous.get("inputs") == inputs and self._is_complete(record.previous["weights"]):
            self.say(f"uses the earlier, shorter run again: {', '.join(changes(record.inputs, inputs))}")
            new |= record.previous
        elif record.inputs and only_longer(record.inputs, inputs) and save.exists():
            self.say(f"continues the run for longer: {', '.join(changes(record.inputs, inputs))}")
            new["previous"] = {key: getattr(record, key) for key in _ATTEMPT}
        elif record.inputs:
            differences = ", ".join(changes(record.inputs, inputs))
            matches = (entry for entry in retired if entry["inputs"] == inputs)
            match = next((entry for entry in matches if (self.pipeline.folder / entry["folder"]).is_dir()), None)
            if old_folder := self._retire(save):
                retired.append({"folder": old_folder, **{key: getattr(record, key) for key in _ATTEMPT}})
            note = f"; the earlier attempt is now in {old_folder}" if old_folder else ""
            if match is None:
                self.say(f"starts anew: {differences}{note}")
            else:
                retired.remove(match)
                os.replace(self.pipeline.folder / match["folder"], save)
                new |= {key: match[key] for key in _ATTEMPT}
                self.say(f"uses {match['folder']} again, an earlier attempt with the same inputs: {differences}{note}")
        elif (save / STATUS).exists() or (save / "latest").exists():
            raise StageFailed(f"{stage.name}: {save} holds a run that this pipeline did not start; move it away")
        self.state.update(stage.name, status=RUNNING, retired=tuple(retired), started=time.time(), **new)

    def _retire(self, save: Path) -> str:
        """Renames the folder of an attempt to NAME.N, N from 1 on. Returns the new path; "" without a
        folder."""
        if not save.exists():
            return ""
        target = numbered(save)
        os.replace(save, target)
        return str(target.relative_to(self.pipeline.folder))

    def has_weights(self) -> bool:
        """Returns whether the recorded weights exist completely, in the stage's folder or as promoted copy.

        If only the promoted copy is left, changes the record to point to the copy.
        """
        noted = self.state[self.stage.name].weights
        if self._is_complete(noted):
            return True
        final = self.pipeline.final(self.stage.name)
        if noted and promoted_weights(final) == noted["sha256"]:
            promoted = final.resolve() / Path(noted["checkpoint"]).name
            relative = str(promoted.relative_to(self.pipeline.folder.resolve()))
            self.state.update(self.stage.name, weights={**noted, "checkpoint": relative})
            return True
        return False

    def _is_complete(self, noted: Mapping[str, str]) -> bool:
        """Returns whether a recorded checkpoint exists and has the recorded digest. noted:
        `StageRecord.weights`."""
        checkpoint = self.pipeline.folder / noted.get("checkpoint", "-")
        try:
            return checkpoint.is_dir() and weights_digest(checkpoint) == noted["sha256"]
        except PipelineError:
            return False

    def _note_weights(self, save: Path) -> None:
        checkpoint = save / (save / "latest").read_text(encoding="utf-8").strip()
        relative = str(checkpoint.relative_to(self.pipeline.folder))
        self.state.update(self.stage.name, weights={"checkpoint": relative, "sha256": weights_digest(checkpoint)})

    def _merge(self, processes: Processes) -> Path:
        """Merges the trained LoRA adapters into the weights. Returns the folder that holds the merged
        checkpoint."""
        merged = self.pipeline.save(self.stage.name) / "merged"
        shutil.rmtree(merged, ignore_errors=True)
        self.say("merging the adapters into the weights")
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
        prefix = identity[:12]
        words = eval_words(self.pipeline, stage, self.options, folder / weights["checkpoint"], prefix)
        self._deepy(processes, words)
        files = sorted(results.glob(f"{prefix}_eval_results_*.json"), key=lambda file: file.stat().st_mtime_ns)
        if not files:
            raise StageFailed(f"{stage.name}: eval.py ended, but wrote no results in {results}; read its log")
        write_json(scores, scores_of_results(files[-1]))
        self.state.update(stage.name, evaluation={"id": identity, "scores": str(scores.relative_to(folder))})

    def judge_and_promote(self) -> None:
        """Judges the stage's weights by the gate, and promotes them if the gate passes or is overridden.

        Otherwise raises StageFailed with the gate's exit code. Without a gate the weights are promoted.
        """
        stage, folder = self.stage, self.pipeline.folder
        self._say_of_an_edited_gate()
        if self.gate is None:
            self.say("no gate: promoted without being judged")
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
            self.say(f"the gate was overridden by {override.by}: {override.reason}")
            return self._promote({**verdict, "override": {"by": override.by, "reason": override.reason}})
        self.state.update(stage.name, status=REFUSED)
        raise StageFailed(
            f"{stage.name}: gate {verdict['result']}; all numbers are in {verdict['file']}; correct the stage and run "
            f"`resume`, or promote the weights anyway with `override {stage.name} --reason ...`",
            verdict["exit_code"],
        )

    def _say_of_an_edited_gate(self) -> None:
        """Prints a warning if the stage's gate was edited since the pipeline started.

        The old gate still applies in this run, because the edit may be incomplete."""
        edited = f"warning: {self.pipeline.gates} was edited during this run, which still judges by the old gate"
        try:
            if requirements_digest(gates_of(self.pipeline).get(self.stage.name)) != requirements_digest(self.gate):
                self.say(f"{edited}; the next `run` judges by the new gate")
        except UserError as problem:
            self.say(f"{edited}; the edited file is refused: {str(problem).splitlines()[0]}")

    def _promote(self, verdict: Mapping[str, Any] | None) -> None:
        stage, folder, record = self.stage, self.pipeline.folder, self.state[self.stage.name]
        final = self.pipeline.final(stage.name)
        sha256 = record.weights["sha256"]
        evidence = verdict or {"stage": stage.name, "result": "no gate", "weights_sha256": sha256, "time": time.time()}
        number = Path(evidence.get("file", "-0")).stem.rpartition("-")[2]
        logs = logs_of(self.pipeline, stage, record)
        scores = folder / record.evaluation["scores"] if record.evaluation else None
        name = f"{stage.name}-{sha256[:12]}-{number}"
        promote(final, folder / record.weights["checkpoint"], name, evidence, logs, scores)
        promoted = {
            "sha256": sha256, "time": time.time(), "verdict": evidence.get("file"),
            "override": evidence.get("override"), "requirements": requirements_digest(self.gate),
        }  # fmt: skip
        self.state.update(stage.name, status=PROMOTED, promoted=promoted)
        self.say(f"promoted: {final.relative_to(folder)} now has the weights {record.weights['checkpoint']}")

    # -- commands --------------------------------------------------------------------------------------------

    def _deepy(self, processes: Processes, words: list[str]) -> None:
        self._python(processes, [os.fspath(install_root() / "deepy.py"), *words])

    def _python(self, processes: Processes, words: list[str]) -> None:
        self._command(processes, [sys.executable, *words])

    def _command(self, processes: Processes, command: list[str], is_shell: bool = False) -> None:
        log_path = Path("logs") / f"{self.stage.name}.log"  # one log for all commands of the stage
        log = self.pipeline.folder / log_path
        code = processes.run(self.stage.name, command, log, self.say, with_children=is_shell)
        if code == _REQUEUE or (code and processes.stopped is not None):
            if is_shell and processes.stopped == signal.SIGUSR1:
                # A shell command does not save. If its job were queued again, it would start over for ever.
                raise StageFailed(
                    f"{self.stage.name}: Slurm stopped the command at the time limit; raise --time in the stage's key "
                    "slurm, then run `resume`"
                )
            raise StageFailed(f"{self.stage.name}: stopped; run `resume` to continue", processes.exit_code)
        if code:
            lines = last_lines(log, _TAIL_LINES)
            errors = [line.strip() for line in lines if "error: " in line and "its output is above" not in line]
            exit_text = f"ended with code {code}"
            # Only the first line is shown in the table of stages.
            reason = f"{errors[-1]}\n{exit_text}; " if errors else f"{exit_text}\n"
            tail = "\n".join(f"  {line}" for line in lines)
            raise StageFailed(f"{self.stage.name}: {reason}the end of {log_path}:\n{tail}")
