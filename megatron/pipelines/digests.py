"""Computes digests of everything that the result of a stage depends on, which show whether it must run
again."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from megatron.data import data_fingerprint
from megatron.data.files import cached_sha256
from megatron.neox_arguments import ModelArgs, NeoXArgs
from megatron.neox_arguments.frozen import thaw
from megatron.neox_arguments.keys.declaration import keys_of
from megatron.neox_arguments.values.json_text import parse_json
from megatron.pipelines.errors import PipelineError

CACHE = Path("logs/digests")
# Classes that declare keys which do not affect the weights: logging, evaluation, publishing, saving, and on
# which machines and in which parallel layout the ranks run.
_UNRELATED_OWNERS = (
    "LoggingKeys", "TextgenKeys", "EvaluationKeys", "OperationsKeys", "ServingKeys", "RunnerKeys", "ParallelKeys",
    "CheckpointKeys",
)  # fmt: skip
_UNRELATED_KEYS = {
    "eval_interval", "eval_iters", "exit_interval", "exit_duration_in_mins", "num_workers", "checkpoint_activations",
    "checkpoint_num_layers", "recompute_granularity", "recompute_every", "activation_memory_budget",
    "checkpoint_in_cpu", "contiguous_checkpointing", "partition_activations", "synchronize_each_layer",
    "override_lr_scheduler", "use_checkpoint_lr_scheduler",
}  # fmt: skip
_SPLIT = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")  # irrelevant if train_batch_size is set
LONGER = ("train_iters", "train_epochs")  # if only these keys grow, the existing run continues
# Classes that declare keys on which initial weights depend
_MODEL = (
    "ModelKeys", "MambaKeys", "OtherArchitectureKeys", "MoEKeys", "MuPKeys", "TransformerEngineKeys", "TokenizerKeys",
)  # fmt: skip
_INIT_KEYS = ("seed", "train_impl")
_TOKENIZER_FILES = ("vocab_file", "merge_file")


def digest(value: Any) -> str:
    """Returns the SHA-256 of a value's JSON text, in hexadecimal."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def file_digests(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Returns the SHA-256 of each file, by its path relative to the pipeline's folder.

    folder: the pipeline's folder.
    names: each a file, a folder (all files below it), or a prefix (its .bin and .idx).

    Digests are cached in `logs/digests`, and reused while size and times of the file are unchanged. Raises
    PipelineError if a name matches no file.
    """
    result = {}
    for name in names:
        files = files_of(folder, name)
        if not files:
            raise PipelineError(f"{folder / name}: no such file, folder or prefix of .bin/.idx files")
        for file in files:
            relative = file.relative_to(folder) if file.is_relative_to(folder) else file
            result[str(relative)] = cached_sha256(file, folder / CACHE)
    return result


def files_of(folder: Path, name: str) -> list[Path]:
    """Returns the files for a name in the folder `folder`: a file itself, or all files below a folder.

    If `name` is neither, it is a prefix, and the result is its .bin and .idx. [] if no file exists.
    """
    path = folder / name
    if path.is_file():
        return [path]
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.is_file())
    return [file for suffix in (".bin", ".idx") if (file := path.with_name(path.name + suffix)).is_file()]


def config_inputs(args: ModelArgs) -> dict[str, Any]:
    """Returns the values of configuration keys that the user set and that affect the trained weights, by key.

    A key that is set to its default counts as not set.
    """
    keys, values = keys_of(NeoXArgs), args.user_values
    unrelated = _UNRELATED_KEYS | (set(_SPLIT) if values.get("train_batch_size") is not None else set())
    return {
        name: thaw(value)
        for name, value in sorted(values.items())
        if name not in unrelated and (name not in keys or keys[name].owner not in _UNRELATED_OWNERS)
        if name not in keys or thaw(value) != thaw(keys[name].default)  # a default counts as not set
        if (name, value) != ("precision_fp8", "off")
        or values.get("te_fp8_mha")  # off is the default without te_fp8_mha
    }


def only_longer(previous: Mapping[str, Any], current: Mapping[str, Any]) -> bool:
    """Returns whether the inputs of two attempts are equal, except that `current` may train longer.

    Longer means a larger train_iters or train_epochs. Equal inputs also give True.
    """
    previous_config, current_config = dict(previous.get("config", {})), dict(current.get("config", {}))
    lengths = [(previous_config.pop(key, None), current_config.pop(key, None)) for key in LONGER]
    grown = all(old == new or (old is not None and new is not None and new > old) for old, new in lengths)
    return grown and {**previous, "config": previous_config} == {**current, "config": current_config}


def run_inputs(args: NeoXArgs, folder: Path, start: str | None) -> dict[str, Any]:
    """Returns everything that the trained weights depend on: configuration keys, data, tokenizer, initial
    weights.

    start: SHA-256 of the initial weights; None: none are loaded. Raises DataError or ConfigError for missing
    data.
    """
    data = digest(data_fingerprint(args))
    tokenizer = tokenizer_inputs(args, folder)
    return {"config": config_inputs(args), "data": data, "tokenizer": tokenizer, "starts_from": start}


def tokenizer_inputs(args: ModelArgs, folder: Path) -> dict[str, str]:
    """Returns a digest of each tokenizer file, by the configuration key that names it: vocab_file,
    merge_file.

    For a tokenizer on the Hub the value is its name, because there is no local file.
    """
    paths = {key: str(path) for key in _TOKENIZER_FILES if (path := getattr(args, key)) is not None}
    return {
        key: digest(file_digests(folder, [path])) if files_of(folder, path) else path for key, path in paths.items()
    }


def loaded_inputs(args: NeoXArgs, folder: Path) -> Any:
    """Returns the keys that say what a run begins with, and the digest of the weights in `load`; None without
    `load`.

    The weights are those of `iteration`, or those that the file `latest` in `load` names. The digest is left
    out if they are not on a local disk.
    """
    if args.load is None:
        return None
    source = {key: getattr(args, key) for key in ("load", "iteration", "finetune")}
    if args.load_ema:
        source["load_ema"] = True
    save = folder / args.load
    checkpoint = latest_checkpoint(save) if args.iteration is None else save / f"global_step{args.iteration}"
    if checkpoint is None or not (checkpoint / "manifest.json").is_file():
        return source
    return {**source, "sha256": weights_digest(checkpoint)}


def init_inputs(args: ModelArgs, folder: Path) -> dict[str, Any]:
    """Returns everything that random initial weights depend on: configuration keys and tokenizer.

    The keys are those of the model and its initialisation, the seed, and tensor and pipeline parallel
    sizes."""
    keys = keys_of(NeoXArgs)
    config = {
        name: value
        for name, value in config_inputs(args).items()
        if name in _INIT_KEYS or (name in keys and keys[name].owner in _MODEL)
    }
    parts = {"model_parallel_size": args.tp, "pipe_parallel_size": args.pp}
    return {"config": {**config, **parts}, "tokenizer": tokenizer_inputs(args, folder)}


def changes(previous: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Returns the differences between the inputs of two attempts as texts, such as `train_iters 100 -> 200`.

    If an input such as `data` is only known by its digest, the text is the input's name.
    """
    lines = []
    for name in [*current, *(name for name in previous if name not in current)]:
        old, new = previous.get(name), current.get(name)
        if old == new:
            continue
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            keys = sorted(key for key in {**old, **new} if old.get(key) != new.get(key))
            lines += [f"{key} {_short_text(old.get(key))} -> {_short_text(new.get(key))}" for key in keys]
        else:
            lines.append(name if old is not None else f"{name} (new)")
    return lines


def _short_text(value: Any) -> str:
    text = json.dumps(value, default=str)
    if isinstance(value, str) and len(value) == 64:
        return value[:8]
    return text if len(text) <= 60 else f"{text[:56]} ..."


def latest_checkpoint(save: Path) -> Path | None:
    """Returns the checkpoint folder that the file `latest` in the folder `save` names; None without that
    file."""
    if not (save / "latest").is_file():
        return None
    return save / (save / "latest").read_text(encoding="utf-8").strip()


def numbered(path: Path, word: str = "") -> Path:
    """Returns the path with the suffix `.<word>N`, with the smallest N from 1 on for which it does not
    exist."""
    paths = (path.with_name(f"{path.name}.{word}{number}") for number in count(1))
    return next(candidate for candidate in paths if not candidate.exists())


def weights_digest(checkpoint: Path) -> str:
    """Returns one SHA-256 for all weights of a checkpoint.

    It is computed from the SHA-256 that manifest.json has for each weight file; the files are not read.
    Raises PipelineError if there is no manifest, or if a file that it lists is missing or has another size.
    """
    try:
        files = parse_json((checkpoint / "manifest.json").read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError) as problem:
        raise PipelineError(f"{checkpoint}: its manifest.json is missing or cannot be read ({problem})") from None
    for name, record in files.items():
        path = checkpoint / name
        if not path.is_file() or path.stat().st_size != record.get("size", path.stat().st_size):
            raise PipelineError(f"{path}: is missing, or has another size than manifest.json says")
    weights = {name: record["sha256"] for name, record in files.items() if name.startswith("layer_")}
    if not weights:  # the checkpoint has one file per model-parallel rank instead of one per layer
        weights = {name: record["sha256"] for name, record in files.items() if name.startswith("mp_rank_")}
    return digest(weights)
