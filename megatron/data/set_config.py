"""Reads the files, weights, sizes and cache folders of a run's datasets from the configuration."""

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
from megatron.neox_arguments.methods import further_sets
from megatron.neox_arguments.values.losses import sample_kind, writes_pairs
from megatron.neox_arguments.values.remote_paths import is_remote
from megatron.neox_arguments.values.valid_sets import paths_by_set

P = ParamSpec("P")
T = TypeVar("T")
SET_NAMES = ("train", "valid", "test")
SET_PREFIX = "valid/"  # a set NAME of `valid_sets` is called valid/NAME among a run's datasets


def masked_token_ids(args: NeoXArgs) -> tuple[int, ...]:
    """Return the token ids of `loss_mask_token_ids`.

    Raises DataError if the list holds a text that was not replaced by its token id.
    """
    ids = []
    for token in args.loss_mask_token_ids or ():
        if isinstance(token, str):
            raise DataError(f'loss_mask_token_ids: "{token}" was not replaced by its token id; write the id instead')
        ids.append(token)
    return tuple(ids)


def trains_preferences(args: NeoXArgs) -> bool:
    """Return whether samples are responses that are compared or judged (`train_impl` dpo, kto, ...), not
    plain text."""
    return sample_kind(args) in ("pairs", "answers")


def rows_per_sample(args: NeoXArgs) -> int:
    """Return the number of rows of seq_length tokens in one sample.

    It is two for a preference pair, unless its responses are packed into one row; otherwise one.
    """
    separate_rows = sample_kind(args) == "pairs" and args.pack_impl != "best_fit"
    return 2 if separate_rows or writes_pairs(args) else 1


def split_boundaries(split: str, size: int) -> tuple[int, int, int, int]:
    """Return the boundaries of train, validation and test among `size` documents.

    split: such as "969, 30, 1" or "949/50/1". Sizes are rounded as in NeoX. All boundaries are then shifted
      so that the last is `size`, which changes the size of train only. Raises DataError unless `split` is one
      to three numbers, none negative, not all 0.
    """
    try:
        parts = [float(part) for part in split.split("," if "," in split else "/")][:3]
    except ValueError:
        raise DataError(f'split: "{split}" is not a list of up to three numbers such as "969, 30, 1"') from None
    total = sum(parts)
    if min(parts) < 0 or not 0 < total < math.inf:
        raise DataError(f'split: "{split}" needs numbers that are 0 or more, at least one of them above 0')
    boundaries = [0]
    for part in parts + [0.0] * (3 - len(parts)):
        boundaries.append(boundaries[-1] + round(part / total * float(size)))
    excess = boundaries[-1] - size
    # max(): with very few documents NeoX's rounding can make the first boundary negative
    train, valid, test = (max(0, boundary - excess) for boundary in boundaries[1:])
    return 0, train, valid, test


def data_seed(args: NeoXArgs) -> int:
    """Return the seed of the order of samples: the key `data_seed`, or `seed` if that is not set."""
    return args.seed if args.data_seed is None else args.data_seed


def requested_samples(args: NeoXArgs, train_batch_size: int, data_state: DataState) -> tuple[int, int, int]:
    """Return how many samples the train, validation and test sets need, counted as in NeoX.

    The training set needs the samples consumed so far and those of the remaining steps.
    """
    evaluations = args.train_iters // args.eval_interval + 1
    return (
        data_state.consumed_samples + max(0, args.train_iters - data_state.iteration) * train_batch_size,
        evaluations * args.eval_iters * train_batch_size,
        args.eval_iters * train_batch_size,
    )


def index_cache_dir(args: NeoXArgs, prefix: str) -> Path:
    """Return the folder of index maps for the data at `prefix`.

    It is `index_cache_dir` if set, else `index_cache` in the `save` folder, else `index_cache` next to the
    data.
    """
    if args.index_cache_dir:
        return Path(args.index_cache_dir)
    # The local folder for a remote `save` is different on each machine, so it cannot be shared
    local_save = None if is_remote(args.save) else args.save
    return Path(local_save or Path(prefix).parent) / "index_cache"


def hash_cache_dir(args: NeoXArgs, prefix: str) -> Path:
    """Return the folder that caches the hashes of a dataset's files (`cached_sha256`)."""
    return index_cache_dir(args, prefix) / "file_hashes"


def data_prefixes(args: NeoXArgs) -> dict[str, tuple[str, ...]]:
    """Return {set name: data paths of the set, without .bin/.idx}.

    Names: train, valid, test, or "all" for `data_path`, which `split` divides; the extra training sets that
      the training method declares (`further_sets`); and valid/NAME for each of `valid_sets`. Raises DataError
      if there is no training data.
    """
    further = {SET_PREFIX + name: paths for name, paths in valid_sets(args).items()}
    further |= {n: (path,) for n, declared in further_sets().items() if (path := declared.path(args)) is not None}
    if args.data_path:
        return {"all": (args.data_path,), **further}
    lists = zip(SET_NAMES, (args.train_data_paths, args.valid_data_paths, args.test_data_paths), strict=True)
    prefixes = {name: paths for name, paths in lists if paths}
    if "train" not in prefixes:
        raise DataError("no training data: set data_path (with split), or train_data_paths")
    return {**prefixes, **further}


def valid_sets(args: NeoXArgs) -> dict[str, tuple[str, ...]]:
    """Return the data paths of each named validation set."""
    return paths_by_set(args.valid_sets)


def valid_set_labels(args: NeoXArgs) -> dict[str, tuple[str, ...]]:
    """Return the paths of the labels of the named validation sets that have labels."""
    return paths_by_set(args.valid_set_labels)


def names_missing_data(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function whose first argument is the configuration, to improve its error for a missing data
    file.

    The DataError then begins with the configuration key that lists the file, and where that key was set.
    """

    @wraps(function)
    def wrapper(*arguments: P.args, **options: P.kwargs) -> T:
        try:
            return function(*arguments, **options)
        except MissingDataError as problem:
            args: Any = arguments[0]
            keys = [name for name in keys_of(type(args)) if name.endswith(("data_path", "data_paths"))]
            for key, sets in (("valid_sets", valid_sets(args)), ("valid_set_labels", valid_set_labels(args))):
                for name, paths in sets.items():
                    if problem.prefix in paths:
                        raise DataError(f"{args.origin(key)}: {key}.{name}: {problem}") from problem
            further_keys = [key for declared in further_sets().values() for key in (declared.data, declared.labels)]
            for key in (*keys, *further_keys):
                value = getattr(args, key) or ()
                if problem.prefix in ((value,) if isinstance(value, str) else value):
                    hint = f"; without validation: --set {key}=null eval_iters=0" if key == "valid_data_paths" else ""
                    raise DataError(f"{args.origin(key)}: {key}: {problem}{hint}") from problem
            raise

    return wrapper


def storage(args: NeoXArgs, name: str) -> str:
    """Return the `data_impl` of a set, which says in which format its files are read."""
    declared = further_sets().get(name)
    return args.data_impl if declared is None else getattr(args, declared.storage)


def companion_paths(args: NeoXArgs, name: str) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """Return (label paths, reward paths) of a set, each with one path for each of its data paths.

    Either is None if the configuration lists no such paths.
    """
    labels = (args.train_label_data_paths, args.valid_label_data_paths, args.test_label_data_paths)
    rewards = (args.train_reward_data_paths, args.valid_reward_data_paths, args.test_reward_data_paths)
    if name.startswith(SET_PREFIX):
        return valid_set_labels(args).get(name.removeprefix(SET_PREFIX)), None
    if (declared := further_sets().get(name)) is not None:
        path = getattr(args, declared.labels)
        return (None if path is None else (path,)), None
    return (None, None) if name == "all" else (labels[SET_NAMES.index(name)], rewards[SET_NAMES.index(name)])


def blend_weights(args: NeoXArgs, name: str, members: Sequence[IndexedDataset]) -> tuple[float, ...]:
    """Return one weight for each dataset (member) that is blended into set `name`, not normalised.

    They are computed from the sizes of the datasets if `weight_by` or `weight_by_num_documents` is set;
    otherwise they are the listed weights, or all 1.
    """
    unit = "documents" if args.weight_by_num_documents else args.weight_by
    if unit is not None:
        sizes = [_size(indexed, unit) for indexed in members]
        return weights_by_documents(sizes, args.weighted_sampler_alpha, args.compat_weight_by_num_documents)
    if name.startswith(SET_PREFIX):
        return (1.0,) * len(members)
    weights = (args.train_data_weights, args.valid_data_weights, args.test_data_weights)[SET_NAMES.index(name)]
    return weights or (1.0,) * len(members)


def _size(indexed: IndexedDataset, unit: str) -> int:
    if unit == "documents":
        return len(indexed)
    tokens = int(indexed.sizes.sum(dtype=np.int64))
    return tokens * (indexed.dtype.itemsize if unit == "bytes" else 1)
