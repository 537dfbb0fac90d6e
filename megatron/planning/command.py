"""Runs `python deepy.py plan`: what a run needs, and how long it takes, from a step on fake CUDA."""

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.launch.gpus import read_gpus
from megatron.neox_arguments import NeoXArgs, UserError
from megatron.neox_arguments.neox_args import load_assignments
from megatron.neox_arguments.reading.command_line import add_completers
from megatron.neox_arguments.reading.files import parse_overrides
from megatron.neox_arguments.reading.presets import files_of
from megatron.neox_arguments.values.integers import parse_integer
from megatron.planning.calibrate import main as calibrate
from megatron.planning.goodput import Failures
from megatron.planning.machines import Machine, read_links, read_machine, read_reached
from megatron.planning.output import as_json, lines
from megatron.planning.page import write_page
from megatron.planning.plan import Plan, make_plan
from megatron.planning.processes import PlanError, Processes
from megatron.process.command_parser import CommandParser

_EXAMPLES = """\
examples:
  python deepy.py plan configs/llama3-1/8B.yml --gpus 64            (memory of a rank of each pipeline stage)
  python deepy.py plan a.yml b.yml --gpus 64 --gpu h100             (also: does it fit, and how long does it take?)
  python deepy.py plan a.yml b.yml --gpus 64 --gpu gh200 --gpus-per-node 4 --net slingshot --price 2.5 --json
  python deepy.py plan a.yml b.yml --dry-run-ranks 1024             (also: do ranks fit together?)
exit code: 0 when nothing is wrong, 1 when ranks do not fit together, or a step does not fit the memory
"""


def main(argv: Sequence[str], preset_root: Path) -> int:
    """Plans the run that the command line names, and prints the plan. Returns the exit code."""
    if argv[:1] == ["calibrate"]:
        return calibrate(argv[1:])
    try:
        parser = _parser()
        add_completers(parser, preset_root)
        options = parser.parse_intermixed_args(argv)
        plan = plan_of(options, preset_root)
        if options.html is not None:
            _write_page(plan, options.html)
    except UserError as problem:
        sys.stderr.write(problem.error_lines("deepy.py plan"))
        return 1
    print(json.dumps(as_json(plan), indent=1) if options.json else "\n".join(lines(plan)))
    return 1 if plan.problems or plan.fits_memory is False else 0


def _write_page(plan: Plan, path: Path) -> None:
    """Raises PlanError if the page cannot be written."""
    try:
        write_page(plan, path)
    except OSError as problem:
        raise PlanError(f"--html {path}: {problem.strerror}; name another file") from problem


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="deepy.py plan", epilog=_EXAMPLES,
        description="Tell what a run needs before it starts: parameters, FLOPs, memory of each stage, what ranks send, "
        "seconds of a step. The real set-up and a step of a few blocks run on fake tensors, so no GPU, data or "
        "checkpoint is needed. Memory is of blocks that are not compiled: compiled ones keep fewer activations.",
    )  # fmt: skip
    add = parser.add_argument
    add("conf_file", nargs="+", help="configuration files, or names of presets")
    add("--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys that override the files")
    add("--gpus", type=_positive, metavar="N", help="number of ranks; default: one machine")
    checks = "groups, layers, order of collectives, messages"
    add(
        "--dry-run-ranks",
        type=_positive,
        metavar="N",
        help=f"like --gpus; also check that ranks fit together: {checks}",
    )
    add("--gpus-per-node", type=_positive, default=8, metavar="N", help="GPUs of a machine; default: 8")
    add("--gpu", metavar="NAME",
        help=f"does a step fit this GPU, and how long does it take? {', '.join(read_gpus())}, or a file that "
        "deepy.py plan calibrate --out FILE.toml has written")  # fmt: skip
    add("--gpu-memory", type=_positive_number, metavar="GIB", help="does a step fit this memory? default: the GPU's")
    add(
        "--net",
        choices=sorted(read_links()),
        metavar="NAME",
        help=f"network between machines; default: that of the GPU's reference machine; {', '.join(read_links())}",
    )
    add("--price", type=_positive_number, metavar="X", help="price of a GPU for an hour")
    add(
        "--failures",
        type=_positive_number,
        metavar="X",
        help="failures of a machine in a day: how often should the run save, and how much of its time is useful?",
    )
    add(
        "--save-seconds",
        type=_positive_number,
        metavar="X",
        default=10.0,
        help="seconds in which a save stops training; default: 10",
    )
    add(
        "--restart-seconds",
        type=_positive_number,
        metavar="X",
        default=120.0,
        help="seconds from a failure to the next step; default: 120",
    )
    cores = os.cpu_count() or 1
    add(
        "--processes",
        type=_positive,
        default=cores,
        metavar="N",
        help="ranks that run side by side; default: all cores",
    )
    add("--search", action="store_true", help="find the fastest layouts that fit, with the same global batch (--gpu)")
    add(
        "--explain",
        metavar="KEY[=VALUES]",
        help="what other values of a key change, such as --explain "
        "pipe_parallel_size, or --explain seq_length=4096,16384 (--gpu)",
    )
    add("--html", type=Path, metavar="FILE", help="also write the plan as a page for a browser")
    add("--json", action="store_true", help="print JSON")
    return parser


def _positive(text: str) -> int:
    if not (number := parse_integer(text)):
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 1")
    return number


def _positive_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def plan_of(options: argparse.Namespace, preset_root: Path) -> Plan:
    """Raises UserError if the configuration cannot be planned."""
    if options.gpus is not None and options.dry_run_ranks is not None:
        raise PlanError("--gpus and --dry-run-ranks both name the number of ranks; give one")
    if options.gpu is None and any(x is not None for x in (options.net, options.price, options.failures)):
        raise PlanError("--net, --price and --failures need --gpu, without which no time is known")
    if options.gpu is None and (options.search or options.explain):
        raise PlanError("--search and --explain need --gpu, without which no time is known")
    files, _ = files_of(options.conf_file, preset_root=preset_root)
    args: NeoXArgs = load_assignments(files, parse_overrides(options.set, "--set")).check_planning()
    world = options.dry_run_ranks or options.gpus or options.gpus_per_node
    failures = Failures(options.failures, options.save_seconds, options.restart_seconds) if options.failures else None
    with Processes(options.processes) as processes:
        return make_plan(
            args, world, machine_of(options), has_gpu=options.gpu is not None, gpu_memory=options.gpu_memory,
            price=options.price, failures=failures, processes=processes, compares=options.dry_run_ranks is not None,
            searches=options.search, explains=_explained(options.explain),
        )  # fmt: skip


def _explained(text: str | None) -> tuple[str, tuple[Any, ...]] | None:
    """Returns a key and its values, written as KEY=VALUE,VALUE."""
    if text is None:
        return None
    key, _, values = text.partition("=")
    key = key.replace("-", "_")
    if not values:
        return key, ()
    # A list of values, or a single one: a value may have commas itself, as lists do.
    [(_, parsed, _)] = parse_overrides([f"{key}=[{values}]"], "--explain")
    return key, tuple(parsed)


def machine_of(options: argparse.Namespace) -> Machine:
    """Returns the machine that the options name; without a GPU, an H100, whose times nobody asks for."""
    name, links = options.gpu or "h100", read_links()
    if name.endswith(".toml"):
        gpu, reached = read_machine(Path(name))
    elif name in read_gpus():
        gpu = read_gpus()[name]
        reached = read_reached(gpu.generation)
    else:
        raise PlanError(f"--gpu {name}: no such GPU; there are {', '.join(read_gpus())}, and files ending with .toml")
    return Machine(gpu, reached, links[gpu.link], links[options.net or gpu.network], options.gpus_per_node)
