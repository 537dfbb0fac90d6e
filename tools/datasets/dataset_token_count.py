"""Counts documents and tokens of datasets: `.bin/.idx` pairs, also in older formats, and folders of `.npy`
files.

python tools/datasets/dataset_token_count.py data/a_text_document data/b_text_document.idx
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.data import DataError, open_dataset  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402


def main(argv: Sequence[str] | None = None) -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument(
        "paths", nargs="+", help="datasets: a PREFIX, PREFIX.bin, PREFIX.idx, or a folder of .npy files"
    )
    options = parser.parse_args(argv)
    documents = tokens = 0
    try:
        for path in options.paths:
            dataset = open_dataset(path.removesuffix(".idx").removesuffix(".bin"))
            documents, tokens = documents + len(dataset.doc_idx) - 1, tokens + len(dataset.tokens)
            print(f"{dataset.prefix}: {len(dataset.doc_idx) - 1} documents, {len(dataset.tokens)} tokens")
    except DataError as problem:
        sys.exit(f"dataset_token_count.py: error: {problem}")
    print(f"Total: {documents} documents, {tokens} tokens")


if __name__ == "__main__":
    run_command(main)
