"""From raw text to a promoted model: stages with gates between them, one command.

    python deepy.py pipeline init pipelines/my-model --recipe 7b     # a folder to begin with: pipeline.yml, configs
    python deepy.py pipeline run pipelines/my-model --dry-run        # what would be done, and what a run refuses
    python deepy.py pipeline run pipelines/my-model                  # everything that is not done yet
    python deepy.py pipeline run pipelines/my-model --from sft --to dpo --precision bfloat16 --no-fp8
    python deepy.py pipeline run pipelines/my-model --slurm -- --account=me --partition=gpu
    python deepy.py pipeline resume pipelines/my-model               # go on, with the options of the last run
    python deepy.py pipeline resume pipelines/my-model sft           # from one stage on
    python deepy.py pipeline status pipelines/my-model
    python deepy.py pipeline gate pipelines/my-model sft             # judge its result again
    python deepy.py pipeline override pipelines/my-model sft --reason "piqa is noise at this size"

The folder, or its pipeline.yml, may be left out in that folder: `deepy.py pipeline gate sft`. A stage whose
inputs have not changed is skipped. checkpoints/STAGE_final moves when the stage's gate has passed, and only
then. docs/pipeline.md explains pipeline.yml and promotion_gates.yml.

Exit codes: 0 everything asked for is done, 3 a gate failed, 4 a gate lacks a metric, 1 anything else that
failed or was refused, 2 a wrong command line, 124 stopped by USR1, 130 by Ctrl-C, 143 by SIGTERM.
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
    """Parses the command line. Arguments after `--` are for sbatch and become `sbatch_options`."""
    parser = CommandParser(prog=_COMMAND, description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    running = commands.add_parser("run", help="do everything that is not done yet")
    running.add_argument("words", nargs="*", metavar="DIR|FILE", help="folder of a pipeline, or its file (this folder)")
    resuming = commands.add_parser("resume", help="go on, with the options of the last run")
    resuming.add_argument("words", nargs="*", metavar="DIR|FILE STAGE", help="a pipeline, and a stage to go on from")
    for command in (running, resuming):
        command.add_argument("--from", dest="first", metavar="STAGE", help="the first stage to look at (the first)")
        command.add_argument("--to", dest="last", metavar="STAGE", help="the last stage (the last)")
        command.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
        precision = command.add_mutually_exclusive_group()
        for flag, value, meaning in ("--fp8", "auto", "training in FP8 where there is"), ("--no-fp8", "off", "no FP8"):
            precision.add_argument(flag, dest="fp8", action="store_const", const=value, help=meaning)
        command.add_argument("--precision", metavar="NAME", help="of every training stage: bfloat16, fp16, fp32")
        command.add_argument(
            "--set", dest="settings", nargs="+", action="extend", metavar="KEY=VALUE",
            help="keys of every stage that has a model",
        )  # fmt: skip
        command.add_argument("--launcher", metavar="NAME", help="of training and evaluation, as of deepy.py")
        command.add_argument(
            "--slurm", action="store_true", help="a job of Slurm for each stage, after the one before has passed"
        )
    running.add_argument("--only", metavar="STAGE", help="this stage alone")
    resuming.add_argument("--only", action="store_true", help="STAGE alone")
    showing = commands.add_parser("status", help="the table of stages")
    showing.add_argument("words", nargs="*", metavar="DIR|FILE", help="a pipeline (this folder)")
    showing.add_argument("--json", action="store_true", help="the records of pipeline_state.json and the table's cells")
    judging = commands.add_parser("gate", help="judge one stage again; nothing is promoted")
    judging.add_argument("words", nargs="+", metavar="[DIR|FILE] STAGE", help="a pipeline (this folder), and a stage")
    overriding = commands.add_parser("override", help="promote what a gate refuses; recorded and shown for ever")
    overriding.add_argument(
        "words", nargs="+", metavar="[DIR|FILE] STAGE", help="a pipeline (this folder), and a stage"
    )
    overriding.add_argument("--reason", required=True, metavar="TEXT", help="why; it is shown wherever the stage is")
    beginning = commands.add_parser("init", help="write a recipe into a new folder")
    beginning.add_argument("place", metavar="DIR", help="the folder")
    beginning.add_argument(
        "--recipe", default="quickstart", metavar="NAME", help=f"{', '.join(recipes())} (quickstart)"
    )
    end = argv.index("--") if "--" in argv else len(argv)
    options, sbatch_options = parser.parse_args(argv[:end]), list(argv[end + 1 :])
    if sbatch_options and not getattr(options, "slurm", False):
        parser.error("options after -- are for sbatch; add --slurm, or remove them")
    options.sbatch_options = sbatch_options
    return options


def main(argv: Sequence[str]) -> int:
    """Runs one command of `deepy.py pipeline` and returns the exit code."""
    options = parse(argv)
    try:
        commands: dict[str, Callable[[argparse.Namespace], int]] = {
            "run": _run, "resume": _run, "status": _status, "gate": _gate, "override": _override, "init": _init,
        }  # fmt: skip
        return commands[options.command](options)
    except UserError as problem:
        say(problem.error_lines(_COMMAND).rstrip("\n"))
        return problem.code if isinstance(problem, StageFailed) else 1
    except OSError as problem:  # of whatever file, which a full disk, a quota or rights keep from us
        if problem.filename is None:
            raise
        message = f"{problem.filename}: {problem.strerror}; make room or give the right there, then `resume` goes on"
        say(PipelineError(message).error_lines(_COMMAND).rstrip("\n"))
        return 1


def _say(line: str) -> None:
    say(f"pipeline: {line}")


def _place(words: Sequence[str], takes_stage: bool) -> tuple[Pipeline, str | None]:
    """Returns the pipeline and the stage (None: no stage given) that the arguments name, and changes into the
    folder of the pipeline.

    If the first argument is a file, or a folder with a pipeline.yml, it names the pipeline. Otherwise the
    current folder's pipeline is used.

    takes_stage: whether the arguments may name a stage.
    """
    remaining = list(words)
    path = Path(remaining[0]).expanduser() if remaining else Path()
    if remaining and (path.is_file() or (path / FILE).is_file() or not takes_stage or len(remaining) > 1):
        place = remaining.pop(0)
    elif not remaining or Path(FILE).is_file():
        place = "."
    else:
        raise PipelineError(f"neither this folder nor {remaining[0]} has a {FILE}; give the folder of a pipeline")
    if not takes_stage and words and not Path(words[0]).exists() and Path(FILE).is_file():
        raise PipelineError(f"{words[0]}: no such folder; to run one stage: run --only {words[0]}")
    if len(remaining) > takes_stage:
        raise PipelineError(f"{' '.join(remaining)}: too many arguments; {_COMMAND} --help has examples")
    pipeline = read_pipeline(find_pipeline(place))
    if remaining:
        pipeline.stage(remaining[0])
    os.chdir(pipeline.folder)
    return pipeline, remaining[0] if remaining else None


def _place_and_stage(options: argparse.Namespace) -> tuple[Pipeline, Stage]:
    """Does what `_place` does for a command that needs a stage."""
    pipeline, name = _place(options.words, takes_stage=True)
    if name is None:
        raise PipelineError(f"{options.command}: name a stage")
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
            raise PipelineError("--only: name the stage, as `resume DIR sft --only`")
    reserved = [pair for pair in options.settings or () if pair.partition("=")[0] in PIPELINE_KEYS]
    if reserved:
        raise PipelineError(f"--set {reserved[0]}: the pipeline sets this key itself; remove it from --set")
    new_options = Options(options.fp8, options.precision, tuple(options.settings or ()), options.launcher)
    state = State(pipeline.folder)
    if resumes and not state.exists:
        raise PipelineError(f"{pipeline.folder}: no run was started here; `run` starts one")

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
        raise PipelineError(f"{name}: has no gate; add one to {pipeline.gates or 'a file, and set `gates` to it'}")
    with locked(pipeline.folder, _say):
        state = State(pipeline.folder)
        if not state[name].weights:
            raise PipelineError(f"{name}: has no weights to judge (status: {state[name].status}); run it first")
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
        raise PipelineError("--reason: is empty; say why the gate is overridden")
    with locked(pipeline.folder, _say):
        state = State(pipeline.folder)
        record = state[name]
        if gate is None or record.status != REFUSED or record.verdict is None:
            raise PipelineError(f"{name}: nothing to override: no gate refused it (status: {record.status})")
        verdict = read_verdict(pipeline.folder, record.verdict)
        now = (requirements_digest(gate), record.weights.get("sha256"))
        if (verdict["requirements"], verdict["weights_sha256"]) != now or has_moved(pipeline, verdict):
            raise PipelineError(f"{name}: gate, weights or baseline changed since {record.verdict}; run `gate {name}`")
        recorded = Options.from_json(dict(record.options))
        work = StageWork(pipeline, stage, recorded, gate, state, lambda line: _say(f"{name}: {line}"))
        if work.inputs() != record.inputs or not work.has_weights():
            raise PipelineError(f"{name}: its configuration, data or weights changed since it ran; restore them")
        add_override(pipeline.folder, verdict, options.reason.strip())
        work.judge_and_promote()
        draw_page(pipeline, state, _say)
    return 0


def _init(options: argparse.Namespace) -> int:
    file = write_recipe(options.recipe, Path(options.place).expanduser())
    _say(f"{file}: written; next: {_COMMAND} run {options.place} --dry-run")
    return 0


def recipes() -> list[str]:
    """Returns the names of the recipes."""
    return sorted(path.parent.name for path in (install_root() / _RECIPES).glob(f"*/{FILE}"))


def write_recipe(recipe: str, target: Path) -> Path:
    """Starts a new pipeline in the folder `target` from a recipe, and returns the path of its pipeline.yml.

    It copies the recipe's files and creates the folders of the stages. A recipe without gates gets
    `configs/promotion_gates.yml` of the repository. Raises PipelineError for an unknown recipe, and if the
    folder already has a pipeline.
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
        shutil.copyfile(source / FILE, target / FILE)  # last: without it the folder is no pipeline
    except OSError as problem:
        raise PipelineError(f"{problem.filename or target}: cannot be written ({problem.strerror})") from None
    return target / FILE
