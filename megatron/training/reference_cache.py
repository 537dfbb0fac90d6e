"""Log-probabilities of a reference model on disk: a folder named by the model, in it what was scored, by content."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatron.checkpointing import model_keys, read_manifest, replace_file
from megatron.checkpointing.files import file_sha256
from megatron.data import DataError
from megatron.data.datasets import index_cache_dir
from megatron.data.references import SCORES
from megatron.mpu import ParallelGroups, together
from megatron.neox_arguments import NeoXArgs
from megatron.tokenizer import Tokenizer
from megatron.training.sources import Source

_ABOUT = "about.json"
_HF_WEIGHTS = ("*.safetensors", "*.bin")


def describe_reference(args: NeoXArgs, source: Source, tokenizer: Tokenizer, groups: ParallelGroups) -> dict[str, Any]:
    """All that decides the model's log-probabilities but code and layout. The work is shared out over ranks."""
    names: Mapping[str, str] = {}
    if source.path is None:
        methods = args.init_method, args.output_layer_init_method, args.init_method_std
        names = {"initial values": f"seed {args.seed}, {methods}, {groups.device.type}"}
    else:
        manifest = None if source.is_hf else read_manifest(source.path)
        if manifest is not None:
            names = {name: record.sha256 for name, record in manifest.files.items() if name.startswith("layer_")}
        else:
            kinds = _HF_WEIGHTS if source.is_hf else ("layer_*",)
            files = sorted(file for kind in kinds for file in source.path.glob(kind))
            own = files[groups.world_rank :: groups.world_size]
            found = together(groups, lambda: {file.name: file_sha256(file) for file in own})
            names = {name: sha256 for part in found for name, sha256 in part.items()}
    return {
        "weights": dict(sorted(names.items())),
        "model": model_keys(args),
        "tokenizer": tokenizer.fingerprint(),
        "precision": args.params_dtype,
        "scope": "sums over the trained tokens of an answer",
    }


def digest_of(about: Mapping[str, Any]) -> str:
    """Of what `describe_reference` gives."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]


def cache_folder(args: NeoXArgs, digest: str) -> Path:
    """`reference_cache_dir`, else `reference_cache` beside the index maps; in it the reference's own."""
    if args.reference_cache_dir is not None:
        return Path(args.reference_cache_dir) / digest
    first = (args.pos_train_data_paths or args.train_data_paths or ("",))[0]
    return index_cache_dir(args, first).parent / "reference_cache" / digest


def read_scores(folder: Path) -> np.ndarray:
    """All that the folder holds, of `SCORES`. Raises DataError for a damaged file."""
    found = [np.empty(0, SCORES)]
    for file in sorted(folder.glob("rows-*.npy")):
        try:
            rows = np.load(file, allow_pickle=False)
            digest = _digest(rows)
        except (OSError, ValueError, EOFError) as problem:
            raise DataError(f"{file}: damaged ({problem}); delete it, it is made again") from problem
        if rows.dtype != SCORES or file.stem != f"rows-{digest}":
            raise DataError(f"{file}: damaged; delete it, it is made again")
        found.append(rows)
    return np.concatenate(found)


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


def _digest(rows: np.ndarray) -> str:
    return hashlib.sha256(rows.tobytes()).hexdigest()[:16]
