"""Runs variants of a run: all combinations of settings, or a list of them, and compares what came out.

    python deepy.py sweep run sweep.yml --dry-run         # check every run, print them and what they cost
    python deepy.py sweep run sweep.yml                   # train every run that has not finished, then the table
    python deepy.py sweep submit sweep.yml -- --time=8:00:00 --gres=gpu:1     # the same as Slurm jobs
    python deepy.py sweep status sweep.yml                # the table of cells; writes sweep.csv, .json and .png
    python deepy.py sweep status sweep.yml --fit scaling  # fit L(N, D) = E + A/N^alpha + B/D^beta to it

Stop it, kill it and type it again as you like: a finished run is skipped, a half-finished one resumes. A run
is finished if it was trained with the present configuration, data and code. docs/experiments.md explains
sweep.yml.

Exit codes: 0 all runs have finished, 1 failed or refused, 2 wrong command line, 124 stopped by USR1, 130 stopped
by Ctrl-C, 143 stopped by SIGTERM.
"""  # noqa: W505 (lines to copy)

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron.experiments.errors import RunError
from megatron.experiments.scaling import fit_scaling, points_of, write_fit
from megatron.experiments.sweep_cost import cost_lines
from megatron.experiments.sweep_file import Link, Sweep, read_sweep
from megatron.experiments.sweep_link import LinkWork
from megatron.experiments.sweep_run import Scheduler, check_runs
from megatron.experiments.sweep_slurm import jobs_now, refuse_active_jobs, submit
from megatron.experiments.sweep_table import (
    as_records,
    differing_measurement,
    rows_of,
    table_of,
    write_results,
)
from megatron.neox_arguments.errors import UserError
from megatron.neox_arguments.values.local_paths import with_home
from megatron.operations.jobs.table import console
from megatron.pipelines.errors import StageFailed
from megatron.pipelines.state import locked
from megatron.process import outlive_readers, say
from megatron.process.command_parser import CommandParser

_COMMAND = "deepy.py sweep"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments of `deepy.py sweep`. Those after `--` are for sbatch: the result's
    `sbatch_options`."""
    parser = CommandParser(prog=_COMMAND, description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    running = commands.add_parser("run", help="train every run that has not finished, on this machine")
    submitting = commands.add_parser("submit", help="submit a Slurm job for every run that has not finished")
    showing = commands.add_parser("status", help="show the table of cells, and write it")
    for command in (running, submitting, showing):
        command.add_argument("file", metavar="FILE", help="the sweep.yml")
    for command in (running, submitting):
        command.add_argument(
            "--cwd", metavar="DIR", default=".",
            help="folder to which relative paths in configurations refer (default: this folder)",
        )  # fmt: skip
        command.add_argument(
            "--dry-run", action="store_true", help="check every run, print what would be done, and start nothing"
        )
    running.add_argument("--only", metavar="RUN", help="run this one alone")
    running.add_argument("--launcher", metavar="NAME", help="launcher of training, as for deepy.py")
    showing.add_argument("--json", action="store_true", help="print the table as JSON")
    showing.add_argument(
        "--fit", choices=("scaling",), help="fit the loss over parameters and tokens of finished cells"
    )
    end = argv.index("--") if "--" in argv else len(argv)
    options, sbatch_options = parser.parse_args(argv[:end]), list(argv[end + 1 :])
    if sbatch_options and options.command != "submit":
        parser.error("arguments after -- are options of sbatch; they belong to submit")
    options.sbatch_options = sbatch_options
    return options


def main(argv: Sequence[str]) -> int:
    """Runs the command line `deepy.py sweep ARGV` and returns the exit code."""
    options = parse(argv)
    commands: dict[str, Callable[[argparse.Namespace, Sweep], int]] = {
        "run": _run, "submit": _submit, "status": _status,
    }  # fmt: skip
    try:
        return commands[options.command](options, read_sweep(options.file))
    except UserError as problem:
        say(problem.error_lines(_COMMAND).rstrip("\n"))
        return problem.code if isinstance(problem, StageFailed) else 1
    except OSError as problem:  # a file cannot be read or written: the disk or quota is full, or rights are missing
        if problem.filename is None:
            raise
        message = f"{problem.filename}: {problem.strerror}; free space, or allow access to the file; then run again"
        say(RunError(message).error_lines(_COMMAND).rstrip("\n"))
        return 1


def _say(line: str) -> None:
    say(f"sweep: {line}")


def _cwd(options: argparse.Namespace) -> Path:
    folder = with_home(options.cwd).absolute()
    if not folder.is_dir():
        raise RunError(f"--cwd {options.cwd}: no such folder")
    return folder


def _work(sweep: Sweep, link: Link, cwd: Path) -> LinkWork:
    return LinkWork(sweep, link, cwd, lambda line: _say(f"{link.name}: {line}"))


def _to_do(sweep: Sweep, cwd: Path) -> list[Link]:
    """Returns the runs that have not finished with the present configuration, data and code, parents
    first."""
    names: set[str] = set()
    for link in sweep.links:
        if (link.parent is not None and link.parent.name in names) or not _work(sweep, link, cwd).is_done():
            names.add(link.name)
    return [link for link in sweep.links if link.name in names]


def _run(options: argparse.Namespace, sweep: Sweep) -> int:
    cwd = _cwd(options)
    if options.only is not None:
        link = next((link for link in sweep.links if link.name == options.only), None)
        if link is None:
            names = ", ".join(link.name for link in sweep.links)
            raise RunError(f"--only {options.only}: no such run; the runs are {names}")
        outlive_readers()
        return _work(sweep, link, cwd).do(options.launcher)
    if options.launcher is not None:
        raise RunError("--launcher: goes with --only; for a sweep on a cluster, use `submit`")
    check_runs(sweep, cwd)
    if options.dry_run:
        return _dry_run(sweep, cwd)
    outlive_readers()
    refuse_active_jobs(sweep, _say)
    sweep.root.mkdir(parents=True, exist_ok=True)
    with locked(sweep.root, _say, "sweep") as lock:
        links = _to_do(sweep, cwd)
        _say(f"{len(links)} of {len(sweep.links)} runs to do, {sweep.keys.parallel} at a time; folder: {sweep.root}")
        code = Scheduler(sweep, cwd, lock, _say).run(links)
    _show(sweep)
    return code


def _dry_run(sweep: Sweep, cwd: Path) -> int:
    links = {link.name for link in _to_do(sweep, cwd)}
    for link in sweep.links:
        dependency = f" after {link.parent.name}" if link.parent is not None else ""
        state = "would run" if link.name in links else "finished"
        print(f"{link.name}: {state}{dependency} {' '.join(link.pairs)}".rstrip())
    for line in cost_lines(sweep, [link for link in sweep.links if link.name in links], cwd):
        print(line)
    return 0


def _submit(options: argparse.Namespace, sweep: Sweep) -> int:
    cwd = _cwd(options)
    check_runs(sweep, cwd)
    if options.dry_run:
        return _dry_run(sweep, cwd)
    sweep.root.mkdir(parents=True, exist_ok=True)
    with locked(sweep.root, _say, "sweep"):
        links = _to_do(sweep, cwd)
        for line in cost_lines(sweep, links, cwd):
            _say(line)
        return submit(sweep, links, cwd, options.sbatch_options, _say)


def _show(sweep: Sweep) -> None:
    rows = rows_of(sweep, jobs_now(sweep, _say))
    out = console(sys.stdout)
    with out.capture() as captured:
        out.print(table_of(sweep, rows, out.is_terminal))
    print(captured.get().rstrip("\n"))
    if (note := differing_measurement(rows)) is not None:
        print(f"note: {note}")
    for path in write_results(sweep, rows):
        print(f"wrote {path}")


def _status(options: argparse.Namespace, sweep: Sweep) -> int:
    if options.json:
        print(json.dumps(as_records(sweep, rows_of(sweep, jobs_now(sweep, _say))), indent=1))
    else:
        _show(sweep)
    if options.fit is not None:
        points, metric = points_of(rows_of(sweep))
        fit = fit_scaling(points)
        for line in (*fit.lines(metric), *(f"wrote {path}" for path in write_fit(fit, points, metric, sweep.root))):
            (say if options.json else print)(line)
    return 0
