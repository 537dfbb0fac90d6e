"""Writes a report on one or more training runs as one page of HTML: curves, events, configuration, data,
samples.

    python tools/report.py checkpoints/a                       # writes checkpoints/a/report.html
    python tools/report.py checkpoints/a/logs --html a.html    # a run's log folder, or its metrics.jsonl
    python tools/report.py checkpoints/a checkpoints/b         # both runs in full, in ./report.html

`python deepy.py compare` shows only the differences of runs. The page needs no network access. With
`report: true` in its configuration, a run writes its report when it ends."""  # noqa: W505 (lines to copy)

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.neox_arguments import UserError  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    parser.add_argument("run", nargs="+", help="`save` of a run, its log folder, or its metrics.jsonl")
    parser.add_argument(
        "--html", nargs="?", metavar="FILE",
        help="page to write (default: report.html in the run's `save`, in its log folder if it saves into a bucket, or "
        "in the current folder for several runs)",
    )  # fmt: skip
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    from megatron.operations.report import write_report

    try:
        print(write_report(options.run, options.html))
    except UserError as problem:
        sys.stderr.write(problem.error_lines("report.py"))
        return 1
    return 0


if __name__ == "__main__":
    run_command(main)
