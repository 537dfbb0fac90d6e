"""Merge all `.bin/.idx` pairs of a folder, in order of their names, into one.

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
    """Join the pairs `prefixes`, in their order, into the pair `output_prefix`, and open it. Raises DataError
    if their types differ, or if text is mixed with labels or rewards."""
    if not prefixes:
        raise DataError("nothing to merge: no pair of .bin and .idx files was found")
    kinds = {next((end for end in COMPANIONS if str(prefix).endswith(end)), "_document"): prefix for prefix in prefixes}
    if len(kinds) > 1:
        raise DataError(f"{' and '.join(map(str, kinds.values()))} are of different kinds: merge each kind separately")
    sets = [IndexedDataset(prefix) for prefix in prefixes]
    for dataset in sets[1:]:
        if dataset.dtype != sets[0].dtype:
            raise DataError(
                f"{dataset.prefix} holds {dataset.dtype}, {sets[0].prefix} {sets[0].dtype}: the tokenizers differ"
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
