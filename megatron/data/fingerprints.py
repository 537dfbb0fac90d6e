"""Computes fingerprints that identify a run's data and the order of its samples, whatever the number of
samples."""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

from megatron.data.blending import normalized
from megatron.data.errors import DataError
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.open_dataset import open_dataset
from megatron.data.preferences.preference_sets import preference_files
from megatron.data.run_datasets import SampleSet
from megatron.data.set_config import (
    SET_PREFIX,
    blend_weights,
    companion_paths,
    data_prefixes,
    data_seed,
    masked_token_ids,
    names_missing_data,
    storage,
)
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.methods import declaration_of, declarations, further_sets
from megatron.neox_arguments.values.data_split import cuts_listed_paths
from megatron.neox_arguments.values.losses import least_prefix_saving, sample_kind

FINGERPRINT_BLOCKS = 64
FINGERPRINT_BLOCK = 1 << 16
SAMPLES_HASHED = 64  # at most, to identify an order of samples

ORDER_KEYS = (
    "seq_length", "train_impl", "pack_impl", "allow_chopped", "truncate_documents", "drop_last",
    "compat_group_texts_batch", "compat_pack_impl", "max_length", "max_prompt_length", "limit_samples",
)  # fmt: skip
"""Configuration keys that decide which samples the data files give, and in which order."""


def fingerprint(prefix: str, data_impl: str = "infer") -> dict[str, str | int]:
    """Return values that identify the content of the dataset at data path `prefix`, without reading all of
    it.

    idx_sha256: SHA-256 of the `.idx`. bin_bytes: size of the `.bin`. bin_blocks_sha256: SHA-256 over 64
      evenly spaced blocks of 64 KiB of the `.bin` (all of it if smaller; as many blocks over all `.npy`
      files).
    """
    return _fingerprint(open_dataset(prefix, data_impl))


def _fingerprint(indexed: IndexedDataset) -> dict[str, str | int]:
    digest, total = hashlib.sha256(), 0
    blocks = max(2, FINGERPRINT_BLOCKS // len(indexed.data_files))
    for path in indexed.data_files:
        size = path.stat().st_size
        total += size
        with open(path, "rb") as file:
            if size <= blocks * FINGERPRINT_BLOCK:
                digest.update(file.read())
                continue
            for block in range(blocks):
                file.seek((size - FINGERPRINT_BLOCK) * block // (blocks - 1))
                digest.update(file.read(FINGERPRINT_BLOCK))
    return {"idx_sha256": indexed.index_sha256, "bin_bytes": total, "bin_blocks_sha256": digest.hexdigest()}


class FileStamp(NamedTuple):
    """Values that differ once a file was written to or replaced. changed_ns: time of the last change."""

    inode: int
    size: int
    changed_ns: int


def data_stamps(args: NeoXArgs) -> dict[str, FileStamp]:
    """Return {path: stamp} of the files of a run's datasets; a missing file is left out."""
    if sample_kind(args) == "generated":
        files = [Path(path) for path in declaration_of(args).prompt_files(args)]
    elif args.dataset_impl == "pairwise":
        files = [file for paths in preference_files(args).values() for path in paths for file in _files_of(path)]
    else:
        lists = [paths for name, data in data_prefixes(args).items() for paths in (data, *companion_paths(args, name))]
        files = [file for paths in lists for path in paths or () for file in _files_of(path)]
    stats = {str(file): file.stat() for file in files if file.exists()}
    return {path: FileStamp(stat.st_ino, stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}


def _files_of(prefix: str) -> list[Path]:
    folder = Path(prefix)
    return sorted(folder.glob("*.npy")) if folder.is_dir() else [Path(f"{prefix}{end}") for end in (".bin", ".idx")]


@names_missing_data
def data_fingerprint(args: NeoXArgs) -> dict[str, dict[str, Any]]:
    """Return {name of a dataset: `fingerprint` of its files} for all datasets of a run.

    The paths of the files do not count. The members of a blend are named `train_0`, `train_1`, ..., each with
    its normalised weight.
    """
    fingerprints: dict[str, dict[str, Any]] = {}
    if sample_kind(args) == "generated":
        prompts = declaration_of(args).prompt_files(args)
        return {f"prompts_{i}": _file_fingerprint(path) for i, path in enumerate(prompts)}
    if args.dataset_impl == "pairwise":
        files = preference_files(args).items()
        named_paths = [(f"{name}_{i}", path) for name, paths in files for i, path in enumerate(paths)]
        return {name: fingerprint(path, args.data_impl) for name, path in named_paths}
    for name, prefixes in data_prefixes(args).items():
        if len(prefixes) == 1:
            data = fingerprint(prefixes[0], storage(args, name))
            fingerprints[name] = {**data, **_companion_fingerprints(args, name, 0)}
            continue
        members = [open_dataset(prefix, args.data_impl) for prefix in prefixes]
        weights: list[Any] = normalized(blend_weights(args, name, members)).tolist()
        schedule = args.train_data_weight_schedule
        if schedule is not None and name == "train":
            phases = zip(*(normalized(phase).tolist() for phase in schedule["weights"]), strict=True)
            weights = [{"until": list(schedule["until"]), "weights": list(phase)} for phase in phases]
        for i, (indexed, weight) in enumerate(zip(members, weights, strict=True)):
            companions = _companion_fingerprints(args, name, i)
            fingerprints[f"{name}_{i}"] = {**_fingerprint(indexed), **companions, "weight": weight}
    return fingerprints


def _file_fingerprint(path: str) -> dict[str, str | int]:
    try:
        content = Path(path).read_bytes()
    except OSError as problem:
        raise DataError(f"{path}: cannot be read ({problem.strerror})") from problem
    return {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}


def _companion_fingerprints(args: NeoXArgs, name: str, member: int) -> dict[str, Any]:
    kinds = zip(("labels", "rewards"), companion_paths(args, name), strict=True)
    return {kind: fingerprint(paths[member]) for kind, paths in kinds if paths is not None}


def path_key(name: str, kind: str = "") -> str:
    """Return the configuration key that lists the files of entry `name` of `data_fingerprint`, such as
    `train_data_paths`.

    kind: "labels" or "rewards" for the key that lists these files; "" for the key of the text.
    """
    if name.startswith(SET_PREFIX):
        return "valid_set_labels" if kind == "labels" else "valid_sets"
    split, *side = name.rstrip("0123456789").rstrip("_").split("_")
    if split == "prompts":
        return next(declaration.prompts_key for declaration in declarations() if declaration.prompts_key)
    if split == "all":
        return "data_path"
    if (declared := further_sets().get(split)) is not None:
        return declared.labels if kind == "labels" else declared.data
    kind = kind or "".join(part for part in side if part in ("labels", "rewards"))
    words = [part for part in side if part != kind] + [split] + ([kind.rstrip("s")] if kind else [])
    return "_".join([*words, "data_paths"])


def order_keys(args: NeoXArgs, epochs: int | None = None) -> dict[str, Any]:
    """Return {key: value} of all configuration keys that, with `data_fingerprint` and `seed`, decide the
    samples' order.

    They also decide which tokens are trained. epochs: `train_epochs`, which a started run no longer has in
    args; only whether it is None counts.
    """
    keys = {"train_epochs": epochs is not None, **{key: getattr(args, key) for key in ORDER_KEYS}}
    keys["data_seed"] = data_seed(args)
    if sample_kind(args) == "pairs" and args.pack_impl == "best_fit":
        keys["prefix_sharing"] = least_prefix_saving(args) is not None
    keys |= declaration_of(args).order_keys(args)
    if sample_kind(args) == "generated":
        keys["train_batch_size"] = args.train_batch_size  # the number of answers in a generation
    keys["split"] = args.split.replace(" ", "") if args.data_path or cuts_listed_paths(args) else None
    keys["loss_mask_token_ids"] = sorted(masked_token_ids(args)) or None
    if args.train_data_weight_schedule is not None:
        keys["train_batch_size"] = args.train_batch_size  # the schedule's phases end at steps
    return keys


def order_sha256(dataset: SampleSet, samples: int) -> str:
    """Return a hex SHA-256 that identifies the order of the first `samples` samples of a dataset.

    It hashes where up to 64 evenly spaced samples begin (document and token), including the first and the
    last.
    """
    digest, count = hashlib.sha256(), min(samples, SAMPLES_HASHED)
    for number in range(count):
        index = (samples - 1) * number // max(1, count - 1)
        digest.update(repr(next(iter(dataset.pieces(index)))).encode())
    return digest.hexdigest()
