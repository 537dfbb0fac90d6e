#!/usr/bin/env python
"""Lists, submits, watches and ends jobs of this cluster and runs of this machine.

    python tools/jobs.py list                                   # yours: waiting, running, ended in the last day
    python tools/jobs.py list 4711 checkpoints/my-run --json    # a job, and a run that no scheduler started
    python tools/jobs.py list --experiment 'sft-*' --since 7d
    python tools/jobs.py watch --interval 10                    # a live table, until Ctrl-C
    python tools/jobs.py submit /abs/model.yml --nodes 16 --watch 50 -- --time=24:00:00 --job-name=my-run
    python tools/jobs.py submit model.yml --local               # deepy.py here, watched in the same way
    python tools/jobs.py logs 4711 -f
    python tools/jobs.py cancel 4711 4712

A job is crashed if Slurm calls it failed, or if the last 100 lines of its log hold a traceback, exception or
error. It is stale if it has written nothing for 600 s. docs/jobs.md explains all verdicts.

Exit codes: 3 from list if a job is crashed, stale or unknown; 4 from submit, with a report, if a person has
to look; 1 for a refused request; 2 for a wrong command line.
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
from megatron.operations.jobs.overview import Choice, Row, overview  # noqa: E402
from megatron.operations.jobs.scheduler import ANSWERS_S, PATIENT_S, Slurm  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402

CRASHED_OR_STALE = 3


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    listing = commands.add_parser("list", help="a table of jobs; exit code 3 when one is crashed or stale")
    watching = commands.add_parser("watch", help="the same table, live")
    for command in (listing, watching):
        command.add_argument(
            "ids", nargs="*", metavar="ID", help="numbers of jobs, or folders of runs (`save`); none: all of the user"
        )
        command.add_argument("--user", help="whose jobs (yours)")
        command.add_argument("--name", metavar="PATTERN", help="job names, as my-run or 'sft-*'")
        command.add_argument("--experiment", metavar="PATTERN", help="experiments, as 'exp,lr=*'")
        command.add_argument(
            "--since",
            type=_seconds,
            default=86400.0,
            metavar="TIME",
            help="how long ago jobs may have ended: 90m, 1d (1d)",
        )
        command.add_argument("--all", action="store_true", help="also jobs that do not train")
    listing.add_argument("--json", action="store_true", help="a list of objects, whose fields docs/jobs.md explains")
    watching.add_argument("--interval", type=_pause, default=10.0, metavar="S", help="seconds between two looks (10)")
    submitting = commands.add_parser(
        "submit", help="submit a run, and see it through its first iterations",
        epilog="What stands behind -- goes to sbatch. Exit code 4, and a report: a person has to look.",
    )  # fmt: skip
    submitting.add_argument("configs", nargs="+", metavar="CONFIG", help="configuration files of one run")
    submitting.add_argument("--set", nargs="+", action="append", default=[], metavar="KEY=VALUE", help="keys that win")
    submitting.add_argument(
        "--nodes", type=_count, metavar="N", help="unset: as many as the site has for the run, else 1"
    )
    submitting.add_argument(
        "--watch", type=_count, default=50, metavar="N", help="iterations to wait for before it is a success (50)"
    )
    submitting.add_argument("--local", action="store_true", help="deepy.py on this machine, in the background")
    submitting.add_argument("--retries", type=int, default=2, choices=(0, 1, 2), help="of what is safe to repeat (2)")
    submitting.add_argument("--interval", type=_pause, default=5.0, metavar="S", help="seconds between two looks (5)")
    showing = commands.add_parser("logs", help="the log of a job")
    showing.add_argument("id", metavar="ID", help="number of a job, or folder of a run")
    showing.add_argument("-f", "--follow", action="store_true", help="go on until the job has ended")
    showing.add_argument("-n", "--lines", type=_count, default=100, metavar="N", help="of the end (100)")
    showing.add_argument("--rank", type=int, metavar="R", help="what this rank wrote")
    cancelling = commands.add_parser("cancel", help="end jobs: scancel; of a local run: save, then end")
    cancelling.add_argument("ids", nargs="+", metavar="ID", help="numbers of jobs, or folders of runs")
    for command in (listing, watching, submitting, showing, cancelling):
        limit = PATIENT_S if command is submitting else ANSWERS_S
        command.add_argument(
            "--answers-within", type=_pause, default=limit, metavar="S",
            help=f"seconds that a command of Slurm may take; a silent sacct is then done without ({limit:g})",
        )  # fmt: skip
    words, options = _split(argv)
    parsed = parser.parse_args(words)
    if options and parsed.command != "submit":
        parser.error("only submit accepts sbatch options after --")
    parsed.sbatch_options = options
    return parsed


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the words before and after `--`."""
    words = list(argv)
    separator = words.index("--") if "--" in words else len(words)
    return words[:separator], words[separator + 1 :]


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time; write 90m, 12h or 7d")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}[match[2]]


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of 1 or more")
    return int(text)


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
    """Print the jobs. Returns the exit code: 3 if one of them is crashed, stale or unknown."""
    rows = overview(_choice(options), slurm, site)
    if options.json:
        print(json.dumps([row.as_dict() for row in rows], indent=1))
    elif not rows:
        _say("no jobs; --since 7d, --user and --all show more, and a run of another folder is shown by its path")
    else:
        from megatron.operations.jobs.table import console, render

        screen = console()
        screen.print(render(rows, narrow=screen.is_terminal))
    return _code(rows)


def watch_jobs(options: argparse.Namespace, slurm: Slurm, site: dict[str, str]) -> int:
    """Show a live table of the jobs until Ctrl-C. Returns the exit code, as `list_jobs`."""
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
                except LaunchError as problem:  # a scheduler that is restarted answers again
                    note = str(problem)
        except KeyboardInterrupt:
            return _code(rows)


def show_log(options: argparse.Namespace, slurm: Slurm, site: dict[str, str]) -> int:
    """Print the last lines of a job's log; with --follow, also new lines until the job ends or Ctrl-C."""
    from megatron.operations.jobs.joblog import follow, last_lines

    row, *other_rows = overview(Choice([options.id]), slurm, site)
    if other_rows:
        raise LaunchError(f"{options.id}: is an array of {1 + len(other_rows)} jobs; name one, such as {row.job.id}")
    log = row.job.log
    if options.rank is not None:
        if row.logs is None:
            raise LaunchError(f"{options.id}: its log does not show log_dir (of the ranks' logs) yet; retry later")
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
    """Cancel the jobs named on the command line."""
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
    """Submit a run, and wait for its first iterations."""
    from megatron.operations.jobs.submission import Request, submit

    pairs = [pair for group in options.set for pair in group]
    request = Request(
        tuple(options.configs), tuple(pairs), options.nodes, options.watch, options.local, options.retries,
        tuple(options.sbatch_options), options.interval,
    )  # fmt: skip
    return submit(request, slurm, site, lambda line: print(line, flush=True), _say)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
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
