#!/usr/bin/env python
"""Shows what a step of a run was trained on, and tells at which steps the run has read a text.

    python tools/replay.py checkpoints/mine --step 1200               # rows: documents, files, text
    python tools/replay.py checkpoints/mine --step 1200 --loss        # with the loss of each token, and by source
    torchrun --nproc-per-node 2 tools/replay.py checkpoints/mine --step 1200 --loss --json > step.json
    python tools/replay.py checkpoints/mine --find "a text"           # steps, rows and places at which it was read

RUN is the `save` folder of a run that trains on texts. Its data files must be where they were.
"""  # noqa: W505 (lines to copy)

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    parser.add_argument("run", metavar="RUN", help="`save` folder of the run")
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--step", type=int, metavar="N", help="step to show; the first one is 1")
    group.add_argument("--find", metavar="TEXT", help="text to look for in the documents, within one document")
    parser.add_argument("--rank", type=int, metavar="R", help="list only the rows of this data-parallel rank")
    parser.add_argument("--loss", action="store_true", help="compute the loss of each token before the step's update")
    parser.add_argument(
        "--checkpoint", metavar="STEP|PATH", help="weights for --loss (default: the last checkpoint before the step)"
    )
    parser.add_argument(
        "--limit", type=int, default=1000, metavar="N", help="most places to look for with --find (default: 1000)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    options = parser.parse_args(argv)
    step_flags = {"--rank": options.rank is not None, "--loss": options.loss, "--checkpoint": options.checkpoint}
    if options.find is not None and (unused := [flag for flag, value in step_flags.items() if value]):
        parser.error(f"{', '.join(unused)}: only with --step")
    if options.checkpoint is not None and not options.loss:
        parser.error("--checkpoint: only with --loss, which uses its weights")
    if options.limit < 1:
        parser.error("--limit: expected at least 1")
    return options


def show(options: argparse.Namespace) -> None:
    """Prints a step or the places of a text, on rank 0. Raises UserError."""
    from megatron.data.inspection.render import visible
    from megatron.experiments.find_report import find_text, text_lines
    from megatron.experiments.replay import token_losses
    from megatron.experiments.replay_report import check_rank, describe_step, step_lines
    from megatron.experiments.run import Run
    from megatron.launch import enter
    from megatron.process.run_files import to_json

    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    run = Run.load(options.run)
    if options.find is not None:
        result = find_text(run, options.find, options.limit, logging.getLogger("replay"))
        lines = text_lines(result)
    else:
        args, losses, is_first = run.args_at(run.span_of(options.step).checkpoint), None, True
        check_rank(args, options.rank)
        if options.loss:
            process = enter(args)
            losses, is_first = token_losses(run, options.step, process, options.checkpoint), process.rank == 0
        if not is_first:
            return
        result = describe_step(run.data(options.step), options.step, losses, options.rank)
        lines = step_lines(result)
    if options.json:
        print(to_json(result))
    else:
        print(visible("\n".join(lines)))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line of tools/replay.py on this rank. Returns 0, or 1 after an error."""
    options = parse(argv)
    from megatron.neox_arguments import UserError

    try:
        show(options)
    except UserError as problem:
        sys.stderr.write(problem.error_lines("replay.py"))
        return 1
    return 0


if __name__ == "__main__":
    run_command(main)
