"""Parses the command line of deepy.py and of the scripts it starts, with one parser for both."""

import argparse
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple

from megatron.neox_arguments.errors import ConfigError
from megatron.neox_arguments.neox_args import NeoXArgs, load, load_assignments
from megatron.neox_arguments.reading.files import file_assignments, parse_overrides
from megatron.neox_arguments.reading.presets import SUFFIXES, file_name, files_of
from megatron.neox_arguments.reports.config_dump import diff_config, print_config
from megatron.neox_arguments.reports.key_reference import help_pages
from megatron.process.command_parser import CommandParser
from megatron.process.completion import is_completing

_DEEPY = """\
examples:
  python deepy.py train.py configs/quickstart.yml configs/local_setup.yml
  python deepy.py train.py -d configs quickstart local_setup          (.yml may be left out)
  python deepy.py --num_gpus 2 train.py a.yml --set model_parallel_size=2 optimizer.params.lr=1e-3
  python deepy.py --hostfile hosts --include a:2,3@b train.py a.yml --dry-run
  python deepy.py --num_nodes 2 --node_rank 1 --master_addr 10.0.0.1 --include localhost:2,3 train.py a.yml
  python deepy.py generate.py -d configs quickstart text_generation -i prompts.txt -o samples.jsonl
  python deepy.py train.py a.yml --print-config
  python deepy.py train.py a.yml --init-only               (its weights at iteration 0, into save)
  python deepy.py finetune MODEL chats.jsonl               (a model of HuggingFace on a file; finetune --help)
  python deepy.py chat MODEL                               (talk to a model; chat --help)
  python deepy.py doctor a.yml                             (can a run start here? more: doctor --help)
  python deepy.py plan a.yml b.yml --gpus 64               (what will it need, do its ranks fit together? plan --help)
  python deepy.py branch RUN@STEP new.yml                  (a new run from a checkpoint; more: branch --help)
  python deepy.py pipeline run FOLDER                      (stages with gates; more: pipeline --help)
  python deepy.py sweep run sweep.yml                      (variants of a run, in a table; more: sweep --help)
  python deepy.py --help-config gradient_clipping          (or zero_optimization.stage, or 'lr_*')
  python deepy.py --diff-config a.yml b.yml                (layers with commas: a.yml,local.yml b.yml,local.yml)
"""
_SCRIPT = """\
examples:
  python {prog} configs/quickstart.yml configs/local_setup.yml
  torchrun --nproc-per-node 2 {prog} a.yml b.yml --set model_parallel_size=2 fp16=null
  python {prog} a.yml --print-config
"""
# Flags of GPT-NeoX that set the key of the same name; they win over files.
_FLAGS: tuple[tuple[tuple[str, ...], str, dict[str, Any]], ...] = (
    (("-H", "--hostfile"), "hostfile", {"metavar": "FILE", "help": "hostfile with hosts and their slots"}),
    (("--include",), "include", {"metavar": "DEVICES", "help": "devices to use, as in localhost:2,3"}),
    (("--exclude",), "exclude", {"metavar": "DEVICES", "help": "devices not to use, as in localhost:0"}),
    (("--num_gpus", "--num-gpus"), "num_gpus", {"metavar": "N", "type": int, "help": "ranks on each machine"}),
    (("--num_nodes", "--num-nodes"), "num_nodes", {"metavar": "N", "type": int, "help": "machines"}),
    (("--master_addr", "--master-addr"), "master_addr", {"metavar": "IP", "help": "address of the first machine"}),
    (("--master_port", "--master-port"), "master_port", {"metavar": "N", "type": int, "help": "port where ranks meet"}),
    (("--launcher",), "launcher", {"metavar": "NAME", "help": "one of pdsh, openmpi, mvapich, slurm, torchrun"}),
    (
        ("--max-restarts", "--max_restarts"),
        "max_restarts",
        {"metavar": "N", "type": int, "help": "restarts of a failed run"},
    ),
    (("-i", "--sample_input_file"), "sample_input_file", {"metavar": "FILE", "help": "generation: file of prompts"}),
    (("-o", "--sample_output_file"), "sample_output_file", {"metavar": "FILE", "help": "generation: file to write"}),
    (
        ("--adapter",),
        "adapter",
        {"metavar": "PATH[=WEIGHT]", "action": "append", "help": "adapter; see --help-config adapter"},
    ),
    (("--iteration",), "iteration", {"metavar": "N", "type": int, "help": "iteration of the checkpoint to load"}),
    (("--host", "--serve_host"), "serve_host", {"metavar": "ADDRESS", "help": "serving: address to listen at"}),
    (("--port", "--serve_port"), "serve_port", {"metavar": "N", "type": int, "help": "serving: port to listen at"}),
    (
        ("--fp8",),
        "precision_fp8",
        {"action": "store_const", "const": "auto", "help": "training: FP8 if the GPU supports it"},
    ),
    (("--no-fp8", "--no_fp8"), "precision_fp8", {"action": "store_const", "const": "off", "help": "training: no FP8"}),
    (
        ("--init-only", "--init_only"),
        "init_only",
        {"action": "store_const", "const": True, "help": "train.py: write the weights of iteration 0 to save, and end"},
    ),
    (("--wandb_group",), "wandb_group", {"metavar": "NAME", "help": "Weights & Biases group"}),
    (("--wandb_run_name",), "wandb_run_name", {"metavar": "NAME", "help": "Weights & Biases run name"}),
    (("--wandb_team",), "wandb_team", {"metavar": "NAME", "help": "Weights & Biases entity"}),
    (("--eval_tasks",), "eval_tasks", {"metavar": "TASK", "nargs": "+", "help": "evaluation tasks"}),
    (("--eval_results_prefix",), "eval_results_prefix", {"metavar": "NAME", "help": "prefix of result files"}),
    (("--eval_limit",), "eval_limit", {"metavar": "N", "type": float, "help": "evaluation: documents per task"}),
    (
        ("--eval_num_fewshot",),
        "eval_num_fewshot",
        {"metavar": "N", "type": int, "help": "evaluation: examples per question"},
    ),
    (
        ("--eval_include_path",),
        "eval_include_path",
        {"metavar": "DIR", "nargs": "+", "help": "folders with your own tasks"},
    ),
    (("--eval_output_dir",), "eval_output_dir", {"metavar": "DIR", "help": "folder of result files"}),
    (
        ("--compare-hf", "--compare_hf"),
        "eval_compare_hf",
        {"action": "store_const", "const": True, "help": "evaluation: also score with lm-eval's hf backend"},
    ),
)


class DeepyCommand(NamedTuple):
    """The parsed command line of deepy.py, with the resolved configuration."""

    user_script: str
    args: NeoXArgs
    print_config: bool
    node_rank: int | None = None
    hosts: Sequence[str] = ()
    dry_run: bool = False
    words: Sequence[str] = ()
    """The script, its files and its flags as they were typed, without flags for hosts, devices and ports."""
    presets: Sequence[str] = ()
    """The configuration files that are presets, which come with the package."""
    print_schedule: bool = False
    schedule_picture: Path | None = None
    quiet: bool = False


# Keys whose flags differ between machines if a command line is typed on each
_MACHINE_KEYS = ("hostfile", "include", "exclude", "num_gpus", "num_nodes", "master_addr", "master_port")
ReadHFModel = Callable[[str], Mapping[str, Any]]
"""A function that returns the configuration keys of a HuggingFace model, for the flag `--hf-model FOLDER`."""


def parse_deepy(
    argv: Sequence[str] | None = None,
    read_hf_model: ReadHFModel | None = None,
    preset_root: Path | None = None,
    commands: Sequence[str] = (),
) -> DeepyCommand:
    """Parses the command line of deepy.py, and resolves the configuration it names. Raises ConfigError.

    argv: the words after `deepy.py`; None: from sys.argv. read_hf_model: reads the model of `--hf-model`.
    preset_root: folder of the presets; a name is looked up there if it is not a file.
    commands: names that may stand in the place of a script, for completion.
    """
    description = "Start a script on the ranks of this machine, or of several."
    parser = _parser("deepy.py", _DEEPY, description, with_script=True, with_model=read_hf_model is not None)
    add_completers(parser, preset_root, commands)
    _add_launch_flags(parser)
    parser.add_argument("--neox-args", metavar="FILE", help=argparse.SUPPRESS)  # from deepy.py on another machine
    parsed = parser.parse_intermixed_args(argv)
    if not Path(parsed.user_script).is_file():
        close = get_close_matches(parsed.user_script.replace("-", ""), commands, 1)
        hint = f"did you mean {close[0]}?" if close else "usage: deepy.py SCRIPT CONF [CONF ...]"
        raise ConfigError([f"{parsed.user_script}: no such script; {hint}"])
    assignments, presets = _assignments(parsed, read_hf_model), list[str]()
    if parsed.neox_args is not None:
        args = _read_resolved(parsed.neox_args)
        args = args.replace(**{path: value for path, value, _ in assignments})
    elif not (parsed.conf_file or assignments and parsed.hf_model):
        raise ConfigError(["no configuration files; usage: deepy.py SCRIPT CONF [CONF ...]"])
    else:
        files, presets = files_of(parsed.conf_file, parsed.conf_dir, preset_root)
        args = load_assignments(files, assignments)
        if parsed.hosts and (args.include or args.exclude or args.hostfile):
            key = next(name for name in ("include", "exclude", "hostfile") if getattr(args, name))
            raise ConfigError([f"--hosts already chooses machines and GPUs; remove {key} ({args.origin(key)})"])
    return _deepy_command(parsed, args, presets)


class BranchWords(NamedTuple):
    """The words after `deepy.py branch`.

    source: RUN@STEP; "" if none is named. tree: the run whose family is asked for. assignments: the keys of
    files, flags and --set, in this order.
    """

    source: str
    tree: str | None
    assignments: Sequence[tuple[str, Any, str]]
    parsed: argparse.Namespace

    def command(self, script: Path, config: Path, args: NeoXArgs) -> DeepyCommand:
        """Returns the command that starts the branch. config: the file of its configuration."""
        start_words = {"user_script": str(script), "conf_file": [str(config)], "conf_dir": None, "set": []}
        return _deepy_command(argparse.Namespace(**{**vars(self.parsed), **start_words}), args, ())


def parse_branch(argv: Sequence[str], preset_root: Path, examples: str, description: str) -> BranchWords:
    """Parses the words after `deepy.py branch`. Raises ConfigError for files that cannot be read."""
    parser = _parser("deepy.py branch", examples, description)
    parser.add_argument("--tree", metavar="RUN", help="print the runs from which RUN comes, and its branches, and exit")
    parser.add_argument("--prepare-only", action="store_true", help="write the files of the branch, and stop")
    _add_launch_flags(parser)
    add_completers(parser, preset_root)
    parsed = parser.parse_intermixed_args(argv)
    source, *names = parsed.conf_file or [""]
    files, _ = files_of(names, parsed.conf_dir, preset_root)
    return BranchWords(source, parsed.tree, [*file_assignments(files), *_assignments(parsed, None)], parsed)


def _deepy_command(parsed: argparse.Namespace, args: NeoXArgs, presets: Sequence[str]) -> DeepyCommand:
    return DeepyCommand(
        parsed.user_script, args, parsed.print_config, parsed.node_rank, tuple(parsed.hosts), parsed.dry_run,
        tuple(_words(parsed)), tuple(presets),
        parsed.print_schedule or parsed.schedule_picture is not None, parsed.schedule_picture, parsed.quiet,
    )  # fmt: skip


def _add_launch_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--node_rank", "--node-rank", metavar="R", type=int, help="index of this machine, from 0")
    parser.add_argument(
        "--hosts", metavar="HOST:0,1", nargs="+", default=(),
        help="machines and their GPUs, or HOST=RANKS; with --dry-run: print the line to type on each machine",
    )  # fmt: skip
    parser.add_argument(
        "--dry-run", "--dry_run", action="store_true",
        help="print the commands of the run, or the problems of the configuration, and exit; "
        "`deepy.py doctor CONF` also checks files and the machine",
    )  # fmt: skip
    parser.add_argument(
        "--print-schedule", action="store_true",
        help="print what each pipeline stage runs when, how long stages are idle, the activations they hold, and exit",
    )  # fmt: skip
    parser.add_argument(
        "--schedule-picture", metavar="FILE", type=Path, help="print the schedule, and draw it into FILE (.png or .svg)"
    )
    parser.add_argument("--quiet", action="store_true", help="show only failures; the log files have everything")


def _used_flags(parsed: argparse.Namespace) -> Iterator[tuple[str, str, Any, dict[str, Any]]]:
    """Yields (name, key, value, argparse options) of each flag of `_FLAGS` on the command line."""
    for names, key, options in _FLAGS:
        value = getattr(parsed, key)
        if value is not None and value == options.get("const", value):
            yield next(name for name in names if name.startswith("--")), key, value, options


def _words(parsed: argparse.Namespace) -> Iterator[str]:
    yield parsed.user_script
    yield from parsed.conf_file
    if parsed.conf_dir is not None:
        yield from ("--conf_dir", parsed.conf_dir)
    if parsed.hf_model is not None:
        yield from ("--hf-model", parsed.hf_model)
    for flag, key, value, options in _used_flags(parsed):
        if key in _MACHINE_KEYS:
            continue
        if options.get("action") == "append":
            yield from (word for item in value for word in (flag, str(item)))
            continue
        yield flag
        if options.get("action") != "store_const":
            yield from map(str, value if isinstance(value, list) else [value])
    if parsed.set:
        yield from ("--set", *parsed.set)


def parse_script(argv: Sequence[str] | None, prog: str, read_hf_model: ReadHFModel | None = None) -> NeoXArgs:
    """Parses the command line of a script such as train.py into a resolved configuration.

    argv: the words after the script's name; None: from sys.argv. They are the files and flags that deepy.py
    takes, or `--neox-args FILE` with a file that deepy.py wrote. With --print-config, prints the
    configuration and exits. Raises ConfigError.
    """
    description = "Run on this rank; usually started by deepy.py or torchrun."
    parser = _parser(prog, _SCRIPT.format(prog=prog), description, with_model=read_hf_model is not None)
    parser.add_argument("--neox-args", metavar="FILE", help="resolved configuration, instead of files (from deepy.py)")
    parsed = parser.parse_intermixed_args(argv)
    assignments = _assignments(parsed, read_hf_model)
    has_files = bool(parsed.conf_file or parsed.hf_model)
    if (parsed.neox_args is None) != has_files:
        raise ConfigError(["name configuration files or --neox-args FILE" + (", not both" if has_files else "")])
    files, _ = files_of(parsed.conf_file, parsed.conf_dir)
    args = load_assignments(files, assignments) if has_files else _from_launcher(parsed, assignments)
    if parsed.print_config:
        sys.stdout.write(print_config(args) + "\n")
        raise SystemExit(0)
    return args


def add_completers(parser: argparse.ArgumentParser, preset_root: Path | None, commands: Sequence[str] = ()) -> None:
    """Lets shells complete keys, configurations and scripts of a parser."""
    if not is_completing():
        return
    from megatron.neox_arguments.reading.completion import complete_key, complete_setting, config_completer

    def complete_script(prefix: str, **ignored: Any) -> list[str]:
        return [*glob(f"{prefix}*.py"), *(name for name in commands if name.startswith(prefix))]

    completers: dict[str, Callable[..., list[str]]] = {
        "set": complete_setting, "help_config": complete_key, "conf_file": config_completer(preset_root),
        "user_script": complete_script,
    }  # fmt: skip
    for action in parser._actions:
        if action.dest in completers:
            action.completer = completers[action.dest]  # type: ignore[attr-defined]


class _HelpConfig(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        sys.stdout.write(help_pages(NeoXArgs, values) + "\n")
        parser.exit()


class _DiffConfig(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        runs = []
        for value in values:
            try:
                runs.append(load(_layers(value)))
            except ConfigError as refused:
                raise ConfigError([f"--diff-config {value}: {problem}" for problem in refused.problems]) from refused
        difference = diff_config(*runs)
        sys.stdout.write(difference + "\n" if difference else "no value differs\n")
        parser.exit()


def _layers(text: str) -> list[str]:
    """Returns the files of one configuration: `a.yml,b` gives [a.yml, b.yml]; a folder gives its YAML and
    JSON files."""
    if Path(text).is_dir():
        return [str(path) for path in sorted(Path(text).iterdir()) if path.suffix in SUFFIXES]
    return [file_name(name) for name in text.split(",")]


def _parser(
    prog: str, examples: str, description: str, with_script: bool = False, with_model: bool = False
) -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=prog, description=description, epilog=examples,
    )  # fmt: skip
    if with_script:
        parser.add_argument("user_script", help="script to start, such as train.py or generate.py")
    parser.add_argument("conf_file", nargs="*", help="configuration files to merge; each key in one of them only")
    parser.add_argument("-d", "--conf_dir", metavar="DIR", help="folder of the configuration files")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", nargs="+", action="extend", default=[],
        help="override keys of all files; dotted paths reach into sections, values are YAML, null: the default",
    )  # fmt: skip
    if with_model:
        parser.add_argument("--hf-model", metavar="DIR", help="HuggingFace model to load; its keys override the files")
    else:
        parser.set_defaults(hf_model=None)
    parser.add_argument("--print-config", action="store_true", help="print all values with their origins and exit")
    parser.add_argument(
        "--help-config", metavar="KEY", action=_HelpConfig, help="explain a key, or keys such as 'lr_*', and exit"
    )
    parser.add_argument(
        "--diff-config", metavar=("A", "B"), nargs=2, action=_DiffConfig,
        help="print the values that differ between two configurations and exit; each is a file, files joined by "
        "commas, or the configs folder of a checkpoint",
    )  # fmt: skip
    for names, key, options in _FLAGS:
        parser.add_argument(*names, dest=key, **options)
    return parser


def _assignments(parsed: argparse.Namespace, read_hf_model: ReadHFModel | None) -> list[tuple[str, Any, str]]:
    assignments: list[tuple[str, Any, str]] = []
    if read_hf_model is not None and parsed.hf_model is not None:
        assignments += [(key, value, "--hf-model") for key, value in read_hf_model(parsed.hf_model).items()]
    assignments += [(key, value, flag) for flag, key, value, _ in _used_flags(parsed)]
    return assignments + parse_overrides(parsed.set, "--set")


def _from_launcher(parsed: argparse.Namespace, assignments: list[tuple[str, Any, str]]) -> NeoXArgs:
    if assignments or parsed.conf_dir:
        raise ConfigError(["--neox-args FILE holds the complete configuration: give --set and other flags to deepy.py"])
    return _read_resolved(parsed.neox_args)


def _read_resolved(path: str) -> NeoXArgs:
    """Reads the file of resolved arguments that a launcher has written, possibly on another machine."""
    try:
        return NeoXArgs.from_json(Path(path).read_text(encoding="utf-8"))
    except OSError as cause:
        raise ConfigError([
            f"--neox-args {path}: {cause.strerror} on host {socket.gethostname()}; log_dir (or save) must be a "
            "folder shared by all machines"
        ]) from cause  # fmt: skip
    except (KeyError, ValueError) as cause:
        if isinstance(cause, ConfigError):
            raise
        raise ConfigError([f"--neox-args {path}: not a file written by this deepy.py; start with deepy.py"]) from cause
