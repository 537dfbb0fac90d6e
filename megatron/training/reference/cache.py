"""Caches log-probabilities of a reference model on disk.

Each reference model has a folder. Its rows, one for each answer, are found by a hash of their tokens.
"""

import contextlib
import hashlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatron.checkpointing import ConfigChange, config_key, model_keys, replace_file
from megatron.data import DataError
from megatron.data.files import NPY_ERRORS, cached_sha256
from megatron.data.preferences.reference_scores import SCORES
from megatron.data.run_datasets import SetContents
from megatron.data.set_config import index_cache_dir
from megatron.model.positions import rope_length_limit
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import ModelArgs, NeoXArgs
from megatron.neox_arguments.frozen import thaw
from megatron.neox_arguments.keys.declaration import keys_of
from megatron.neox_arguments.model_args import MODEL_SECTIONS
from megatron.neox_arguments.values.json_text import parse_json
from megatron.tokenizer import Tokenizer
from megatron.training.checkpoint.base_weights import weight_digests
from megatron.training.checkpoint.source import CheckpointSource
from megatron.training.fp8 import GROUPED_PRODUCTS
from megatron.training.precision_policy import choose_precision

_DESCRIPTION = "about.json"
_INDEPENDENT = (
    # model_keys contains the values that are derived from these
    "num_kv_heads", "intermediate_size", "expansion_factor", "mlp_multiple_of", "compat_ffn_width",
    "make_vocab_size_divisible_by",
    # these concern initial values and training only
    "init_method", "output_layer_init_method", "init_method_std", "attention_dropout", "hidden_dropout",
    # these concern kernels, row lengths and files
    "attention_backend", "attention_config", "mamba_backend", "mamba_chunk_size", "linear_chunk_size", "apex",
    "compile", "seq_length", "rotary_save_freqs_buffer", "mask_padded_vocab",
)  # fmt: skip


def forward_keys(args: ModelArgs) -> dict[str, Any]:
    """Returns the values, by key, of all configuration keys on which the model's log-probabilities may
    depend.

    These are all keys of the model, except those known to have no effect (`_INDEPENDENT`).
    """
    keys = {
        name: thaw(getattr(args, name))
        for name, key in keys_of(type(args)).items()
        if key.owner in MODEL_SECTIONS and key.standing.startswith("honoured") and name not in _INDEPENDENT
    }
    if rope_length_limit(args) is not None:
        keys["seq_length"] = args.seq_length  # rotary frequencies follow from the length of a row
    if args.softmax_rows is not None:
        keys["softmax_rows"] = args.softmax_rows
    return keys


def describe_reference(
    args: NeoXArgs, source: CheckpointSource, tokenizer: Tokenizer, groups: ParallelGroups
) -> dict[str, Any]:
    """Returns everything on which the reference's log-probabilities depend, except code and parallel layout.

    It has digests of the weight files, model keys, tokenizer and precision. The ranks share the work.
    """
    return {
        "weights": weight_digests(args, source, groups),
        **({"averaged": True} if args.load_ema else {}),
        "model": {**forward_keys(args), **model_keys(args)},
        "tokenizer": tokenizer.fingerprint(),
        "precision": describe_precision(args, groups),
        "scope": "sums over the trained tokens of an answer",
    }


def describe_precision(args: NeoXArgs, groups: ParallelGroups) -> str:
    """Returns the precision in which the reference computes, in words. Equal words mean equal rounding."""
    recipe = choose_precision(args, groups.device).recipe
    if args.qat is not None:
        return f"{args.params_dtype}, weights rounded to {args.qat}"
    if recipe is None:
        return args.params_dtype
    experts = ", experts too" if args.moe_num_experts > 1 and recipe in GROUPED_PRODUCTS else ""
    blocks = f"{args.fp8_blocks.start} to {args.fp8_blocks.stop - 1}"
    return f"{args.params_dtype}, FP8 by {recipe} in blocks {blocks}{experts}"


def digest_of(description: Mapping[str, Any]) -> str:
    """Returns the hash of a description from `describe_reference`, which names the reference's cache
    folder."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:32]


def describe_reference_changes(old: Mapping[str, Any], now: Mapping[str, Any], args: ModelArgs) -> list[ConfigChange]:
    """Returns the configuration keys that differ between two descriptions from `describe_reference`.

    old: of the run at its start. now: of the present configuration `args`.
    """
    current_model, saved_model = json.loads(json.dumps(now["model"])), old["model"]  # in the types that JSON gives
    names = [
        name for name in sorted({*current_model, *saved_model}) if current_model.get(name) != saved_model.get(name)
    ]
    changes = [ConfigChange(config_key(name, args), current_model.get(name), saved_model.get(name)) for name in names]
    changes += [ConfigChange("precision", now["precision"], old["precision"])] * (now["precision"] != old["precision"])
    for section, key in (("weights", "load"), ("tokenizer", "vocab_file")):
        if now[section] != old[section]:
            changes.append(ConfigChange(key, getattr(args, key), f"a different {section}"))
    return changes


def cache_folder(args: NeoXArgs, digest: str) -> Path:
    """Returns the cache folder of the reference with this digest.

    It is in `reference_cache_dir`, or if that is not set, in `reference_cache` next to the data's index maps.
    """
    if args.reference_cache_dir is not None:
        return Path(args.reference_cache_dir) / digest
    first_path = (args.pos_train_data_paths or args.train_data_paths or ("",))[0]
    return index_cache_dir(args, first_path).parent / "reference_cache" / digest


def read_scores(folder: Path) -> np.ndarray:
    """Returns all cached scores of a reference's folder, of dtype `SCORES`. Raises DataError for a damaged
    file."""
    parts = [np.empty(0, SCORES)]
    for file in sorted(folder.glob("rows-*.npy")):
        try:
            rows = np.load(file, allow_pickle=False)
            digest = _digest(rows)
        except NPY_ERRORS as problem:
            raise DataError(f"{file} is damaged ({problem}); delete it, and the next start rebuilds it") from problem
        if rows.dtype != SCORES or file.stem != f"rows-{digest}":
            raise DataError(f"{file} is damaged; delete it, and the next start rebuilds it")
        parts.append(rows)
    return np.concatenate(parts)


def add_scores(folder: Path, description: Mapping[str, Any], rows: np.ndarray) -> None:
    """Add scores to a reference's folder, atomically, in a new file. Raises DataError if it cannot be
    written."""
    data = io.BytesIO()
    np.save(data, rows)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / _DESCRIPTION).exists():
            replace_file(folder / _DESCRIPTION, (json.dumps(description, indent=1) + "\n").encode())
        replace_file(folder / f"rows-{_digest(rows)}.npy", data.getvalue())
    except OSError as problem:
        raise DataError(
            f"{folder}: reference log-probabilities cannot be written here ({problem.strerror}); set "
            "reference_cache_dir to a folder that can be written"
        ) from problem


def find_completion(folder: Path, set_contents: SetContents, size: int) -> tuple[Path, int | None]:
    """Returns (path of the note that a dataset is fully scored, number of its rows).

    The note is about the first `size` samples of the dataset. The number is None if the note does not exist,
    cannot be read, or names a file that is gone.
    """
    contents = [cached_sha256(file, set_contents.hash_cache) for file in set_contents.files]
    name = hashlib.sha256(json.dumps([set_contents.layout, contents, size]).encode()).hexdigest()[:32]
    note = folder / f"whole-{name}.json"
    if not note.is_file():
        return note, None
    try:
        record = parse_json(note.read_bytes())
        return note, int(record["rows"]) if all((folder / file).is_file() for file in record["files"]) else None
    except (ValueError, KeyError, TypeError):  # damaged: all rows are looked up again, and it is written again
        return note, None


def note_completion(note: Path, rows: int) -> None:
    """Writes the note that `find_completion` reads: all `rows` rows of the set are in the folder."""
    files = sorted(file.name for file in note.parent.glob("rows-*.npy"))
    with contextlib.suppress(OSError):  # without the note the next start checks all rows again
        replace_file(note, (json.dumps({"rows": rows, "files": files}, indent=1) + "\n").encode())


def _digest(rows: np.ndarray) -> str:
    return hashlib.sha256(rows.tobytes()).hexdigest()[:16]
