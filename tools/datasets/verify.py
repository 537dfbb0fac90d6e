"""Check datasets whole: file sizes, pointers, document boundaries, ids within the vocabulary, labels,
rewards.

    python tools/datasets/verify.py data/mine_text_document --vocab-file tokenizer.json
    python tools/datasets/verify.py data/mine            # all that --output-prefix data/mine wrote

Says the first bad document and ends with 1, or what was found and ends with 0.
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
    parser.add_argument("prefix", nargs="+", help="data paths without .bin/.idx, or what --output-prefix was")
    parser.add_argument("--vocab-size", type=int, help="ids must be below it; unset: the tokenizer's, if one is given")
    add_tokenizer_flags(parser, "HFTokenizer")
    return parser.parse_args(argv)


def describe(found: VerifiedDataset, vocab_size: int | None) -> str:
    line = f"{found.prefix}: {found.documents} documents, {found.tokens} values, {found.dtype}"
    if found.trained is not None:
        return f"{line}, {found.trained} trained, {found.tokens - found.trained} masked"
    if found.ids is None:
        return line
    limit = "no vocabulary given to compare with" if vocab_size is None else f"vocabulary {vocab_size}"
    return f"{line}, ids {found.ids[0]} to {found.ids[1]} ({limit})"


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
