"""Checks that a checkpoint belongs to this run: same model, seed, data, order of samples and tokenizer.

Every error message first names the key that changed. A run may change its length and its parallel layout, and
with a key its schedule; these are not checked here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.checkpointing import (
    CheckpointError,
    ConfigChange,
    Manifest,
    check_model,
    describe_changes,
    model_keys,
    read_manifest,
    responsible_key,
)
from megatron.checkpointing.manifest import MANIFEST
from megatron.checkpointing.resharding import PRECISIONS
from megatron.checkpointing.weight_files import describe_checkpoint
from megatron.data import DataState, path_key
from megatron.data.files import sha256
from megatron.neox_arguments import ModelArgs, NeoXArgs
from megatron.neox_arguments.keys.declaration import keys_of
from megatron.tokenizer import Tokenizer
from megatron.training.checkpoint.run_parts import MethodState
from megatron.training.checkpoint.source import CheckpointSource

_TOKENIZER_KEYS = ("vocab_file", "tokenizer_type", "merge_file", "eod_token")
_WEIGHT_KEYS = (
    "train_data_weight_schedule", "weight_by", "weight_by_num_documents", "weighted_sampler_alpha",
    "compat_weight_by_num_documents",
)  # fmt: skip


def continued(args: NeoXArgs, source: CheckpointSource) -> Manifest | None:
    """Returns the manifest of the checkpoint from which a run resumes.

    None for a new run, and for GPT-NeoX's checkpoints, which have no manifest.
    """
    if source.path is None or source.is_hf or (args.finetune and not source.goes_on):
        return None
    manifest = read_manifest(source.path)
    return manifest if manifest is not None and manifest.data else None


def restarts_data(args: NeoXArgs, goes_on: bool) -> bool:
    """Returns whether this is the first start of a branch that reads other data than its parent, from their
    sample 0.

    goes_on: the run resumes from its own `save`.
    """
    return not goes_on and args.branched_from is not None and args.branched_from["data"] == "restarted"


def check_parent(args: NeoXArgs, path: Path) -> None:
    """Raise CheckpointError if `path`, from which a branch begins, is not the checkpoint that it was made
    for."""
    parent = args.branched_from
    if parent is not None and sha256(path / MANIFEST) != parent["digest"]:
        raise CheckpointError(
            f"{path}: is not the checkpoint that this run was branched from (step {parent['iteration']} of "
            f"{parent['run']}, manifest {parent['digest'][:12]}); restore that one, or branch anew into another save"
        )


def begun_of(manifest: Manifest | None, method: MethodState, restarts: bool = False) -> DataState:
    """Returns a resumed run's position in its data, and how its order of samples was laid out.

    manifest: of its checkpoint; None: the position at the start of a new run. restarts: from `restarts_data`.
    """
    if manifest is None:
        return DataState()
    if restarts:
        return DataState(manifest.iteration, 0, {}, method.further_samples(manifest.data))
    laid_out = manifest.data.get("laid_out")
    if laid_out is None:
        laid_out = _earlier_layout(manifest.data["order"])
    segment_ends = {name: tuple(tuple(ends) for ends in members) for name, members in laid_out.items()}
    further = method.further_samples(manifest.data)
    return DataState(manifest.iteration, manifest.consumed_samples, segment_ends, further)


def check_same_run(
    args: NeoXArgs, path: Path, manifest: Manifest, goes_on: bool, record: Mapping[str, Any], tokenizer: Tokenizer
) -> None:
    """Raise CheckpointError if a checkpoint is of another run, or of a run on other data.

    goes_on: the checkpoint is in the run's own `save`. record: `RunParts.data_record` of the present data, at
    the checkpoint's `consumed_samples`.
    """
    check_model(manifest.model, args, str(path))
    run_words = f"the run of {path}"
    saved_mtp = manifest.model.get("mtp_num_layers")
    if saved_mtp is not None and args.mtp_num_layers is None:
        text = describe_changes([ConfigChange("mtp_num_layers", None, saved_mtp)], args, run_words)
        raise CheckpointError(f"{text}; restore it, or set finetune: true to start anew without these blocks")
    saved, now = manifest.model.get("lora"), model_keys(args)["lora"]
    if saved is None and now is not None:
        text = describe_changes([ConfigChange("lora", now, saved)], args, run_words)
        begin = "set another save, load to this folder and finetune: true" if goes_on else "set finetune: true"
        raise CheckpointError(f"{text}; to train adapters on its weights, {begin}")
    restart = "restart: true to start anew" if goes_on else "finetune: true to start anew with these weights"
    branch = None if goes_on or args.branched_from is None else args.branched_from["data"]
    if manifest.seed != args.seed and branch != "restarted":
        text = describe_changes([ConfigChange("seed", args.seed, manifest.seed)], args, run_words)
        raise CheckpointError(f"{text}; restore it, or set {'another save, or ' if goes_on else ''}{restart}")
    if branch == "replanned":
        _check_replanned(args, path, manifest, record)
    elif (
        manifest.data and not args.allow_changed_data and branch != "restarted"
    ):  # a resharded GPT-NeoX checkpoint has no data record
        changes = data_changes(args, manifest, record["files"], record["order"], validation=branch is None)
        if changes:
            raise CheckpointError(
                f"{describe_changes(changes, args, run_words)}; restore it, or set {restart}, or allow_changed_data: "
                "true to go on with the present data"
            )
        saved_digest, now = manifest.data.get("consumed_sha256"), record["consumed_sha256"]
        if None not in (saved_digest, now) and saved_digest != now:
            raise CheckpointError(
                f"{path}: its run has read {manifest.consumed_samples} samples, but the first samples of the data here "
                f"are others, though no key has changed; use the program version of the run's start, or set {restart}, "
                "or allow_changed_data: true to go on with the present data"
            )
    if manifest.tokenizer is not None and manifest.tokenizer != tokenizer.fingerprint():
        key = responsible_key(_TOKENIZER_KEYS, args, manifest.config)
        now = getattr(args, key)
        saved = manifest.config.get(key)
        change = ConfigChange(key, now, saved if saved not in (None, now) else "other content")
        text = describe_changes([change], args, run_words)
        raise CheckpointError(f"{text}; restore the tokenizer that the model was trained with")


def _check_replanned(args: NeoXArgs, path: Path, manifest: Manifest, record: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless the mix of a branch begins with the samples that its parent has read."""
    if args.train_data_weight_schedule and args.train_batch_size * manifest.iteration != manifest.consumed_samples:
        raise args.error(
            "train_batch_size",
            f"{args.train_batch_size} samples a step, but the {manifest.iteration} steps of {path} read "
            f"{manifest.consumed_samples}; a branch to another mix keeps the batch of its parent",
        )
    is_blend = "train_0" in manifest.data["files"], "train_0" in record["files"]
    if is_blend[0] == is_blend[1] and manifest.data.get("consumed_sha256") != record["consumed_sha256"]:
        raise CheckpointError(f"{path}: the mix does not begin with the samples that this run has read; branch anew")


def data_changes(
    args: ModelArgs, manifest: Manifest, files: Mapping[str, Any], order: Mapping[str, Any], validation: bool = True
) -> list[ConfigChange]:
    """Returns the changes of data and order since a checkpoint.

    files: from `data_fingerprint`. order: from `order_keys`. validation: also of the validation and test sets
    that are listed; a branch may have other ones.
    """
    saved, now = (
        {name: entry for name, entry in side.items() if validation or not name.startswith(("valid", "test"))}
        for side in (manifest.data["files"], files)
    )
    return _changed_files(saved, now, args, manifest.config) + _changed_order(manifest, order)


def _changed_order(manifest: Manifest, now: Mapping[str, Any]) -> list[ConfigChange]:
    saved_order = {key: _saved_value(manifest, key) for key in now}
    changes = [ConfigChange(key, now[key], saved_order[key]) for key in now if now[key] != saved_order[key]]
    if changes and changes[0].key == "train_epochs":
        passes, steps = "passes over the data", "iterations"
        key, passes_or_steps, saved = (
            ("train_epochs", passes, steps) if changes[0].current else ("train_iters", steps, passes)
        )
        changes[0] = ConfigChange(key, passes_or_steps, saved)
    return changes


def _saved_value(manifest: Manifest, key: str) -> Any:
    """Returns the value that a key of `order_keys` had in the checkpoint's run.

    Earlier versions stored fewer keys; then the value is found otherwise, or is the key's default.
    """
    order = manifest.data["order"]
    if key in order:
        return order[key]
    if key == "data_seed":
        return manifest.seed
    if key == "split" and not manifest.config.get("data_path"):
        return None  # `split` had no effect
    if key == "prefix_sharing":
        return False
    if key == "train_epochs":
        return any(name.endswith("_per_epoch") for name in order)
    section, _, name = key.partition(".")
    declared = keys_of(NeoXArgs)[section]
    if not name:
        return manifest.config.get(key, declared.default)
    assert declared.section is not None
    return (manifest.config.get(section) or {}).get(name, keys_of(declared.section)[name].default)


def _earlier_layout(order: Mapping[str, Any]) -> dict[str, list[list[int]]]:
    """Returns the entry `laid_out` for a checkpoint of an earlier version without it.

    order: its record, which has the number of samples of each dataset in a blend.
    """
    counts = order.get("train_samples")
    if counts is None:
        return {}
    return {"train": [[int(str(samples).split()[0])] for samples in (counts if isinstance(counts, list) else [counts])]}


def _changed_files(
    saved_files: Mapping[str, Any], now: Mapping[str, Any], args: ModelArgs, saved_config: Mapping[str, Any]
) -> list[ConfigChange]:
    """Returns the changes of the datasets since the checkpoint: in number, else in content, else in
    weights."""
    if saved_files.keys() != now.keys():
        keys = sorted(
            {path_key(name) for name in saved_files.keys() ^ now.keys()},
            key=lambda key: getattr(args, key.partition(".")[0]) is None,
        )
        counts = [[sum(path_key(name) == key for name in side) for side in (now, saved_files)] for key in keys]
        return [
            ConfigChange(key, _sets(current), _sets(saved)) for key, (current, saved) in zip(keys, counts, strict=True)
        ]
    changes, weights = [], []
    for name in sorted(now):
        current, saved = now[name], saved_files[name]
        for kind in sorted({"", "labels", "rewards"} & {"", *current, *saved}):
            key = path_key(name, kind)
            sides = [side.get(kind) if kind else side for side in (current, saved)]
            changes += _content(key, *sides)
        if current.get("weight") != saved.get("weight"):
            weight_keys = (f"{name.split('_')[0].split('/')[0]}_data_weights", *_WEIGHT_KEYS)
            key = responsible_key(weight_keys, args, saved_config)
            weights.append(ConfigChange(key, current.get("weight"), saved.get("weight")))
    return changes or weights


def _content(key: str, current: Mapping[str, Any] | None, saved: Mapping[str, Any] | None) -> list[ConfigChange]:
    """Returns [change] for the first fact that differs between a dataset's fingerprints, now and saved; [] if
    none.

    key: the path key of the dataset.
    """
    if current is None or saved is None:
        return [] if current == saved else [ConfigChange(key, _sets(current is not None), _sets(saved is not None))]
    for fact in ("idx_sha256", "bin_bytes", "bin_blocks_sha256", "sha256"):
        if current.get(fact) != saved.get(fact):
            return [ConfigChange(key, f"{fact} {str(current.get(fact))[:16]}", f"{str(saved.get(fact))[:16]}")]
    return []


def _sets(count: int) -> str:
    return "none" if not count else "one set" if count == 1 else f"{count} sets"


def moments_of(optimizer: str) -> str:
    """Returns a name for the kind of state that an optimizer of this type keeps: "adam" for all kinds of
    Adam."""
    kind = optimizer.lower()
    return "adam" if kind in ("adam", "adamw", "cpu_adam", "cpu_torch_adam") else kind


def changed_keys(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns the differences between two configurations as text, such as `["lr was 0.1, is 0.2"]`."""
    differences = []
    for key in sorted({*saved, *now}):
        saved_value, value = saved.get(key), now.get(key)
        if isinstance(saved_value, Mapping) and isinstance(value, Mapping):
            differences += [f"{key} {text}" for text in changed_keys(saved_value, value)]
        elif saved_value != value:
            differences.append(f"{key} was {saved_value}, is {value}")
    return differences


def check_precision(path: Path, now: str) -> None:
    """Raise CheckpointError if a GPT-NeoX checkpoint was saved in another precision than `now`."""
    saved = {PRECISIONS.get(dtype, str(dtype)) for dtype in describe_checkpoint(path).dtypes}
    if saved != {now}:
        raise CheckpointError(
            f"{path}: its optimizer state is for precision {', '.join(sorted(saved))}, but this run has {now}; set the "
            "checkpoint's precision, or no_load_optim: true to resume with the weights only"
        )
