"""What a run should know about its data before it trains: lines for the start of the log."""

import numpy as np

from megatron.data.labels import unlisted_labels
from megatron.data.open_dataset import open_dataset
from megatron.data.packing import packing_from_args
from megatron.data.set_config import companion_paths, data_prefixes, trains_preferences
from megatron.neox_arguments import NeoXArgs


def data_log_lines(args: NeoXArgs) -> list[str]:
    """Lines on labels that lie beside a set but are not listed, and on documents that are cut or left out.

    Reads whole files. Preference sets say this in `Datasets.log_lines` instead.
    """
    lines: list[str] = []
    if trains_preferences(args):
        return lines
    for name, prefixes in data_prefixes(args).items():
        unlisted = companion_paths(args, name)[0] is None
        key = "train_label_data_paths (with train_data_paths)" if name == "all" else f"{name}_label_data_paths"
        for prefix in prefixes:
            lines += [
                line for line in (unlisted and unlisted_labels(prefix, key), _cut_documents(args, prefix)) if line
            ]
    return lines


def _cut_documents(args: NeoXArgs, prefix: str) -> str | None:
    """A line on the documents that are too long for a sample, None where there are none."""
    packing = packing_from_args(args)
    limits = [packing.truncate_documents] if packing.truncate_documents is not None else []
    if packing.whole_documents:
        limits.append(packing.width(args.seq_length))
    if not limits:
        return None
    sizes = open_dataset(prefix, args.data_impl).sizes
    long = sizes > min(limits)
    count, over = int(np.count_nonzero(long)), int((sizes[long].astype(np.int64) - min(limits)).sum())
    if not count:
        return None
    are_cut = packing.allow_chopped or min(limits) == packing.truncate_documents
    what = f"cut there, {over} tokens in all" if are_cut else "left out (allow_chopped: false)"
    return f"{prefix}: {count} of {len(sizes)} documents are longer than {min(limits)} tokens and are {what}"
