"""Averages the weights of checkpoints of one model, in fp32, with one layer in memory at a time.

    python tools/ckpts/average.py --output_dir averaged checkpoints/run/global_step{800,900,1000}

The result has the iteration, layout and tokenizer of the last named checkpoint, and no optimizer state. It
appears in the output folder only when it is complete. After an interruption, run the same command again.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.neox_arguments import UserError  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402
from tools.ckpts.flags import local, place, progress  # noqa: E402


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    parser.add_argument("checkpoints", type=place, nargs="+", help="checkpoints global_stepN of the same model")
    parser.add_argument(
        "--output_dir", "--output-dir", type=place, required=True, help="folder in which global_stepN is written"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    from megatron.checkpointing.averaging import average

    try:
        with local(options, ["checkpoints"], ["output_dir"]):
            path = average(options.checkpoints, options.output_dir, progress=progress)
    except (UserError, OSError) as problem:
        sys.exit(f"average.py: error: {problem}")
    print(f"{path}: wrote the mean of {len(options.checkpoints)} checkpoints")


if __name__ == "__main__":
    run_command(main)
