"""What identifies the data of a run and decides the order of its samples. How many are drawn is no part of
it."""

import hashlib
from pathlib import Path
from typing import Any

from megatron.data.blending import normalized
from megatron.data.errors import DataError
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.open_dataset import open_dataset
from megatron.data.preferences.preference_sets import preference_files
from megatron.data.run_datasets import SampleSet
from megatron.data.sampler import data_seed
from megatron.data.set_config import (
    UNLEARNING_KEYS,
    blend_weights,
    companion_paths,
    data_prefixes,
    masked_token_ids,
    names_missing_data,
    storage,
)
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.values.data_split import cuts_listed_paths
from megatron.neox_arguments.values.losses import least_prefix_saving, sample_kind

FINGERPRINT_BLOCKS = 64
FINGERPRINT_BLOCK = 1 << 16
SAMPLES_HASHED = 64  # of an order, at most

ORDER_KEYS = (
    "seq_length", "train_impl", "pack_impl", "allow_chopped", "truncate_documents", "drop_last",
    "compat_group_texts_batch", "compat_pack_impl", "max_length", "max_prompt_length", "limit_samples",
)  # fmt: skip
"""Keys that decide which samples the files give, and in which order."""
ORDER_OF_PROMPTS = (
    "prompt_key", "chat", "num_generations", "shuffle", "max_prompt_length", "steps_per_generation", "num_iterations",
)  # fmt: skip
"""Sub-keys of `rollout` that do."""


def fingerprint(prefix: str, data_impl: str = "infer") -> dict[str, str | int]:
    """What identifies a dataset without reading all of it: SHA-256 of the `.idx`, size of the `.bin`, and
    SHA-256 over 64 evenly spaced blocks of 64 KiB of the `.bin` (all of it when smaller; so many blocks over
    all `.npy` files)."""
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


@names_missing_data
def data_fingerprint(args: NeoXArgs) -> dict[str, dict[str, Any]]:
    """Set name -> `fingerprint` of its files; independent of where the files lie. The members of a blend are
    `train_0`, `train_1`, ..., each with its normalised weight."""
    fingerprints: dict[str, dict[str, Any]] = {}
    if sample_kind(args) == "rollouts":
        assert args.rollout is not None
        return {f"prompts_{i}": _of_file(path) for i, path in enumerate(args.rollout["prompts"])}
    if args.dataset_impl == "pairwise":
        files = preference_files(args).items()
        listed = [(f"{name}_{i}", path) for name, paths in files for i, path in enumerate(paths)]
        return {name: fingerprint(path, args.data_impl) for name, path in listed}
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


def _of_file(path: str) -> dict[str, str | int]:
    try:
        content = Path(path).read_bytes()
    except OSError as problem:
        raise DataError(f"{path}: cannot be read ({problem.strerror})") from problem
    return {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}


def _companion_fingerprints(args: NeoXArgs, name: str, member: int) -> dict[str, Any]:
    kinds = zip(("labels", "rewards"), companion_paths(args, name), strict=True)
    return {kind: fingerprint(paths[member]) for kind, paths in kinds if paths is not None}


def path_key(name: str, kind: str = "") -> str:
    """The configuration key of an entry of `data_fingerprint`; kind: "labels" or "rewards" in it."""
    split, *side = name.rstrip("0123456789").rstrip("_").split("_")
    if split == "prompts":
        return "rollout.prompts"
    if split == "all":
        return "data_path"
    if split in UNLEARNING_KEYS:
        return UNLEARNING_KEYS[split][kind == "labels"]
    kind = kind or "".join(part for part in side if part in ("labels", "rewards"))
    words = [part for part in side if part != kind] + [split] + ([kind.rstrip("s")] if kind else [])
    return "_".join([*words, "data_paths"])


def order_keys(args: NeoXArgs, epochs: int | None = None) -> dict[str, Any]:
    """The keys that decide the order of samples and which of their tokens are trained, besides
    `data_fingerprint` and `seed`. epochs: `train_epochs`, which is not in args any more when a run begins;
    whether there is any decides, not how many."""
    keys = {"train_epochs": epochs is not None, **{key: getattr(args, key) for key in ORDER_KEYS}}
    keys["data_seed"] = data_seed(args)
    if sample_kind(args) == "pairs" and args.pack_impl == "best_fit":
        keys["prefix_sharing"] = least_prefix_saving(args) is not None
    if sample_kind(args) == "rollouts":
        assert args.rollout is not None
        keys |= {f"rollout.{key}": args.rollout[key] for key in ORDER_OF_PROMPTS}
        keys["train_batch_size"] = args.train_batch_size  # a generation is so many answers
    keys["split"] = args.split.replace(" ", "") if args.data_path or cuts_listed_paths(args) else None
    keys["loss_mask_token_ids"] = sorted(masked_token_ids(args)) or None
    if args.train_data_weight_schedule is not None:
        keys["train_batch_size"] = args.train_batch_size  # its borders are steps
    return keys


def order_sha256(dataset: SampleSet, samples: int) -> str:
    """Hex SHA-256 of where up to 64 evenly spaced ones of the first `samples` samples begin: document and
    token.

    The first and the last of these samples are among them.
    """
    digest, count = hashlib.sha256(), min(samples, SAMPLES_HASHED)
    for number in range(count):
        index = (samples - 1) * number // max(1, count - 1)
        digest.update(repr(next(iter(dataset.pieces(index)))).encode())
    return digest.hexdigest()
