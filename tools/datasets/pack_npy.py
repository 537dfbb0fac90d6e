"""Writes the tokens of a dataset as .npy files: documents are concatenated and cut into rows of seq_length +
1.

    python tools/datasets/pack_npy.py data/x_text_document data/x_rows --seq-length 2048

Training can use the folder as a data path, like a prefix. With pack_impl: unpacked each row is a sample; with
packed the rows are concatenated.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.data import DataError, write_npy  # noqa: E402
from megatron.data.open_dataset import open_tokens  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402


def main(argv: Sequence[str] | None = None) -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument("prefix", help="dataset: path without .bin/.idx")
    parser.add_argument("folder", help="folder to write; it must not exist yet")
    parser.add_argument("--seq-length", type=int, required=True, help="tokens of a sample; a row has one token more")
    parser.add_argument("--rows-per-shard", type=int, default=1 << 16, help="rows per file (default: 65536)")
    options = parser.parse_args(argv)
    if options.seq_length < 1 or options.rows_per_shard < 1:
        parser.error("--seq-length and --rows-per-shard must be at least 1")
    try:
        rows, num_left = write_npy(
            open_tokens(options.prefix), options.folder, options.seq_length + 1, options.rows_per_shard
        )
    except DataError as problem:
        sys.exit(f"pack_npy.py: error: {problem}")
    print(
        f"{options.folder}: {rows} rows of {options.seq_length + 1} tokens; the last {num_left} tokens do not fill "
        "a row and were left out"
    )


if __name__ == "__main__":
    run_command(main)
