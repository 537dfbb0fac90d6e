#!/usr/bin/env python
"""Lists, submits, watches and ends Slurm jobs of this cluster and local runs of this machine.

    python tools/jobs.py list                                   # your jobs: waiting, running, ended in the last day
    python tools/jobs.py list 4711 checkpoints/my-run --json    # a job, and a run that no scheduler started
    python tools/jobs.py list --experiment 'sft-*' --since 7d
    python tools/jobs.py watch --interval 10                    # a live table, until Ctrl-C
    python tools/jobs.py submit /abs/model.yml --nodes 16 --watch 50 -- --time=24:00:00 --job-name=my-run
    python tools/jobs.py submit model.yml --local               # run deepy.py here, and watch it
    python tools/jobs.py logs 4711 -f
    python tools/jobs.py cancel 4711 4712

A job is crashed if Slurm calls it failed, or if the last 100 lines of its log contain a traceback, exception
or error. It is stale if it has not written its log for 600 s. docs/jobs.md explains all verdicts.

Exit codes: `list` and `watch` return 3 if a job is crashed, stale or unknown. `submit` returns 4, with a
report, if a person has to look. All commands return 1 for a refused request, and 2 for a wrong command line.
"""  # noqa: W505 (lines to copy)

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.launch.environment import LaunchError  # noqa: E402
from megatron.launch.site import site_variables  # noqa: E402
from megatron.neox_arguments import UserError  # noqa: E402
from megatron.neox_arguments.values.integers import parse_integer  # noqa: E402
from megatron.operations.jobs.overview import Choice, Row, overview  # noqa: E402
from megatron.operations.jobs.scheduler import ANSWERS_S, PATIENT_S, Slurm  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402

CRASHED_OR_STALE = 3


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    listing = commands.add_parser("list", help="print a table of jobs; exit code 3 if one is crashed, stale or unknown")
    watching = commands.add_parser("watch", help="show the table of jobs live, until Ctrl-C")
    for command in (listing, watching):
        command.add_argument(
            "ids",
            nargs="*",
            metavar="ID",
            help="numbers of jobs, or folders `save` of runs (default: all jobs of the user)",
        )
        command.add_argument("--user", help="show jobs of this user (default: yours)")
        command.add_argument("--name", metavar="PATTERN", help="show jobs with these names, such as my-run or 'sft-*'")
        command.add_argument(
            "--experiment", metavar="PATTERN", help="show jobs of these experiments, such as 'exp,lr=*'"
        )
        command.add_argument(
            "--since",
            type=_seconds,
            default=86400.0,
            metavar="TIME",
            help="show jobs that ended at most so long ago, such as 90m or 7d (default: 1d)",
        )
        command.add_argument("--all", action="store_true", help="also show jobs that do not train")
    listing.add_argument(
        "--json", action="store_true", help="print a JSON list of objects, whose fields docs/jobs.md explains"
    )
    watching.add_argument(
        "--interval", type=_pause, default=10.0, metavar="S", help="seconds between two looks (default: 10)"
    )
    submitting = commands.add_parser(
        "submit", help="submit a run, and watch its first iterations",
        epilog="Arguments after -- are options of sbatch. Exit code 4, with a report, means that a person has to look.",
    )  # fmt: skip
    submitting.add_argument("configs", nargs="+", metavar="CONFIG", help="configuration files of one run")
    submitting.add_argument(
        "--set", nargs="+", action="append", default=[], metavar="KEY=VALUE", help="keys with priority over the files"
    )
    submitting.add_argument(
        "--nodes", type=_count, metavar="N", help="number of nodes (default: the site's number for the run, else 1)"
    )
    submitting.add_argument(
        "--watch",
        type=_count,
        default=50,
        metavar="N",
        help="iterations to wait for before it is a success (default: 50)",
    )
    submitting.add_argument(
        "--local", action="store_true", help="run deepy.py on this machine in the background, without Slurm"
    )
    submitting.add_argument(
        "--retries",
        type=int,
        default=2,
        choices=(0, 1, 2),
        help="how often to submit again after a failure that is safe to retry (default: 2)",
    )
    submitting.add_argument(
        "--interval", type=_pause, default=5.0, metavar="S", help="seconds between two looks (default: 5)"
    )
    showing = commands.add_parser("logs", help="print the end of a job's log")
    showing.add_argument("id", metavar="ID", help="number of a job, or folder `save` of a run")
    showing.add_argument(
        "-f", "--follow", action="store_true", help="also print new lines until the job has ended or Ctrl-C"
    )
    showing.add_argument(
        "-n", "--lines", type=_count, default=100, metavar="N", help="number of lines from the end (default: 100)"
    )
    showing.add_argument("--rank", type=int, metavar="R", help="print the log of this rank instead of the job's")
    cancelling = commands.add_parser("cancel", help="end Slurm jobs (scancel); let local runs save and end")
    cancelling.add_argument("ids", nargs="+", metavar="ID", help="numbers of jobs, or folders `save` of runs")
    for command in (listing, watching, submitting, showing, cancelling):
        limit = PATIENT_S if command is submitting else ANSWERS_S
        command.add_argument(
            "--answers-within", type=_pause, default=limit, metavar="S",
            help=f"timeout for each command of Slurm; if sacct exceeds it, scontrol is used (default: {limit:g})",
        )  # fmt: skip
    words, options = _split(argv)
    parsed = parser.parse_args(words)
    if options and parsed.command != "submit":
        parser.error("only submit accepts sbatch options after --; remove them")
    parsed.sbatch_options = options
    return parsed


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns (arguments before the first `--`, arguments after it)."""
    words = list(argv)
    separator = words.index("--") if "--" in words else len(words)
    return words[:separator], words[separator + 1 :]


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time; write it like 90m, 12h or 7d")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}[match[2]]


def _count(text: str) -> int:
    if not (number := parse_integer(text)):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of 1 or more")
    return number


def _pause(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text) or float(text) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected seconds, more than 0")
    return float(text)


def _say(text: str) -> None:
    sys.stderr.write(f"jobs.py: {text}\n")


def _choice(options: argparse.Namespace) -> Choice:
    return Choice(options.ids, options.user, options.name, options.experiment, options.since, options.all)


def _code(rows: Sequence[Row]) -> int:
    return CRASHED_OR_STALE if any(row.needs_a_person for row in rows) else 0


def list_jobs(options: argparse.Namespace, slurm: Slurm, site: dict[str, str]) -> int:
    """Prints the selected jobs as a table or JSON. Returns 3 if one is crashed, stale or unknown, else 0."""
    rows = overview(_choice(options), slurm, site)
    if options.json:
        print(json.dumps([row.as_dict() for row in rows], indent=1))
    elif not rows:
        _say("no jobs; try --since 7d, --user NAME or --all; give the path of a run in another folder to show it")
    else:
        from megatron.operations.jobs.table import console, render

        screen = console()
        screen.print(render(rows, narrow=screen.is_terminal))
    return _code(rows)


def watch_jobs(options: argparse.Namespace, slurm: Slurm, site: dict[str, str]) -> int:
    """Shows a live table of the selected jobs until Ctrl-C. Returns 3 if one is crashed, stale or unknown,
    else 0."""
    from rich.live import Live

    from megatron.operations.jobs.table import console, render

    screen, rows, note = console(), overview(_choice(options), slurm, site), ""
    with Live(console=screen, auto_refresh=False, screen=screen.is_terminal) as live:
        try:
            while True:
                live.update(render(rows, narrow=screen.is_terminal, note=note), refresh=True)
                time.sleep(options.interval)
                try:
                    rows, note = overview(_choice(options), slurm, site), ""
                except LaunchError as problem:  # Slurm may be restarting, and answer again later
                    note = str(problem)
        except KeyboardInterrupt:
            return _code(rows)


def show_log(options: argparse.Namespace, slurm: Slurm, site: dict[str, str]) -> int:
    """Prints the last lines of a job's log; with --follow, also new lines until the job ends or Ctrl-C."""
    from megatron.operations.jobs.joblog import follow, last_lines

    row, *other_rows = overview(Choice([options.id]), slurm, site)
    if other_rows:
        raise LaunchError(
            f"{options.id}: is an array of {1 + len(other_rows)} jobs; give one job, such as {row.job.id}"
        )
    log = row.job.log
    if options.rank is not None:
        if row.logs is None:
            raise LaunchError(
                f"{options.id}: the folder of the ranks' logs (log_dir) is not in the job's log yet; try again later"
            )
        log = row.logs / f"rank_{options.rank}.log"
    if log is None or not log.is_file():
        path = f" {log}" if log is not None else ""
        raise LaunchError(f"{options.id}: there is no log{path} ({row.verdict})")
    sys.stdout.write("".join(f"{line}\n" for line in last_lines(log, options.lines)))
    if options.follow:
        try:
            for text in follow(log, lambda: overview(Choice([options.id]), slurm, site)[0].job.is_active):
                sys.stdout.write(text)
                sys.stdout.flush()
        except KeyboardInterrupt:
            pass
    return 0


def cancel_jobs(options: argparse.Namespace, slurm: Slurm, site: dict[str, str]) -> int:
    """Cancels the Slurm jobs, and asks the local runs to save and end, that the command line names."""
    from megatron.operations.jobs.local_runs import stop

    rows = overview(Choice(options.ids), slurm, site)
    numbers = [row.job.id for row in rows if not row.job.local]
    if numbers:
        slurm.cancel(numbers)
    for row in rows:
        if row.job.local:
            stop(row.job)
        print(f"{row.job.id}: {'asked to save and end' if row.job.local else 'cancelled'} ({row.job.name})")
    return 0


def submit_run(options: argparse.Namespace, slurm: Slurm, site: dict[str, str]) -> int:
    """Submits the run of the command line, waits for its first iterations, and returns the exit code."""
    from megatron.operations.jobs.submission import Request, submit

    pairs = [pair for group in options.set for pair in group]
    request = Request(
        tuple(options.configs), tuple(pairs), options.nodes, options.watch, options.local, options.retries,
        tuple(options.sbatch_options), options.interval,
    )  # fmt: skip
    return submit(request, slurm, site, lambda line: print(line, flush=True), _say)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line of tools/jobs.py, and returns its exit code."""
    options = parse(sys.argv[1:] if argv is None else argv)
    commands = {"list": list_jobs, "watch": watch_jobs, "submit": submit_run, "logs": show_log, "cancel": cancel_jobs}
    try:
        site = site_variables()
        return commands[options.command](options, Slurm(site, _say, answers_s=options.answers_within), site)
    except (UserError, OSError) as problem:
        lines = str(problem).splitlines() or [type(problem).__name__]
        sys.stderr.write("".join(f"jobs.py: error: {line}\n" for line in lines))
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    run_command(main)
