"""Runs the stages of a pipeline in order; each is skipped, resumed or started."""

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megatron.data.files import sha256
from megatron.neox_arguments import NeoXArgs, require_lm_eval
from megatron.neox_arguments.errors import ConfigError, UserError
from megatron.pipelines.definition import Pipeline, Stage
from megatron.pipelines.errors import FAILED, PipelineError, StageFailed
from megatron.pipelines.gate_verdicts import gates_of
from megatron.pipelines.gates import Gate
from megatron.pipelines.options import Options, eval_words, parse_words, train_words
from megatron.pipelines.page import write_page
from megatron.pipelines.processes import Processes
from megatron.pipelines.stage_work import StageWork
from megatron.pipelines.state import DONE, PROMOTED, REFUSED, State, locked
from megatron.pipelines.state import FAILED as FAILED_STAGE
from megatron.pipelines.table import Display


def choose(pipeline: Pipeline, first_stage: str | None, last_stage: str | None) -> list[Stage]:
    """Returns the stages of a pipeline from `first_stage` to `last_stage`, both included.

    None stands for the pipeline's first or last stage. Raises PipelineError for an unknown stage, and if
    `first_stage` comes after `last_stage`.
    """
    stages = list(pipeline.stages)
    begin = stages.index(pipeline.stage(first_stage)) if first_stage is not None else 0
    end = stages.index(pipeline.stage(last_stage)) if last_stage is not None else len(stages) - 1
    if end < begin:
        raise PipelineError(
            f"--from {first_stage} comes after --to {last_stage} in the pipeline; exchange or remove one"
        )
    return stages[begin : end + 1]


OptionsOf = Callable[[Stage], Options]
"""A function that returns the command-line options for a stage."""


def check_configs(
    pipeline: Pipeline, stages: Sequence[Stage], options_of: OptionsOf, gates: Mapping[str, Gate]
) -> None:
    """Raises ConfigError for mistakes in the configuration of any stage, before the first stage starts.

    A gate on a metric that its stage will not measure is also a mistake.
    """
    problems: list[str] = []
    for stage in stages:
        options = options_of(stage)
        try:
            if stage.kind == "train":
                args = parse_words(train_words(pipeline, stage, options)).check_training()
                for line in _without_metric(gates[stage.name], stage, args) if stage.name in gates else ():
                    problems.append(f"{pipeline.gates}: {line}")
            if stage.kind == "init":
                parse_words(train_words(pipeline, stage, options, "--init-only"))
            if stage.evaluation is not None:
                words = eval_words(pipeline, stage, options, pipeline.save(stage.name) / "global_step0", "x")
                require_lm_eval(parse_words(words).check_evaluation())
        except ConfigError as problem:
            problems += [f"stage {stage.name}: {line}" for line in problem.problems]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))


def _without_metric(gate: Gate, stage: Stage, args: NeoXArgs) -> list[str]:
    """Returns an error message for each metric that the gate needs but the stage will not measure.

    args: configuration of the stage's run."""
    lines = []
    for metric in (requirement.metric for requirement in gate.requirements):
        if metric.startswith("eval_tasks/") and stage.evaluation is None and not args.eval_tasks:
            lines.append(
                f"{stage.name}: {metric} will not be measured: the stage has neither evaluation (pipeline.yml) nor "
                "eval_tasks; set one"
            )
        if metric.startswith("validation/") and not args.eval_iters:
            lines.append(
                f"{stage.name}: {metric} will not be measured: the run has no validation; set eval_iters above 0"
            )
    return lines


def run(pipeline: Pipeline, stages: Sequence[Stage], options_of: OptionsOf, say: Callable[[str], None]) -> int:
    """Runs stages in order until one fails or is refused by its gate. Returns the exit code.

    It also shows the progress, and writes pipeline.html.
    options_of: returns the command-line options for a stage.
    say: called with each line to print.
    """
    gates = gates_of(pipeline)
    check_configs(pipeline, stages, options_of, gates)
    with locked(pipeline.folder, say) as lock:
        state = open_state(pipeline)
        with Display(pipeline, state, say) as display:
            processes = Processes(pipeline.folder, lock, display.beat)
            with processes.signals_passed_on():
                code = _run(pipeline, stages, options_of, gates, state, processes, display)
        display.print_table()
        draw_page(pipeline, state, say)
    return code


def open_state(pipeline: Pipeline) -> State:
    """Reads pipeline_state.json, the state of a pipeline; writes it if there is none yet.

    Raises PipelineError if the state in the folder was written for another pipeline file.
    """
    state = State(pipeline.folder)
    if state.file not in (None, pipeline.file.name):
        raise PipelineError(
            f"{pipeline.folder}: this folder is used by the pipeline {state.file}; move {pipeline.file.name} to "
            "another folder"
        )
    if state.file is None:
        state.file = pipeline.file.name
        state.write()
    return state


def draw_page(pipeline: Pipeline, state: State, say: Callable[[str], None]) -> None:
    """Writes pipeline.html. If that fails, only prints a warning, so the outcome of the stages does not
    change."""
    try:
        say(f"page: {write_page(pipeline, state, say)}")
    except (UserError, OSError, ValueError, KeyError) as problem:
        say(f"warning: pipeline.html could not be written: {problem}")


def _run(
    pipeline: Pipeline, stages: Sequence[Stage], options_of: OptionsOf, gates: Mapping[str, Gate], state: State,
    processes: Processes, display: Display,
) -> int:  # fmt: skip
    start_digest = _digest(pipeline.file)
    for stage in stages:
        say, options = display.line_writer(stage.name), options_of(stage)
        if (now := _digest(pipeline.file)) != start_digest:
            say(
                f"warning: {pipeline.file} was edited during this run, which continues with the old content; the next "
                "`run` uses the new content"
            )
            start_digest = now
        work = StageWork(pipeline, stage, options, gates.get(stage.name), state, say)
        try:
            inputs = work.inputs()
            state.update(stage.name, options=options.to_json())
            if stage.kind != "data" and work.is_unchanged(inputs):  # a data stage checks its sources first, in `run`
                state.update(stage.name, status=PROMOTED, reason="")
                say("unchanged, skipped")
                continue
            if not work.is_unchanged(inputs):
                flags_text = " ".join([*options.flags(), *options.pairs()])
                flags_text = f" with {flags_text}" if flags_text else ""
                say(f"begins ({work.reason_to_run(inputs)}){flags_text}; log: logs/{stage.name}.log")
            work.run(processes)
            draw_page(pipeline, state, lambda line: None)
        except StageFailed as problem:
            for line in str(problem).splitlines():
                say(line.removeprefix(f"{stage.name}: "))
            return problem.code
        except UserError as problem:
            if state[stage.name].status not in (PROMOTED, DONE, REFUSED):
                state.update(stage.name, status=FAILED_STAGE, reason=str(problem).splitlines()[0], ended=time.time())
            for line in str(problem).splitlines():
                say(f"error: {line}")
            return FAILED
    return 0


def _digest(file: Path) -> str | None:
    """Returns the SHA-256 of a file's content; None if it cannot be read."""
    try:
        return sha256(file)
    except OSError:
        return None


def dry_run(pipeline: Pipeline, stages: Sequence[Stage], options_of: OptionsOf, say: Callable[[str], None]) -> None:
    """Prints for each stage whether `run` would skip or run it, and its commands. Runs nothing.

    Raises ConfigError for mistakes in the configuration of any stage, as `run` does."""
    gates = gates_of(pipeline)
    check_configs(pipeline, stages, options_of, gates)
    state, changed = State(pipeline.folder), False
    for stage in stages:
        options = options_of(stage)
        work = StageWork(pipeline, stage, options, gates.get(stage.name), state, say)
        try:
            inputs = work.inputs()
            if not changed and work.is_unchanged(inputs):
                say(f"{stage.name}: unchanged, would be skipped")
                continue
            reason = work.reason_to_run(inputs)
        except UserError as problem:
            reason = f"after the stages before it; for now: {str(problem).splitlines()[0]}"
        changed = True
        say(f"{stage.name}: would run ({reason})")
        for source in stage.sources:
            say(f"  fetch {source.name} from {source.origin} (license {source.license})")
        for command in stage.commands:
            say(f"  {command}")
        if stage.kind != "data":
            further = ["--init-only"] if stage.kind == "init" else []
            say(f"  deepy.py {shlex.join(train_words(pipeline, stage, options, *further))}")
        if stage.merge_adapters:
            say(f"  merge the adapters into checkpoints/{stage.name}/merged")
        if stage.evaluation is not None:
            say(f"  evaluate: {dict(stage.evaluation)}")
        if stage.kind == "train":
            gate = gates.get(stage.name)
            say(f"  gate: {len(gate.requirements)} requirements" if gate is not None else "  no gate")
