"""Merges several `.bin/.idx` pairs into one, by copying: documents are unchanged, in the order of the
pairs."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from megatron.data.errors import DataError
from megatron.data.files import temporary
from megatron.data.indexed_dataset import IndexedDataset, data_path, index_path, publish, write_index
from megatron.data.inspection.file_groups import COMPANIONS


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
            file.flush()
            os.fsync(file.fileno())
        write_index(index, sets[0].dtype.newbyteorder("="), lambda: ((part.sizes, part.doc_idx[1:]) for part in sets))
        publish(data, index, output_prefix)
    except OSError as problem:
        raise DataError(f"{output_prefix}: cannot be written ({problem.strerror})") from None
    finally:
        data.unlink(missing_ok=True)
        index.unlink(missing_ok=True)
    return IndexedDataset(output_prefix)
