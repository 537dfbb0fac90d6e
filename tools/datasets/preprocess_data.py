"""Tokenises text into `.bin/.idx` pairs for training, with the flags, file names and bytes of GPT-NeoX.

    python tools/datasets/preprocess_data.py --input data.jsonl --output-prefix data/mine \\
        --tokenizer-type HFTokenizer --vocab-file tokenizer.json --append-eod --workers 8

An interrupted job resumes when you run the same command again.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402
from tools.datasets.run_job import add_input_flags, add_text_flags, add_work_flags, run, text_job  # noqa: E402


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    data = parser.add_argument_group("input data")
    add_input_flags(data, "text")
    data.add_argument(
        "--text-column", help="read this key or column instead of --jsonl-keys, and write PREFIX_text_document"
    )
    add_text_flags(parser.add_argument_group("tokenizer"))
    add_work_flags(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    names = ["text"] if options.text_column else options.jsonl_keys
    job = text_job(options, [options.text_column] if options.text_column else options.jsonl_keys)
    prefixes = [f"{options.output_prefix}_{name}_document" for name in names]
    run("preprocess_data.py", options, lambda: (job, prefixes))


if __name__ == "__main__":
    run_command(main)
