"""Tokenises text for training with a masked beginning: labels are -100 through the first --mask-before-token.

    python tools/datasets/preprocess_data_with_mask.py --input data.jsonl --output-prefix data/mine \\
        --tokenizer-type HFTokenizer --vocab-file tokenizer.json --append-eod --mask-before-token 222,34,27

It writes PREFIX_text_document and PREFIX_label_document, like GPT-NeoX. A document that does not contain
these tokens is trained completely, also as in GPT-NeoX; the report says how many there are.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.data import DataError  # noqa: E402
from megatron.data.preprocessing.chat_job import DelimiterJob  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402
from tools.datasets.run_job import add_input_flags, add_text_flags, add_work_flags, run, text_job  # noqa: E402


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    data = parser.add_argument_group("input data")
    add_input_flags(data, "text")
    data.add_argument(
        "--mask-before-token",
        help="token ids, separated by commas; each document is masked up to their first occurrence",
    )
    add_text_flags(parser.add_argument_group("tokenizer"))
    add_work_flags(parser)
    return parser.parse_args(argv)


def job_of(options: argparse.Namespace) -> DelimiterJob:
    """Returns the preprocessing job that the command-line flags describe.

    Raises DataError if --mask-before-token is missing or invalid, or for several --jsonl-keys."""
    if not options.mask_before_token:
        raise DataError("--mask-before-token is missing; to tokenise without a mask, use preprocess_data.py")
    try:
        delimiter = tuple(int(part) for part in options.mask_before_token.split(","))
    except ValueError:
        raise DataError(
            f"--mask-before-token {options.mask_before_token}: write token ids, separated by commas, such as 222,34,27"
        ) from None
    if len(options.jsonl_keys) > 1:
        raise DataError("--jsonl-keys: give only one key, because there is only one PREFIX_label_document")
    text = text_job(options, options.jsonl_keys)
    size = text.tokenizer().vocab_size
    if not all(0 <= part < size for part in delimiter):
        raise DataError(f"--mask-before-token {options.mask_before_token}: token ids must be from 0 to {size - 1}")
    return DelimiterJob(text, delimiter)


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    prefixes = [f"{options.output_prefix}_{name}_document" for name in (options.jsonl_keys[0], "label")]
    run("preprocess_data_with_mask.py", options, lambda: (job_of(options), prefixes))


if __name__ == "__main__":
    run_command(main)
