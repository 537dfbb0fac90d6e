"""Runs a pipeline with one command: the stages from raw text to a promoted model, each checked by a gate.

    python deepy.py pipeline init pipelines/my-model --recipe 7b     # create a folder: pipeline.yml, configs
    python deepy.py pipeline run pipelines/my-model --dry-run        # check everything, print what would be done
    python deepy.py pipeline run pipelines/my-model                  # do everything that is not done yet
    python deepy.py pipeline run pipelines/my-model --from sft --to dpo --precision bfloat16 --no-fp8
    python deepy.py pipeline run pipelines/my-model --slurm -- --account=me --partition=gpu
    python deepy.py pipeline resume pipelines/my-model               # continue with the options of the last run
    python deepy.py pipeline resume pipelines/my-model sft           # continue from the stage sft on
    python deepy.py pipeline status pipelines/my-model               # show the table of stages
    python deepy.py pipeline gate pipelines/my-model sft             # judge the result of sft again
    python deepy.py pipeline override pipelines/my-model sft --reason "piqa is noise at this size"

In the pipeline's folder you may leave out its name: `deepy.py pipeline gate sft`. A stage whose inputs have
not changed is skipped. checkpoints/STAGE_final, the link to a stage's weights, is moved only after the
stage's gate has passed. docs/pipeline.md explains pipeline.yml and promotion_gates.yml.

Exit codes: 0 everything requested is done, 1 failed or refused, 2 wrong command line, 3 a gate failed, 4 a
metric that a gate needs is missing, 124 stopped by USR1, 130 stopped by Ctrl-C, 143 stopped by SIGTERM.
"""  # noqa: W505 (lines to copy)

import argparse
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from megatron.launch import install_root
from megatron.neox_arguments.errors import UserError
from megatron.neox_arguments.values.local_paths import with_home
from megatron.operations.jobs.table import console
from megatron.pipelines.definition import FILE, PIPELINE_KEYS, Pipeline, Stage, find_pipeline, read_pipeline
from megatron.pipelines.errors import PipelineError, StageFailed
from megatron.pipelines.gate_verdicts import gates_of, has_moved, judge_stage, read_verdict, requirements_digest
from megatron.pipelines.options import Options
from megatron.pipelines.runner import check_configs, choose, draw_page, dry_run, run
from megatron.pipelines.slurm import jobs_now, refuse_active_jobs, submit
from megatron.pipelines.stage_work import StageWork
from megatron.pipelines.state import REFUSED, State, add_override, is_locked, locked
from megatron.pipelines.table import rows_of, stage_table
from megatron.process import outlive_readers, say
from megatron.process.command_parser import CommandParser

_COMMAND = "deepy.py pipeline"
_RECIPES = Path("configs/pipelines")
_FOLDERS = ("checkpoints", "configs", "data/raw", "data/packed", "data/sft", "data/dpo", "logs")
_GATES = Path("configs/promotion_gates.yml")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments of `deepy.py pipeline`. Those after `--` are for sbatch: the result's
    `sbatch_options`."""
    parser = CommandParser(prog=_COMMAND, description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    running = commands.add_parser("run", help="do everything that is not done yet")
    running.add_argument(
        "words", nargs="*", metavar="DIR|FILE", help="folder of a pipeline, or its pipeline.yml (default: this folder)"
    )
    resuming = commands.add_parser("resume", help="continue with the options of the last run")
    resuming.add_argument(
        "words",
        nargs="*",
        metavar="DIR|FILE STAGE",
        help="a pipeline (default: this folder), and the stage to start from",
    )
    for command in (running, resuming):
        command.add_argument(
            "--from", dest="first", metavar="STAGE", help="start from this stage (default: the first of the pipeline)"
        )
        command.add_argument(
            "--to", dest="last", metavar="STAGE", help="end with this stage (default: the last of the pipeline)"
        )
        command.add_argument("--dry-run", action="store_true", help="print what would be done, and do nothing")
        precision = command.add_mutually_exclusive_group()
        for flag, value, meaning in (
            ("--fp8", "auto", "train in FP8 on GPUs that support it"),
            ("--no-fp8", "off", "do not train in FP8"),
        ):
            precision.add_argument(flag, dest="fp8", action="store_const", const=value, help=meaning)
        command.add_argument(
            "--precision", metavar="NAME", help="precision of every training stage: bfloat16, fp16 or fp32"
        )
        command.add_argument(
            "--set", dest="settings", nargs="+", action="extend", metavar="KEY=VALUE",
            help="configuration keys for every stage that has a model",
        )  # fmt: skip
        command.add_argument("--launcher", metavar="NAME", help="launcher of training and evaluation, as for deepy.py")
        command.add_argument(
            "--slurm",
            action="store_true",
            help="submit one Slurm job per stage; each starts after the previous stage has passed its gate",
        )
    running.add_argument("--only", metavar="STAGE", help="run this stage alone")
    resuming.add_argument("--only", action="store_true", help="run STAGE alone")
    showing = commands.add_parser("status", help="show the table of stages")
    showing.add_argument(
        "words", nargs="*", metavar="DIR|FILE", help="folder of a pipeline, or its pipeline.yml (default: this folder)"
    )
    showing.add_argument(
        "--json", action="store_true", help="print the table's cells and the records of pipeline_state.json as JSON"
    )
    judging = commands.add_parser("gate", help="judge the result of one stage again; promotes nothing")
    judging.add_argument(
        "words", nargs="+", metavar="[DIR|FILE] STAGE", help="a pipeline (default: this folder), and a stage"
    )
    overriding = commands.add_parser(
        "override", help="promote a result that a gate refused; the override stays on record"
    )
    overriding.add_argument(
        "words", nargs="+", metavar="[DIR|FILE] STAGE", help="a pipeline (default: this folder), and a stage"
    )
    overriding.add_argument(
        "--reason", required=True, metavar="TEXT", help="why the gate is overridden; shown wherever the stage is shown"
    )
    beginning = commands.add_parser("init", help="write a recipe into a new folder")
    beginning.add_argument("place", metavar="DIR", help="the new folder")
    beginning.add_argument(
        "--recipe",
        default="quickstart",
        metavar="NAME",
        help=f"recipe to write: {', '.join(recipes())} (default: quickstart)",
    )
    end = argv.index("--") if "--" in argv else len(argv)
    options, sbatch_options = parser.parse_args(argv[:end]), list(argv[end + 1 :])
    if sbatch_options and not getattr(options, "slurm", False):
        parser.error("arguments after -- are options of sbatch; add --slurm, or remove them")
    options.sbatch_options = sbatch_options
    return options


def main(argv: Sequence[str]) -> int:
    """Runs the command line `deepy.py pipeline ARGV` and returns the exit code."""
    options = parse(argv)
    try:
        commands: dict[str, Callable[[argparse.Namespace], int]] = {
            "run": _run, "resume": _run, "status": _status, "gate": _gate, "override": _override, "init": _init,
        }  # fmt: skip
        return commands[options.command](options)
    except UserError as problem:
        say(problem.error_lines(_COMMAND).rstrip("\n"))
        return problem.code if isinstance(problem, StageFailed) else 1
    except OSError as problem:  # a file cannot be read or written: the disk or quota is full, or rights are missing
        if problem.filename is None:
            raise
        message = f"{problem.filename}: {problem.strerror}; free space, or allow access to the file; then run `resume`"
        say(PipelineError(message).error_lines(_COMMAND).rstrip("\n"))
        return 1


def _say(line: str) -> None:
    say(f"pipeline: {line}")


def _place(words: Sequence[str], takes_stage: bool) -> tuple[Pipeline, str | None]:
    """Returns (pipeline, name of the stage or None) for arguments `[DIR|FILE] [STAGE]`; changes into its
    folder.

    If the first argument is a file, or a folder with a pipeline.yml, it names the pipeline. Otherwise the
    pipeline of the current folder is used.

    takes_stage: whether the arguments may name a stage.
    """
    remaining = list(words)
    path = with_home(remaining[0]) if remaining else Path()
    if remaining and (path.is_file() or (path / FILE).is_file() or not takes_stage or len(remaining) > 1):
        place = remaining.pop(0)
    elif not remaining or Path(FILE).is_file():
        place = "."
    else:
        raise PipelineError(f"neither this folder nor {remaining[0]} has a {FILE}; give the folder of a pipeline first")
    if not takes_stage and words and not Path(words[0]).exists() and Path(FILE).is_file():
        raise PipelineError(f"{words[0]}: no such folder; to run one stage, type: run --only {words[0]}")
    if len(remaining) > takes_stage:
        raise PipelineError(f"{' '.join(remaining)}: too many arguments; {_COMMAND} --help has examples")
    pipeline = read_pipeline(find_pipeline(place))
    if remaining:
        pipeline.stage(remaining[0])
    os.chdir(pipeline.folder)
    return pipeline, remaining[0] if remaining else None


def _place_and_stage(options: argparse.Namespace) -> tuple[Pipeline, Stage]:
    """Returns the pipeline and the stage that the arguments name, and changes into the pipeline's folder.

    Raises PipelineError if they name no stage."""
    pipeline, name = _place(options.words, takes_stage=True)
    if name is None:
        raise PipelineError(f"{options.command}: no stage is given; write its name behind the pipeline's")
    return pipeline, pipeline.stage(name)


def _run(options: argparse.Namespace) -> int:
    resumes = options.command == "resume"
    pipeline, from_stage = _place(options.words, takes_stage=resumes)
    first_stage, last_stage = options.first or from_stage, options.last
    if from_stage is not None and options.first is not None:
        raise PipelineError(f"{from_stage} and --from {options.first} both name the first stage; give one of them")
    if options.only:
        if options.first or options.last:
            raise PipelineError("--only cannot be combined with --from or --to; remove them")
        first_stage = last_stage = options.only if not resumes else from_stage
        if first_stage is None:
            raise PipelineError("--only: no stage is given; name it, for example `resume DIR sft --only`")
    reserved = [pair for pair in options.settings or () if pair.partition("=")[0] in PIPELINE_KEYS]
    if reserved:
        raise PipelineError(f"--set {reserved[0]}: the pipeline sets this key itself; remove it from --set")
    new_options = Options(options.fp8, options.precision, tuple(options.settings or ()), options.launcher)
    state = State(pipeline.folder)
    if resumes and not state.exists:
        raise PipelineError(
            f"{pipeline.folder}: nothing to resume: the pipeline was never run here; type `run` instead"
        )

    def options_of(stage: Stage) -> Options:
        return new_options.fill_from(Options.from_json(dict(state[stage.name].options))) if resumes else new_options

    stages = choose(pipeline, first_stage, last_stage)
    if options.dry_run:
        dry_run(pipeline, stages, options_of, lambda line: print(line))
        return 0
    outlive_readers()
    if options.slurm:
        check_configs(pipeline, stages, options_of, gates_of(pipeline))
        return submit(pipeline, stages, options_of, options.sbatch_options, _say)
    refuse_active_jobs(pipeline, state, _say)
    return run(pipeline, stages, options_of, _say)


def _status(options: argparse.Namespace) -> int:
    pipeline, _ = _place(options.words, takes_stage=False)
    state = State(pipeline.folder)
    in_queue = jobs_now(pipeline, state, _say)
    if options.json:
        rows = rows_of(pipeline, state, is_locked(pipeline.folder))
        records = {stage.name: asdict(state[stage.name]) for stage in pipeline.stages}
        print(json.dumps({"stages": rows, "records": records, "jobs": in_queue}, indent=1))
        return 0
    out = console()
    out.print(stage_table(pipeline, state, out.is_terminal, is_locked(pipeline.folder)))
    for name, words in in_queue.items():
        print(f"{name}: job {state[name].job} {words}")
    return 0


def _gate(options: argparse.Namespace) -> int:
    pipeline, stage = _place_and_stage(options)
    name, gates = stage.name, gates_of(pipeline)
    if name not in gates:
        raise PipelineError(
            f"{name}: this stage has no gate; add one to {pipeline.gates or 'a file, and set `gates` to the file'}"
        )
    with locked(pipeline.folder, _say):
        state = State(pipeline.folder)
        if not state[name].weights:
            raise PipelineError(
                f"{name}: this stage has no weights to judge (status: {state[name].status}); run the stage first"
            )
        verdict = judge_stage(pipeline, stage, gates[name], state[name])
        state.update(name, verdict=verdict["file"])
        for line in verdict["lines"]:
            print(line)
        print(f"{name}: {verdict['result']}; {verdict['file']}")
        draw_page(pipeline, state, _say)
    return int(verdict["exit_code"])


def _override(options: argparse.Namespace) -> int:
    pipeline, stage = _place_and_stage(options)
    name, gate = stage.name, gates_of(pipeline).get(stage.name)
    if not options.reason.strip():
        raise PipelineError("--reason: the text is empty; write why the gate is overridden")
    with locked(pipeline.folder, _say):
        state = State(pipeline.folder)
        record = state[name]
        if gate is None or record.status != REFUSED or record.verdict is None:
            raise PipelineError(f"{name}: nothing to override: no gate refused it (status: {record.status})")
        verdict = read_verdict(pipeline.folder, record.verdict)
        now = (requirements_digest(gate), record.weights.get("sha256"))
        if (verdict["requirements"], verdict["weights_sha256"]) != now or has_moved(pipeline, verdict):
            raise PipelineError(
                f"{name}: gate, weights or baseline changed since the verdict {record.verdict}; judge again with "
                f"`gate {name}`"
            )
        recorded = Options.from_json(dict(record.options))
        work = StageWork(pipeline, stage, recorded, gate, state, lambda line: _say(f"{name}: {line}"))
        if work.inputs() != record.inputs or not work.has_weights():
            raise PipelineError(
                f"{name}: configuration, data or weights of this stage changed since it ran; restore them, or run the "
                "stage again"
            )
        add_override(pipeline.folder, verdict, options.reason.strip())
        work.judge_and_promote()
        draw_page(pipeline, state, _say)
    return 0


def _init(options: argparse.Namespace) -> int:
    file = write_recipe(options.recipe, with_home(options.place))
    _say(f"{file} was written; next, type: {_COMMAND} run {options.place} --dry-run")
    return 0


def recipes() -> list[str]:
    """Returns the names of the recipes for `init`, which are folders in configs/pipelines, sorted."""
    return sorted(path.parent.name for path in (install_root() / _RECIPES).glob(f"*/{FILE}"))


def write_recipe(recipe: str, target: Path) -> Path:
    """Writes a new pipeline from a recipe into the folder `target`, and returns the path of its pipeline.yml.

    Copies the recipe's files, and creates folders for data, checkpoints and logs. A recipe without gates gets
    the repository's `configs/promotion_gates.yml`. Raises PipelineError for an unknown recipe, if the folder
    already has a pipeline, or if it cannot be written.
    """
    if recipe not in recipes():
        raise PipelineError(f"--recipe {recipe}: no such recipe; choose one of {', '.join(recipes())}")
    source = install_root() / _RECIPES / recipe
    if (target / FILE).exists():
        raise PipelineError(f"{target / FILE}: already exists; give another folder, or remove it")
    try:
        for name in _FOLDERS:
            (target / name).mkdir(parents=True, exist_ok=True)
        gates = target / _GATES
        if not (source / _GATES).is_file() and not gates.exists():
            shutil.copyfile(install_root() / _GATES, gates)
        shutil.copytree(source, target, dirs_exist_ok=True, ignore=lambda _, names: [n for n in names if n == FILE])
        shutil.copyfile(source / FILE, target / FILE)  # last, because it makes the folder a pipeline
    except OSError as problem:
        raise PipelineError(f"{problem.filename or target}: cannot be written ({problem.strerror})") from None
    return target / FILE
