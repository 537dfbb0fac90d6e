"""Merge all `.bin/.idx` pairs of a folder, in order of their names, into one.

python tools/datasets/merge_datasets.py --input data/parts --output-prefix data/whole
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.data import DataError  # noqa: E402
from megatron.data.indexed_dataset import index_path  # noqa: E402
from megatron.data.preprocessing.merging import merge  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402


def main(argv: Sequence[str] | None = None) -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--input", type=Path, required=True, help="folder with the pairs")
    parser.add_argument("--output-prefix", required=True, help="writes PREFIX.bin and PREFIX.idx")
    parser.add_argument("--match", default="*", help="only pairs of such a name, as *_text_document (*)")
    options = parser.parse_args(argv)
    try:
        if not options.input.is_dir():
            raise DataError(f"{options.input}: no such folder")
        output = index_path(options.output_prefix).resolve()  # of an earlier run, it is no part of itself
        files = [file for file in sorted(options.input.glob(f"{options.match}.idx")) if file.resolve() != output]
        merged = merge([str(file).removesuffix(".idx") for file in files], options.output_prefix)
    except DataError as problem:
        sys.exit(f"merge_datasets.py: error: {problem}")
    size = f"{len(merged.doc_idx) - 1} documents, {len(merged.tokens)} tokens"
    print(f"{merged.prefix}.bin, .idx: {size} of {len(files)} pairs")


if __name__ == "__main__":
    run_command(main)
