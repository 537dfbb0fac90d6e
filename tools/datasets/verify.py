"""Checks datasets completely: file sizes, pointers, document boundaries, token ids, labels and rewards.

    python tools/datasets/verify.py data/mine_text_document --vocab-file tokenizer.json
    python tools/datasets/verify.py data/mine            # all files that --output-prefix data/mine wrote

If a document is bad, prints the first bad document and exits with 1. Otherwise prints counts and exits with
0.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.data import DataError  # noqa: E402
from megatron.data.inspection.file_groups import find_file_groups  # noqa: E402
from megatron.data.inspection.verify import VerifiedDataset, verify  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402
from megatron.tokenizer import TokenizerError, make_tokenizer  # noqa: E402
from tools.datasets.run_job import add_tokenizer_flags, tokenizer_of  # noqa: E402


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    parser.add_argument(
        "prefix", nargs="+", help="datasets: paths without .bin/.idx, or the --output-prefix they were written with"
    )
    parser.add_argument(
        "--vocab-size", type=int, help="token ids must be below it (default: the tokenizer's size, if one is given)"
    )
    add_tokenizer_flags(parser, "HFTokenizer")
    return parser.parse_args(argv)


def describe(report: VerifiedDataset, vocab_size: int | None) -> str:
    line = f"{report.prefix}: {report.documents} documents, {report.tokens} values, {report.dtype}"
    if report.trained is not None:
        return f"{line}, {report.trained} trained, {report.tokens - report.trained} masked"
    if report.ids is None:
        return line
    limit = "not compared with a vocabulary, as none is given" if vocab_size is None else f"vocabulary {vocab_size}"
    return f"{line}, ids {report.ids[0]} to {report.ids[1]} ({limit})"


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    vocab_size = options.vocab_size
    try:
        if vocab_size is None and (options.vocab_file or options.tokenizer_type == "CharLevelTokenizer"):
            vocab_size = make_tokenizer(*tokenizer_of(options)).vocab_size
        for prefix in options.prefix:
            for column in find_file_groups(prefix):
                for report in verify(column, vocab_size):
                    print(describe(report, vocab_size), flush=True)
    except (DataError, TokenizerError) as problem:
        sys.exit(f"verify.py: error: {problem}")


if __name__ == "__main__":
    run_command(main)
