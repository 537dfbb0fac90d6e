"""Lines about the training data for the start of the log."""

import numpy as np

from megatron.data.labels import unlisted_labels
from megatron.data.open_dataset import open_dataset
from megatron.data.packing import packing_from_args
from megatron.data.set_config import companion_paths, data_prefixes, names_missing_data, storage
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.methods import declaration_of, further_sets
from megatron.neox_arguments.values.losses import sample_kind


@names_missing_data
def data_log_lines(args: NeoXArgs) -> list[str]:
    """Return log lines on truncated and left-out documents, unused label files, and steps on further sets.

    It reads full files. For preference sets, `Datasets.log_lines` reports this instead.
    """
    lines: list[str] = []
    if sample_kind(args) != "texts":
        return lines
    lines += declaration_of(args).log_lines(args)
    for name, prefixes in data_prefixes(args).items():
        unlisted = companion_paths(args, name)[0] is None
        key = "train_label_data_paths (with train_data_paths)" if name == "all" else f"{name}_label_data_paths"
        key = further_sets()[name].labels if name in further_sets() else key
        for prefix in prefixes:
            labels = unlisted and unlisted_labels(prefix, key)
            lines += [line for line in (labels, _truncated_documents(args, prefix, storage(args, name))) if line]
    return lines


def _truncated_documents(args: NeoXArgs, prefix: str, data_impl: str) -> str | None:
    """Return a line on the documents that are too long for a sample; None if there are none."""
    packing = packing_from_args(args)
    limits = [packing.truncate_documents] if packing.truncate_documents is not None else []
    if packing.unsplit_documents:
        limits.append(packing.width(args.seq_length))
    if not limits:
        return None
    sizes = open_dataset(prefix, data_impl).sizes
    long = sizes > min(limits)
    count, excess = int(np.count_nonzero(long)), int((sizes[long].astype(np.int64) - min(limits)).sum())
    if not count:
        return None
    are_truncated = packing.allow_chopped or min(limits) == packing.truncate_documents
    outcome = f"cut there, {excess} tokens in all" if are_truncated else "left out (allow_chopped: false)"
    return f"{prefix}: {count} of {len(sizes)} documents are longer than {min(limits)} tokens and are {outcome}"
