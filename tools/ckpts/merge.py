"""Merges the shards of a checkpoint: writes it for one tensor rank and one pipeline stage, with optimizer
state.

    python tools/ckpts/merge.py --input_dir checkpoints/run/global_step1000 --output_dir merged
    python tools/ckpts/merge.py --input_dir 20B/global_step150000 --output_dir merged --no-optimizer

It does the same as tools/ckpts/reshard.py --tp 1 --pp 1. With --pp 0 all weights are written into one file,
the format of GPT-NeoX without a pipeline.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.process import run_command  # noqa: E402
from tools.ckpts.reshard import parser, run  # noqa: E402


def main(argv: Sequence[str] | None = None) -> None:
    run("merge.py", argv, parser(1, 1, __doc__))


if __name__ == "__main__":
    run_command(main)
