#!/usr/bin/env python
"""Publishes the order in which a run reads its data, for each sample its step, sources, documents and offsets.

    python tools/datasets/order.py checkpoints/mine --output order.npy     # records; order.json names the sources
    python tools/datasets/order.py checkpoints/mine --output order.jsonl --last 1000

docs/experiments.md has a reader of a few lines.
"""  # noqa: W505 (lines to copy)

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    parser.add_argument("run", metavar="RUN", help="`save` folder of the run")
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="file to write: .npy or .jsonl")
    parser.add_argument("--last", type=int, metavar="N", help="last step to write (default: the run's planned end)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the file. Returns 0, or 1 after an error."""
    options = parse(argv)
    from megatron.experiments.data_order import write_order
    from megatron.experiments.run import Run
    from megatron.neox_arguments import UserError
    from megatron.process.progress import ProgressBar

    logging.basicConfig(format="%(message)s", level=logging.INFO)
    try:
        run = Run.load(options.run)
        last = run.spans[-1].last if options.last is None else options.last
        with ProgressBar("order", last, "step", logging.getLogger("order"), visible=True, transient=True) as bar:
            start, end = write_order(run, options.output, options.last, bar)
        print(f"{options.output}: the order of steps {start} to {end}")
    except UserError as problem:
        sys.stderr.write(problem.error_lines("order.py"))
        return 1
    return 0


if __name__ == "__main__":
    run_command(main)
