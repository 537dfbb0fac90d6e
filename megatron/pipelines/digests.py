"""What a stage is made of, as digests: by them it is known whether it must run again."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.data import data_fingerprint
from megatron.data.files import cached_sha256
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.frozen import thaw
from megatron.neox_arguments.keys.declaration import keys_of
from megatron.pipelines.errors import PipelineError

CACHE = Path("logs/digests")
# Declarations of keys that a run may change on its way: what is logged, evaluated, published, saved, and
# where and in which layout ranks run.
_BESIDE = (
    "LoggingKeys", "TextgenKeys", "EvaluationKeys", "OperationsKeys", "ServingKeys", "RunnerKeys", "ParallelKeys",
    "CheckpointKeys",
)  # fmt: skip
_BESIDE_KEYS = {
    "eval_interval", "eval_iters", "exit_interval", "exit_duration_in_mins", "num_workers", "checkpoint_activations",
    "checkpoint_num_layers", "recompute_granularity", "recompute_every", "activation_memory_budget",
    "checkpoint_in_cpu", "contiguous_checkpointing", "partition_activations", "synchronize_each_layer",
    "override_lr_scheduler", "use_checkpoint_lr_scheduler",
}  # fmt: skip
_SPLIT = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")  # of train_batch_size, where that is given
LONGER = ("train_iters", "train_epochs")  # a run whose only change is that these grow goes on
# Declarations of keys that initial weights depend on, and further ones
_MODEL = (
    "ModelKeys",
    "MambaKeys",
    "OtherArchitectureKeys",
    "MoEKeys",
    "MuPKeys",
    "TransformerEngineKeys",
    "TokenizerKeys",
)
_OF_INIT = ("seed", "train_impl")
_TOKENIZER_FILES = ("vocab_file", "merge_file")


def digest(value: Any) -> str:
    """SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def file_digests(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """SHA-256 of files by name, relative to the pipeline's folder; a folder counts with all that is in it, a
    prefix with its .bin and .idx.

    Digests are kept in `logs/digests` for as long as size and times of a file stay. Raises PipelineError for
    a name that is none of these.
    """
    found = {}
    for name in names:
        files = files_of(folder, name)
        if not files:
            raise PipelineError(f"{folder / name}: there is no such file, folder or .bin/.idx prefix")
        for file in files:
            shown = file.relative_to(folder) if file.is_relative_to(folder) else file
            found[str(shown)] = cached_sha256(file, folder / CACHE)
    return found


def files_of(folder: Path, name: str) -> list[Path]:
    """The files that a name stands for, [] where there are none."""
    path = folder / name
    if path.is_file():
        return [path]
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.is_file())
    return [file for suffix in (".bin", ".idx") if (file := path.with_name(path.name + suffix)).is_file()]


def config_inputs(args: NeoXArgs) -> dict[str, Any]:
    """The keys that were given for a run and that its weights depend on."""
    keys, given = keys_of(NeoXArgs), args.user_values
    beside = _BESIDE_KEYS | (set(_SPLIT) if given.get("train_batch_size") is not None else set())
    return {
        name: thaw(value)
        for name, value in sorted(given.items())
        if name not in beside and (name not in keys or keys[name].owner not in _BESIDE)
        if name not in keys or thaw(value) != thaw(keys[name].default)  # as if it were not given
        if (name, value) != ("precision_fp8", "off") or given.get("te_fp8_mha")  # what unset means, but beside that key
    }


def only_longer(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether a run with the inputs `now` is that with `before`, trained on."""
    then, here = dict(before.get("config", {})), dict(now.get("config", {}))
    lengths = [(then.pop(key, None), here.pop(key, None)) for key in LONGER]
    grown = all(old == new or (old is not None and new is not None and new > old) for old, new in lengths)
    return grown and {**before, "config": then} == {**now, "config": here}


def run_inputs(args: NeoXArgs, folder: Path, start: str | None) -> dict[str, Any]:
    """All that the weights of a run depend on: keys, data, tokenizer, the weights that it starts from.

    start: SHA-256 of these. Raises DataError and ConfigError for data that is not there.
    """
    data = digest(data_fingerprint(args))
    tokenizer = tokenizer_inputs(args, folder)
    return {"config": config_inputs(args), "data": data, "tokenizer": tokenizer, "starts_from": start}


def tokenizer_inputs(args: NeoXArgs, folder: Path) -> dict[str, str]:
    """Digests of the files of a tokenizer by their key; of one that is no file here (a name of the Hub) its
    name."""
    given = {key: str(path) for key in _TOKENIZER_FILES if (path := getattr(args, key)) is not None}
    return {
        key: digest(file_digests(folder, [path])) if files_of(folder, path) else path for key, path in given.items()
    }


def loaded_inputs(args: NeoXArgs, folder: Path) -> Any:
    """What a run loads as its configuration says, of a checkpoint here with the digest of its weights."""
    if args.load is None:
        return None
    given = {"load": args.load, "iteration": args.iteration, "finetune": args.finetune}
    latest = folder / args.load / "latest"
    if args.iteration is not None or not latest.is_file():
        return given
    return {**given, "sha256": weights_digest(folder / args.load / latest.read_text(encoding="utf-8").strip())}


def init_inputs(args: NeoXArgs, folder: Path) -> dict[str, Any]:
    """What initial weights depend on: the model, the seed, how they are drawn, the vocabulary."""
    keys = keys_of(NeoXArgs)
    config = {
        name: value
        for name, value in config_inputs(args).items()
        if name in _OF_INIT or (name in keys and keys[name].owner in _MODEL)
    }
    parts = {"model_parallel_size": args.tp, "pipe_parallel_size": args.pp}
    return {"config": {**config, **parts}, "tokenizer": tokenizer_inputs(args, folder)}


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between the inputs of two attempts, a phrase each: `train_iters 100 -> 200`, `data`."""
    found = []
    for name in [*now, *(name for name in before if name not in now)]:
        old, new = before.get(name), now.get(name)
        if old == new:
            continue
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            keys = sorted(key for key in {**old, **new} if old.get(key) != new.get(key))
            found += [f"{key} {_shown(old.get(key))} -> {_shown(new.get(key))}" for key in keys]
        else:
            found.append(name if old is not None else f"{name} (new)")
    return found


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    if isinstance(value, str) and len(value) == 64:
        return value[:8]
    return text if len(text) <= 60 else f"{text[:56]} ..."


def weights_digest(checkpoint: Path) -> str:
    """One SHA-256 for the weights of a checkpoint, of the digests of its files of weights in manifest.json.

    Raises PipelineError for a checkpoint without a manifest, and where a file that it lists is missing.
    """
    try:
        files = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError) as problem:
        raise PipelineError(f"{checkpoint}: has no readable manifest.json ({problem})") from None
    for name, record in files.items():
        path = checkpoint / name
        if not path.is_file() or path.stat().st_size != record.get("size", path.stat().st_size):
            raise PipelineError(f"{path}: is missing, or has another size than manifest.json says")
    weights = {name: record["sha256"] for name, record in files.items() if name.startswith("layer_")}
    if not weights:  # one file for each model rank holds all
        weights = {name: record["sha256"] for name, record in files.items() if name.startswith("mp_rank_")}
    return digest(weights)
