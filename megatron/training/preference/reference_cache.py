"""Log-probabilities of a reference model on disk: a folder named by the model, in it what was scored, by
content."""

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
from megatron.data.files import cached_sha256
from megatron.data.preferences.reference_scores import SCORES
from megatron.data.run_datasets import SetContents
from megatron.data.set_config import index_cache_dir
from megatron.model.positions import rope_length_limit
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.frozen import thaw
from megatron.neox_arguments.keys.architectures import (
    MambaKeys,
    MoEKeys,
    MuPKeys,
    OtherArchitectureKeys,
    TransformerEngineKeys,
)
from megatron.neox_arguments.keys.declaration import keys_of
from megatron.neox_arguments.keys.model import ModelKeys
from megatron.tokenizer import Tokenizer
from megatron.training.checkpoint.base_weights import weight_digests
from megatron.training.checkpoint.source import CheckpointSource
from megatron.training.precision_policy import choose_precision

_ABOUT = "about.json"
# Whose keys make the model's function
_OWNERS = tuple(
    c.__name__ for c in (ModelKeys, TransformerEngineKeys, MoEKeys, MambaKeys, OtherArchitectureKeys, MuPKeys)
)
_OTHERWISE = (
    # in model_keys, by what is made of them
    "num_kv_heads", "intermediate_size", "expansion_factor", "mlp_multiple_of", "compat_ffn_width",
    "make_vocab_size_divisible_by",
    # of initial values and of training
    "init_method", "output_layer_init_method", "init_method_std", "attention_dropout", "hidden_dropout",
    # of how and of what length it is computed, and of files
    "attention_backend", "attention_config", "mamba_backend", "mamba_chunk_size", "apex", "compile",
    "seq_length", "rotary_save_freqs_buffer", "mask_padded_vocab",
)  # fmt: skip


def forward_keys(args: NeoXArgs) -> dict[str, Any]:
    """Every key of the model that its log-probabilities may depend on: all that are declared but those known
    not to."""
    keys = {
        name: thaw(getattr(args, name))
        for name, key in keys_of(type(args)).items()
        if key.owner in _OWNERS and key.standing.startswith("honoured") and name not in _OTHERWISE
    }
    if rope_length_limit(args) is not None:
        keys["seq_length"] = args.seq_length  # rotary frequencies follow from the length of a row
    if args.softmax_rows is not None:
        keys["softmax_rows"] = args.softmax_rows
    return keys


def describe_reference(
    args: NeoXArgs, source: CheckpointSource, tokenizer: Tokenizer, groups: ParallelGroups
) -> dict[str, Any]:
    """All that decides the model's log-probabilities but code and layout. The work is shared out over
    ranks."""
    return {
        "weights": weight_digests(args, source, groups),
        "model": {**forward_keys(args), **model_keys(args)},
        "tokenizer": tokenizer.fingerprint(),
        "precision": _precision(args, groups),
        "scope": "sums over the trained tokens of an answer",
    }


def _precision(args: NeoXArgs, groups: ParallelGroups) -> str:
    recipe = choose_precision(args, groups.device).recipe
    if recipe is None:
        return args.params_dtype
    return f"{args.params_dtype}, FP8 by {recipe} in blocks {args.fp8_blocks.start} to {args.fp8_blocks.stop - 1}"


def digest_of(about: Mapping[str, Any]) -> str:
    """Of what `describe_reference` gives."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]


def changed_since(was: Mapping[str, Any], now: Mapping[str, Any], args: NeoXArgs) -> list[ConfigChange]:
    """What differs between two of what `describe_reference` gives."""
    here, saved = json.loads(json.dumps(now["model"])), was["model"]  # as the record has it
    names = [name for name in sorted({*here, *saved}) if here.get(name) != saved.get(name)]
    changes = [ConfigChange(config_key(name, args), here.get(name), saved.get(name)) for name in names]
    changes += [ConfigChange("precision", now["precision"], was["precision"])] * (now["precision"] != was["precision"])
    for section, key in (("weights", "load"), ("tokenizer", "vocab_file")):
        if now[section] != was[section]:
            changes.append(ConfigChange(key, getattr(args, key), f"other {section}"))
    return changes


def cache_folder(args: NeoXArgs, digest: str) -> Path:
    """`reference_cache_dir`, else `reference_cache` beside the index maps; in it the reference's own."""
    if args.reference_cache_dir is not None:
        return Path(args.reference_cache_dir) / digest
    first = (args.pos_train_data_paths or args.train_data_paths or ("",))[0]
    return index_cache_dir(args, first).parent / "reference_cache" / digest


def read_scores(folder: Path) -> np.ndarray:
    """All that the folder holds, of `SCORES`. Raises DataError for a damaged file."""
    parts = [np.empty(0, SCORES)]
    for file in sorted(folder.glob("rows-*.npy")):
        try:
            rows = np.load(file, allow_pickle=False)
            digest = _digest(rows)
        except (OSError, ValueError, EOFError) as problem:
            raise DataError(f"{file}: damaged ({problem}); delete it, it is made again") from problem
        if rows.dtype != SCORES or file.stem != f"rows-{digest}":
            raise DataError(f"{file}: damaged; delete it, it is made again")
        parts.append(rows)
    return np.concatenate(parts)


def add_scores(folder: Path, about: Mapping[str, Any], rows: np.ndarray) -> None:
    """Add rows to the folder, in a file of their own: whole or not there. Raises DataError."""
    data = io.BytesIO()
    np.save(data, rows)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / _ABOUT).exists():
            replace_file(folder / _ABOUT, (json.dumps(about, indent=1) + "\n").encode())
        replace_file(folder / f"rows-{_digest(rows)}.npy", data.getvalue())
    except OSError as problem:
        raise DataError(
            f"{folder}: reference log-probabilities cannot be written here ({problem.strerror}); set "
            "reference_cache_dir to a folder that can be written"
        ) from problem


def find_whole(folder: Path, set_contents: SetContents, size: int) -> tuple[Path, int | None]:
    """The note that all rows of the first `size` samples of a set are in the folder, and how many they are;
    None where it is not noted, or a file that held them is gone."""
    contents = [cached_sha256(file, set_contents.hash_cache) for file in set_contents.files]
    name = hashlib.sha256(json.dumps([set_contents.layout, contents, size]).encode()).hexdigest()[:32]
    note = folder / f"whole-{name}.json"
    if not note.is_file():
        return note, None
    known = json.loads(note.read_text())
    return note, known["rows"] if all((folder / file).is_file() for file in known["files"]) else None


def note_whole(note: Path, rows: int) -> None:
    """Write the note of `find_whole`."""
    files = sorted(file.name for file in note.parent.glob("rows-*.npy"))
    with contextlib.suppress(OSError):  # without it the next start looks at all rows again
        replace_file(note, (json.dumps({"rows": rows, "files": files}, indent=1) + "\n").encode())


def _digest(rows: np.ndarray) -> str:
    return hashlib.sha256(rows.tobytes()).hexdigest()[:16]
