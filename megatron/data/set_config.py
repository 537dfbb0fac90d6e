"""What the configuration says of the sets of a run: their files, weights, sizes, and where their caches
lie."""

import math
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np

from megatron.data.blending import weights_by_documents
from megatron.data.errors import DataError, MissingDataError
from megatron.data.index_maps import DataState
from megatron.data.indexed_dataset import IndexedDataset
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.keys.declaration import keys_of
from megatron.neox_arguments.values.losses import sample_kind, writes_pairs
from megatron.neox_arguments.values.remote_paths import is_remote

P = ParamSpec("P")
T = TypeVar("T")
SET_NAMES = ("train", "valid", "test")
UNLEARNING_KEYS = {
    "forget": ("ga_dataset", "ga_label_dataset"),
    "retain": ("gd_retain_dataset", "gd_retain_label_dataset"),
}
"""The sets of unlearning, and the keys that name their files and their labels."""


def masked_token_ids(args: NeoXArgs) -> tuple[int, ...]:
    """The ids of `loss_mask_token_ids`. Raises DataError for a text that no tokenizer has looked up."""
    ids = []
    for token in args.loss_mask_token_ids or ():
        if isinstance(token, str):
            raise DataError(f'loss_mask_token_ids: "{token}" is a text; only a tokenizer knows its id: give the id')
        ids.append(token)
    return tuple(ids)


def trains_preferences(args: NeoXArgs) -> bool:
    """Whether samples are responses that are compared or judged (`train_impl` dpo, kto, ...), not plain
    tokens."""
    return sample_kind(args) in ("pairs", "answers")


def rows_per_sample(args: NeoXArgs) -> int:
    """Rows of seq_length tokens in one sample: two for a pair, unless its responses are packed into one
    row."""
    apart = sample_kind(args) == "pairs" and args.pack_impl != "best_fit"
    return 2 if apart or writes_pairs(args) else 1


def split_boundaries(split: str, size: int) -> tuple[int, int, int, int]:
    """Boundaries of train, validation and test among `size` documents for a `split` such as "969, 30, 1" or
    "949/50/1".

    Rounding is NeoX's: the excess is taken from every boundary, so that train carries it. Raises DataError
    for a split that is not up to three numbers, none of them negative and at least one above zero.
    """
    try:
        parts = [float(part) for part in split.split("," if "," in split else "/")][:3]
    except ValueError:
        raise DataError(f'split: "{split}" is not up to three numbers such as "969, 30, 1"') from None
    total = sum(parts)
    if min(parts) < 0 or not 0 < total < math.inf:
        raise DataError(f'split: "{split}" needs numbers that are not negative, at least one above zero')
    boundaries = [0]
    for part in parts + [0.0] * (3 - len(parts)):
        boundaries.append(boundaries[-1] + round(part / total * float(size)))
    excess = boundaries[-1] - size
    # max(): with very few documents upstream's rounding can make the first boundary negative
    train, valid, test = (max(0, boundary - excess) for boundary in boundaries[1:])
    return 0, train, valid, test


def requested_samples(args: NeoXArgs, train_batch_size: int, data_state: DataState) -> tuple[int, int, int]:
    """NeoX's sample counts of the train, validation and test sets.

    The training set has the samples consumed so far and those of the steps still to come.
    """
    evaluations = args.train_iters // args.eval_interval + 1
    return (
        data_state.consumed_samples + max(0, args.train_iters - data_state.iteration) * train_batch_size,
        evaluations * args.eval_iters * train_batch_size,
        args.eval_iters * train_batch_size,
    )


def index_cache_dir(args: NeoXArgs, prefix: str) -> Path:
    """The folder of index maps: `index_cache_dir`, else `index_cache` in the `save` folder, else beside the
    data."""
    if args.index_cache_dir:
        return Path(args.index_cache_dir)
    # A `save` folder that stands for a remote one is each machine's own, so it cannot be shared
    local_save = None if is_remote(args.save) else args.save
    return Path(local_save or Path(prefix).parent) / "index_cache"


def hash_cache_dir(args: NeoXArgs, prefix: str) -> Path:
    """The folder in which the hashes of a set's files are kept (`cached_sha256`)."""
    return index_cache_dir(args, prefix) / "file_hashes"


def data_prefixes(args: NeoXArgs) -> dict[str, tuple[str, ...]]:
    """Set name (or "all" for `data_path`, which `split` divides) -> prefixes of its `.bin/.idx` pairs.

    Raises DataError when there is no training data.
    """
    unlearning = {name: (path,) for name in UNLEARNING_KEYS if (path := unlearning_path(args, name)) is not None}
    if args.data_path:
        return {"all": (args.data_path,), **unlearning}
    lists = zip(SET_NAMES, (args.train_data_paths, args.valid_data_paths, args.test_data_paths), strict=True)
    prefixes = {name: paths for name, paths in lists if paths}
    if "train" not in prefixes:
        raise DataError("no training data: set data_path (with split), or train_data_paths")
    return {**prefixes, **unlearning}


def unlearning_path(args: NeoXArgs, name: str) -> str | None:
    """The prefix of the forget or retain set; None where the run has none."""
    if name == "forget":
        return args.ga_dataset
    return args.gd_retain_dataset if args.gd_mode else None


def names_missing_data(function: Callable[P, T]) -> Callable[P, T]:
    """A function of the configuration that opens its sets; what it says of a file that is not there begins
    with the key that names it, and where that was set."""

    @wraps(function)
    def named(*given: P.args, **options: P.kwargs) -> T:
        try:
            return function(*given, **options)
        except MissingDataError as problem:
            args: Any = given[0]
            keys = [name for name in keys_of(type(args)) if name.endswith(("data_path", "data_paths"))]
            for key in (*keys, *(key for names in UNLEARNING_KEYS.values() for key in names)):
                value = getattr(args, key) or ()
                if problem.prefix in ((value,) if isinstance(value, str) else value):
                    more = f"; without validation: --set {key}=null eval_iters=0" if key == "valid_data_paths" else ""
                    raise DataError(f"{args.origin(key)}: {key}: {problem}{more}") from problem
            raise

    return named


def storage(args: NeoXArgs, name: str) -> str:
    """How the files of a set are read (`data_impl`)."""
    if name == "forget":
        return args.ga_dataset_impl
    return args.gd_retain_dataset_impl if name == "retain" else args.data_impl


def companion_paths(args: NeoXArgs, name: str) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """(label paths, reward paths) of a set, one for each of its data paths; None where none are listed."""
    labels = (args.train_label_data_paths, args.valid_label_data_paths, args.test_label_data_paths)
    rewards = (args.train_reward_data_paths, args.valid_reward_data_paths, args.test_reward_data_paths)
    if name in UNLEARNING_KEYS:
        path = {"forget": args.ga_label_dataset, "retain": args.gd_retain_label_dataset}[name]
        return (None if path is None else (path,)), None
    return (None, None) if name == "all" else (labels[SET_NAMES.index(name)], rewards[SET_NAMES.index(name)])


def blend_weights(args: NeoXArgs, name: str, members: Sequence[IndexedDataset]) -> tuple[float, ...]:
    """The weights by which the members of a set are blended: listed, or from their sizes; not normalised."""
    unit = "documents" if args.weight_by_num_documents else args.weight_by
    if unit is not None:
        sizes = [_size(indexed, unit) for indexed in members]
        return weights_by_documents(sizes, args.weighted_sampler_alpha, args.compat_weight_by_num_documents)
    weights = (args.train_data_weights, args.valid_data_weights, args.test_data_weights)[SET_NAMES.index(name)]
    return weights or (1.0,) * len(members)


def _size(indexed: IndexedDataset, unit: str) -> int:
    if unit == "documents":
        return len(indexed)
    tokens = int(indexed.sizes.sum(dtype=np.int64))
    return tokens * (indexed.dtype.itemsize if unit == "bytes" else 1)
