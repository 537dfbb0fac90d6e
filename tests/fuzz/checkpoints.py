"""Checkpoint folders: weights, manifest and `latest`, spoilt or exchanged."""

import hashlib
import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from megatron.checkpointing import find_checkpoint, load_weights
from megatron.checkpointing.initial_weights import write_initial_weights
from megatron.checkpointing.saved_config import load_checkpoint_args
from megatron.model import layer_params
from megatron.neox_arguments import load
from tests.fuzz.campaign import Kind, command
from tests.fuzz.cases import MISSING, Case
from tests.fuzz.mutations import json_bytes, spoilt_bytes, spoilt_file, spoilt_folder, spoilt_value
from tests.model.stages import SMALL
from tools.ckpts import inspect_checkpoints, reshard, verify

_MANIFEST = "run/global_step0/manifest.json"


@cache
def _files() -> dict[str, bytes]:
    """The files of a small checkpoint."""
    with TemporaryDirectory() as folder:
        shape = {**SMALL, "num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
        (Path(folder) / "a.yml").write_bytes(json_bytes(shape))
        write_initial_weights(load([Path(folder) / "a.yml"], {"save": f"{folder}/run", "checkpoint_factor": 1}), None)
        (Path(folder) / "a.yml").unlink()
        (Path(folder) / "run" / ".lock").unlink(missing_ok=True)
        return {str(file.relative_to(folder)): file.read_bytes() for file in Path(folder).rglob("*") if file.is_file()}


def _sealed(manifest: Any, files: Case) -> bytes:
    """A manifest whose checksum is right, and which has the sums of the files as they are."""
    if isinstance(manifest, dict) and isinstance(records := manifest.get("files"), dict):
        for name, record in records.items():
            content = files.get(f"run/global_step0/{name}")
            if isinstance(content, bytes) and isinstance(record, dict):
                record |= {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    if isinstance(manifest, dict):
        manifest.pop("checksum", None)
        manifest = {"checksum": hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest(), **manifest}
    return json_bytes(manifest)


@st.composite
def _cases(draw: DrawFn) -> Case:
    files = _files()
    manifest = json.loads(files[_MANIFEST])
    tensors = [name for name in files if name.endswith(".pt")]
    match draw(st.sampled_from(["any", "manifest", "tensors", "tensors", "foreign"])):
        case "any":
            return draw(spoilt_folder(files, ["run/latest", _MANIFEST]))
        case "manifest":  # values spoilt, the checksum right
            return {_MANIFEST: _sealed(draw(spoilt_value(manifest)), {})}
        case "tensors":  # a file spoilt, whose sum is right
            name, source = draw(st.sampled_from(tensors)), draw(st.sampled_from(tensors))
            content = draw(st.one_of(spoilt_bytes(files[name]), st.just(files[source])))
            return {name: content, _MANIFEST: _sealed(manifest, {name: content})}
    name = draw(st.sampled_from(tensors))  # of GPT-NeoX: no manifest, nothing is compared
    return {_MANIFEST: MISSING, name: draw(spoilt_file(files[name]))}


def _run(folder: Path) -> None:
    run = folder / "run"
    command(inspect_checkpoints.main, run)
    path = find_checkpoint(run)
    args, _ = load_checkpoint_args(path)
    load_weights(path, args, layers=layer_params(args), tensor_rank=0, tensor_size=1)
    command(reshard.main, "--input_dir", path, "--output_dir", folder / "out", "--tp", 2)
    if (path / "manifest.json").exists():
        command(verify.main, run)


KIND = Kind("checkpoints", _cases(), _run, lambda case: _files())
