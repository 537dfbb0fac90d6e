"""Runs `python deepy.py compare`: differing keys, curves, speed and scores of two runs or more."""

import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.experiments.comparison.comparison import compare_runs
from megatron.experiments.comparison.tables import as_json, lines
from megatron.neox_arguments import UserError
from megatron.process.command_parser import CommandParser
from megatron.process.run_files import to_json

PAGE = "compare.html"
_EXAMPLES = """\
examples:
  python deepy.py compare checkpoints/base checkpoints/new               (keys, losses, speed and scores as text)
  python deepy.py compare a b c --by tokens --html                       (also as a page: compare.html)
  python deepy.py compare a b --metric 'validation/*' --scores results   (other curves; results of eval.py)
"""


def main(argv: Sequence[str]) -> int:
    """Compares the runs that the command line names, and prints the comparison. Returns the exit code."""
    options = _parser().parse_intermixed_args(argv)
    try:
        comparison = compare_runs(options.run, options.by, options.metric, options.scores, options.all)
        if options.html is not None:
            from megatron.experiments.comparison.page import write_page  # which needs bokeh

            write_page(comparison, options.html)
    except UserError as problem:
        sys.stderr.write(problem.error_lines("deepy.py compare"))
        return 1
    print(to_json(as_json(comparison), indent=1) if options.json else "\n".join(lines(comparison)))
    for line in comparison.problems:
        sys.stderr.write(f"deepy.py compare: warning: {line}\n")
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="deepy.py compare", epilog=_EXAMPLES,
        description="Compare runs: keys with different values, curves at common points, speed, and scores with their "
        "standard errors. Differences are from the first run. tools/report.py shows whole runs instead.",
    )  # fmt: skip
    add = parser.add_argument
    add("run", nargs="+", help="`save` of a run, its log folder, or its metrics.jsonl; two or more")
    add("--by", choices=("step", "tokens", "flops"), default="step", help="axis of the curves; default: step")
    add("--metric", action="append", default=[], metavar="NAME",
        help="metric of metrics.jsonl, or a pattern such as 'validation/*'; repeatable; default: losses")  # fmt: skip
    add("--scores", action="append", default=[], metavar="FOLDER",
        help="further folder with results of eval.py; may be repeated; searched anyway: the runs' folders, "
        "eval_output_dir, and the current folder")  # fmt: skip
    add("--all", action="store_true", help="show all differing keys, also of folders, logging and launching")
    add("--html", nargs="?", type=Path, const=Path(PAGE), metavar="FILE",
        help=f"also write the comparison as a page for a browser; default: {PAGE}")  # fmt: skip
    add("--json", action="store_true", help="print JSON")
    return parser
