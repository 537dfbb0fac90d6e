"""Merges all `.bin/.idx` pairs in a folder into one pair, in the order of their names.

python tools/datasets/merge_datasets.py --input data/parts --output-prefix data/whole
"""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.data import DataError  # noqa: E402
from megatron.data.files import sync, temporary  # noqa: E402
from megatron.data.indexed_dataset import (  # noqa: E402
    IndexedDataset,
    data_path,
    index_path,
    publish,
    write_index,
)
from megatron.data.inspection.file_groups import COMPANIONS  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402


def merge(prefixes: Sequence[str | Path], output_prefix: str | Path) -> IndexedDataset:
    """Concatenates `.bin/.idx` pairs, in the given order, into a new pair, and opens it.

    prefixes, output_prefix: paths without .bin/.idx. Raises DataError if the dtypes of tokens differ, or if
    text is mixed with labels or rewards."""
    if not prefixes:
        raise DataError("nothing to merge: no pair of .bin and .idx files was found")
    kinds = {next((end for end in COMPANIONS if str(prefix).endswith(end)), "_document"): prefix for prefix in prefixes}
    if len(kinds) > 1:
        raise DataError(
            f"{' and '.join(map(str, kinds.values()))} are of different kinds (text, labels, rewards); merge each kind "
            "separately"
        )
    sets = [IndexedDataset(prefix) for prefix in prefixes]
    for dataset in sets[1:]:
        if dataset.dtype != sets[0].dtype:
            raise DataError(
                f"{dataset.prefix} holds {dataset.dtype}, but {sets[0].prefix} holds {sets[0].dtype}, so their "
                "tokenizers differ; preprocess both with one tokenizer"
            )
    Path(output_prefix).parent.mkdir(parents=True, exist_ok=True)
    data, index = temporary(data_path(output_prefix)), temporary(index_path(output_prefix))
    try:
        with open(data, "wb") as file:
            for part in sets:
                with open(part.data_file, "rb") as source:
                    shutil.copyfileobj(source, file, 1 << 22)
        sync(data)
        write_index(index, sets[0].dtype.newbyteorder("="), lambda: ((part.sizes, part.doc_idx[1:]) for part in sets))
        publish(data, index, output_prefix)
    except OSError as problem:
        raise DataError(f"{output_prefix}: cannot be written ({problem.strerror})") from None
    finally:
        data.unlink(missing_ok=True)
        index.unlink(missing_ok=True)
    return IndexedDataset(output_prefix)


def main(argv: Sequence[str] | None = None) -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--input", type=Path, required=True, help="folder with the pairs to merge")
    parser.add_argument("--output-prefix", required=True, help="path PREFIX; PREFIX.bin and PREFIX.idx are written")
    parser.add_argument(
        "--match", default="*", help="merge only pairs whose name matches, such as *_text_document (default: *)"
    )
    options = parser.parse_args(argv)
    try:
        if not options.input.is_dir():
            raise DataError(f"{options.input}: no such folder; --input must be the folder that has the pairs")
        output = index_path(options.output_prefix).resolve()  # the result of an earlier run is not merged into itself
        files = [file for file in sorted(options.input.glob(f"{options.match}.idx")) if file.resolve() != output]
        merged = merge([str(file).removesuffix(".idx") for file in files], options.output_prefix)
    except DataError as problem:
        sys.exit(f"merge_datasets.py: error: {problem}")
    size = f"{len(merged.doc_idx) - 1} documents, {len(merged.tokens)} tokens"
    print(f"{merged.prefix}.bin, .idx: {size} from {len(files)} pairs")


if __name__ == "__main__":
    run_command(main)
