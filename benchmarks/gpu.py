"""Runs `make gpu` on one GPU: first the parts that never passed, then the changed ones, then all others.

The tables in benchmarks/results/ remember which parts have passed, on which card and with which files. A
part whose files are the same is not repeated on the same kind of card. The plan is printed before anything
but the facts of the machine runs: timed parts alone, one after another, then parts of tests side by side.

Every part is a process of its own with a time limit, so that one that crashes or runs out of memory takes no
other with it. A line says what became of each. The table is written again as parts go on, to
benchmarks/results/<date>-<card>.json: a run that is cut leaves what it has, and the next one goes on from
there. Parts for which no time is left, or a package is missing, are named as left out. Nothing is fetched
from a network.

  make gpu                                   9 minutes at most
  make gpu ARGS='--minutes 4'                again: goes on from the table of the first
  make gpu ARGS='--plan --card h200'         what a run on such a card would do; needs no GPU
  make gpu ARGS='--anatomy 1.4B'             where the time of a step goes
  make gpu ARGS='--only attention "1.4B, native"'    some parts
  make gpu ARGS=--again                      known parts too, after all others
  make gpu ARGS=--ablate                     what each key costs or gives in a step of the 1.4B shape
  make gpu-rehearsal                         every part on a CPU, with gloo, at tiny size

Exit status: 0, or 1 where a part has failed, was cut, or was left out for want of a package that training
itself needs.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_run.parts import Part, ablations, parts
from benchmarks.gpu_run.process import ROOT, Stop
from benchmarks.gpu_run.run import Options, Run, print_plan
from megatron.process import run_command
from megatron.process.command_parser import CommandParser

WORK, TABLES = ROOT / ".cache" / "gpu", ROOT / "benchmarks" / "results"


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[Part]]:
    """Parses the command line. Returns the options, and all parts that such a run has."""
    parser = CommandParser(prog="make gpu", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=9, help="time for everything (9); what does not fit is left out"
    )
    parser.add_argument("--only", nargs="+", metavar="PART", help="these parts alone, by name")
    parser.add_argument(
        "--anatomy", metavar="SHAPE", help="the part of this name alone, also where it is known: 1.4B, 7B shape"
    )
    parser.add_argument("--again", action="store_true", help="repeat parts that a table has of the same files and card")
    parser.add_argument("--ablate", action="store_true", help="one key changed at a time, instead of the parts")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with gloo, at tiny size")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the table; default: benchmarks/results/")
    parser.add_argument("--plan", action="store_true", help="print the plan, and end; needs no GPU")
    parser.add_argument("--card", help="with --plan: the kind of card, as in the names of tables (h200)")
    parser.add_argument("--list", action="store_true", help="name the parts, and end")
    options = parser.parse_args(argv)
    if options.card and not options.plan:
        parser.error("--card needs --plan; a run reads the card from its GPU")
    if options.anatomy is not None:
        vars(options).update(only=[f"anatomy, {options.anatomy}"], again=True)
    all_parts = ablations() if options.ablate else parts()
    names = [part.name for part in all_parts]
    if unknown := sorted(set(options.only or ()) - set(names)):
        parser.error(f"--only: no part {', '.join(unknown)}; there are: {', '.join(names)}")
    return options, all_parts


def main(argv: Sequence[str] | None = None) -> int:
    flags, all_parts = parse(argv)
    if flags.list:
        for part in all_parts:
            print(f"{part.name:<30} about {part.typical_s:.0f} s, at most {part.limit_s:.0f}: {part.description}")
        return 0
    kind = "rehearsal" if flags.rehearse else "ablation" if flags.ablate else "gpu"
    options = Options(kind, flags.minutes, flags.only, flags.again, flags.output, WORK, TABLES)
    try:
        if flags.plan:
            print_plan(all_parts, options, flags.card)
            return 0
        stop = Stop()

        def end(number: int, frame: Any) -> None:
            stop.reason = f"ended by {signal.Signals(number).name}"

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, end)
        return Run(all_parts, options, stop).all()
    except ValueError as problem:
        sys.stderr.write(f"make gpu: {problem}\n")
        return 1


if __name__ == "__main__":
    run_command(main)
