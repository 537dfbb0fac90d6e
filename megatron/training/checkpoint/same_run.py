"""Whether a checkpoint is of this run: the model, the seed, the data and the order of its samples, the
tokenizer.

Every refusal names the key that changed, first. What a run may change (its length, its layout, its schedule
when told so) is no part of this.
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
from megatron.data import Datasets, DataState, order_sha256, path_key
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.keys.declaration import keys_of
from megatron.tokenizer import Tokenizer
from megatron.training.checkpoint.source import CheckpointSource

_TOKENIZER_KEYS = ("vocab_file", "tokenizer_type", "merge_file", "eod_token")
_WEIGHT_KEYS = (
    "train_data_weight_schedule", "weight_by", "weight_by_num_documents", "weighted_sampler_alpha",
    "compat_weight_by_num_documents",
)  # fmt: skip


def continued(args: NeoXArgs, source: CheckpointSource) -> Manifest | None:
    """The manifest of the run that goes on; None for a new run, and for GPT-NeoX's, whose checkpoints have
    none."""
    if source.path is None or source.is_hf or (args.finetune and not source.goes_on):
        return None
    manifest = read_manifest(source.path)
    return manifest if manifest is not None and manifest.data else None


def begun_of(manifest: Manifest | None) -> DataState:
    """How far a run is in its data, and how its order was laid out."""
    if manifest is None:
        return DataState()
    laid_out = manifest.data.get("laid_out")
    if laid_out is None:
        laid_out = _earlier_layout(manifest.data["order"])
    segment_ends = {name: tuple(tuple(ends) for ends in members) for name, members in laid_out.items()}
    forget = manifest.data.get("forget_samples", 0)
    return DataState(manifest.iteration, manifest.consumed_samples, segment_ends, forget)


def data_record(
    files: Mapping[str, Any], order: Mapping[str, Any], datasets: Datasets, consumed: int, forget_samples: int = 0
) -> dict:
    """What a manifest says of the data. files: `data_fingerprint`; order: `order_keys`."""
    known = datasets.train is not None and consumed <= len(datasets.train)
    looked = order_sha256(datasets.train, consumed) if known and datasets.train is not None else None
    record = {"files": files, "order": order, "laid_out": datasets.segment_ends, "consumed_sha256": looked}
    return {**record, "forget_samples": forget_samples} if datasets.forget is not None else record


def check_same_run(
    args: NeoXArgs,
    path: Path,
    manifest: Manifest,
    goes_on: bool,
    record: Mapping[str, Any],
    tokenizer: Tokenizer,
) -> None:
    """Raise CheckpointError for a checkpoint of another run, or of other data. record: `data_record` of this
    one at the checkpoint's `consumed_samples`."""
    check_model(manifest.model, args, str(path))
    whose = f"the run of {path}"
    was, now = manifest.model.get("lora"), model_keys(args)["lora"]
    if was is None and now is not None:
        text = describe_changes([ConfigChange("lora", now, was)], args, whose)
        begin = "set another save, load to this folder and finetune: true" if goes_on else "set finetune: true"
        raise CheckpointError(f"{text}; to train adapters on its weights, {begin}")
    anew = "restart: true to begin anew" if goes_on else "finetune: true to begin anew with these weights"
    if manifest.seed != args.seed:
        text = describe_changes([ConfigChange("seed", args.seed, manifest.seed)], args, whose)
        raise CheckpointError(f"{text}; set it back, or {'another save, or ' if goes_on else ''}{anew}")
    if manifest.data and not args.allow_changed_data:  # a resharded checkpoint of GPT-NeoX has nothing to say of it
        changes = _changed_files(manifest, record["files"], args) + _changed_order(manifest, record["order"])
        if changes:
            raise CheckpointError(
                f"{describe_changes(changes, args, whose)}; set it back, or {anew}, or allow_changed_data: true to "
                "go on with the data as it is now"
            )
        then, now = manifest.data.get("consumed_sha256"), record["consumed_sha256"]
        if None not in (then, now) and then != now:
            raise CheckpointError(
                f"{path}: the {manifest.consumed_samples} samples that its run has drawn are not the first ones of the "
                f"data here, though no key says why; use the version that it began with, or set {anew}, or "
                "allow_changed_data: true to go on with the data as it is now"
            )
    if manifest.tokenizer is not None and manifest.tokenizer != tokenizer.fingerprint():
        key = responsible_key(_TOKENIZER_KEYS, args, manifest.config)
        now = getattr(args, key)
        was = manifest.config.get(key)
        change = ConfigChange(key, now, was if was not in (None, now) else "another content")
        text = describe_changes([change], args, whose)
        raise CheckpointError(f"{text}; set it back to the tokenizer that it was trained with")


def _changed_order(manifest: Manifest, now: Mapping[str, Any]) -> list[ConfigChange]:
    was = {key: _was(manifest, key) for key in now}
    changes = [ConfigChange(key, now[key], was[key]) for key in now if now[key] != was[key]]
    if changes and changes[0].key == "train_epochs":
        passes, steps = "passes over the data", "iterations"
        key, here, saved = ("train_epochs", passes, steps) if changes[0].here else ("train_iters", steps, passes)
        changes[0] = ConfigChange(key, here, saved)
    return changes


def _was(manifest: Manifest, key: str) -> Any:
    """A key of `order_keys` in a checkpoint; earlier ones say fewer of them."""
    order = manifest.data["order"]
    if key in order:
        return order[key]
    if key == "data_seed":
        return manifest.seed
    if key == "split" and not manifest.config.get("data_path"):
        return None  # it cut nothing
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
    """`laid_out` of a checkpoint that has only the number of samples, of each member of a blend."""
    counts = order.get("train_samples")
    if counts is None:
        return {}
    return {"train": [[int(str(samples).split()[0])] for samples in (counts if isinstance(counts, list) else [counts])]}


def _changed_files(manifest: Manifest, now: Mapping[str, Any], args: NeoXArgs) -> list[ConfigChange]:
    """Sets that are not what they were: their number, else their content, else their weights."""
    was = manifest.data["files"]
    if was.keys() != now.keys():
        keys = sorted(
            {path_key(name) for name in was.keys() ^ now.keys()},
            key=lambda key: getattr(args, key.partition(".")[0]) is None,
        )
        counts = [[sum(path_key(name) == key for name in side) for side in (now, was)] for key in keys]
        return [ConfigChange(key, _sets(here), _sets(saved)) for key, (here, saved) in zip(keys, counts, strict=True)]
    changes, weights = [], []
    for name in sorted(now):
        here, saved = now[name], was[name]
        for kind in sorted({"", "labels", "rewards"} & {"", *here, *saved}):
            key = path_key(name, kind)
            sides = [side.get(kind) if kind else side for side in (here, saved)]
            changes += _content(key, *sides)
        if here.get("weight") != saved.get("weight"):
            key = responsible_key((f"{name.split('_')[0]}_data_weights", *_WEIGHT_KEYS), args, manifest.config)
            weights.append(ConfigChange(key, here.get("weight"), saved.get("weight")))
    return changes or weights


def _content(key: str, here: Mapping[str, Any] | None, there: Mapping[str, Any] | None) -> list[ConfigChange]:
    """The first fact of two fingerprints that differs."""
    if here is None or there is None:
        return [] if here == there else [ConfigChange(key, _sets(here is not None), _sets(there is not None))]
    for fact in ("idx_sha256", "bin_bytes", "bin_blocks_sha256", "sha256"):
        if here.get(fact) != there.get(fact):
            return [ConfigChange(key, f"{fact} {str(here.get(fact))[:16]}", f"{str(there.get(fact))[:16]}")]
    return []


def _sets(count: int) -> str:
    return "none" if not count else "one set" if count == 1 else f"{count} sets"
