"""What a run should know about its data before it trains: lines for the start of the log."""

import numpy as np

from megatron.data.labels import unlisted_labels
from megatron.data.open_dataset import open_dataset
from megatron.data.packing import packing_from_args
from megatron.data.set_config import UNLEARNING_KEYS, companion_paths, data_prefixes, names_missing_data, storage
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.values.losses import sample_kind
from megatron.neox_arguments.values.unlearning import ascent_steps, is_ascent


@names_missing_data
def data_log_lines(args: NeoXArgs) -> list[str]:
    """Lines on labels that lie beside a set but are not listed, and on documents that are cut or left out.

    Reads whole files. Preference sets say this in `Datasets.log_lines` instead.
    """
    lines: list[str] = []
    if sample_kind(args) != "texts":
        return lines
    if args.ga_dataset is not None:
        lines.append(_steps_that_unlearn(args))
    for name, prefixes in data_prefixes(args).items():
        unlisted = companion_paths(args, name)[0] is None
        key = "train_label_data_paths (with train_data_paths)" if name == "all" else f"{name}_label_data_paths"
        key = UNLEARNING_KEYS[name][1] if name in UNLEARNING_KEYS else key
        for prefix in prefixes:
            labels = unlisted and unlisted_labels(prefix, key)
            lines += [line for line in (labels, _cut_documents(args, prefix, storage(args, name))) if line]
    return lines


def _steps_that_unlearn(args: NeoXArgs) -> str:
    """A line on how many steps are on the forget set: in a short run there may be none."""
    count = ascent_steps(args, 0, args.train_iters)
    what = f"minus the loss of {args.ga_dataset}"
    if args.gd_mode:
        what = f"{args.gd_retain_weight:g} x the loss of {args.gd_retain_dataset} {what}"
    if not count:
        return f"ga_dataset: none of {args.train_iters} steps is on it (ga_mode: {args.ga_mode}): nothing is forgotten"
    first = next(step for step in range(args.train_iters) if is_ascent(args, step)) + 1
    return f"ga_dataset: {count} of {args.train_iters} steps minimise {what}; the first is step {first}"


def _cut_documents(args: NeoXArgs, prefix: str, data_impl: str) -> str | None:
    """A line on the documents that are too long for a sample, None where there are none."""
    packing = packing_from_args(args)
    limits = [packing.truncate_documents] if packing.truncate_documents is not None else []
    if packing.whole_documents:
        limits.append(packing.width(args.seq_length))
    if not limits:
        return None
    sizes = open_dataset(prefix, data_impl).sizes
    long = sizes > min(limits)
    count, over = int(np.count_nonzero(long)), int((sizes[long].astype(np.int64) - min(limits)).sum())
    if not count:
        return None
    are_cut = packing.allow_chopped or min(limits) == packing.truncate_documents
    what = f"cut there, {over} tokens in all" if are_cut else "left out (allow_chopped: false)"
    return f"{prefix}: {count} of {len(sizes)} documents are longer than {min(limits)} tokens and are {what}"
