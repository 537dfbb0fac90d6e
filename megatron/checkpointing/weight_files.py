"""Finds, reads and describes the files of weights in a checkpoint directory of any program.

Layouts: one file for each layer and tensor rank (pipe >= 1); one mp_rank file for each tensor rank with keys
    `sequential.N.name` (pipe 0); `{"module": {"module": {"N.name": ...}}}`, which the fork's converters
    write.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpointing import layout
from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.manifest import MANIFEST
from megatron.checkpointing.opening import OpenCheckpoint
from megatron.checkpointing.parameter_names import has_old_rows, naming_of, neox_name_of
from megatron.model.weight_map import attention_of, may_be_wide
from megatron.neox_arguments import ModelArgs
from megatron.neox_arguments.values.integers import parse_integer


@dataclass
class WeightFiles:
    """The files that hold the weights of a checkpoint.

    source: the checkpoint. tensor_size: number of tensor ranks that wrote it.
    layers: NeoX indices of its layers.
    files: by (layer, tensor rank); by tensor rank if mp_rank files hold all layers.
    mp_rank_tensors: tensors of the mp_rank files read so far, by rank, layer and name; None if there are
        layer files.
    """

    source: OpenCheckpoint
    tensor_size: int
    layers: frozenset[int]
    files: Mapping[Any, Path]
    mp_rank_tensors: dict[int, dict[int, dict[str, Tensor]]] | None = field(default=None, repr=False)

    @property
    def path(self) -> Path:
        """The checkpoint's directory."""
        return self.source.path

    def file(self, layer: int, rank: int) -> Path:
        key = rank if self.mp_rank_tensors is not None else (layer, rank)
        return self.files[key]

    def tensors(self, layer: int, rank: int) -> dict[str, Tensor]:
        """Returns one tensor rank's tensors of a layer, memory-mapped, by their names in the file; {} without
        such a layer."""
        if self.mp_rank_tensors is not None:
            if rank not in self.mp_rank_tensors:
                self.mp_rank_tensors[rank] = _split_module(self.source.tensors(self.files[rank].name), self.files[rank])
            return self.mp_rank_tensors[rank].get(layer, {})
        if (layer, rank) not in self.files:
            return {}
        state = self.source.tensors(self.files[layer, rank].name)
        if not isinstance(state, dict) or not all(_is_entry(k, v) for k, v in state.items()):
            raise CheckpointError(f"{self.files[layer, rank]}: not a layer file (expected a flat dict of tensors)")
        return state


def _is_entry(name: Any, value: Any) -> bool:
    return isinstance(name, str) and (isinstance(value, Tensor) or name.endswith("_extra_state"))


def _split_module(state: Any, file: Path) -> dict[int, dict[str, Tensor]]:
    """Returns the tensors of an mp_rank file, by NeoX layer index and name.

    state: the file's content, a dict with keys `sequential.N.name` or `N.name`, inside any number of nested
        "module" dicts. Raises CheckpointError for other content."""
    while isinstance(state, dict) and "module" in state:
        state = state["module"]
    if not isinstance(state, dict) or not state:
        raise CheckpointError(
            f"{file}: holds no weights, and there are no layer files; save again with "
            "stage3_gather_16bit_weights_on_model_save if ZeRO 3 wrote it, else load another `iteration`"
        )
    layers: dict[int, dict[str, Tensor]] = {}
    for key, value in state.items():
        number, _, name = key.removeprefix("sequential.").partition(".")
        layer = parse_integer(number)
        if layer is None or not name or not _is_entry(key, value):
            raise CheckpointError(f"{file}: {key}: is not a weight with a NeoX name (sequential.N.name or N.name)")
        layers.setdefault(layer, {})[name] = value
    return layers


def open_weight_files(checkpoint: str | Path | OpenCheckpoint) -> WeightFiles:
    """Finds a checkpoint's weight files: layer files, or mp_rank files with all layers.

    Each file is checked before it is first read. Raises CheckpointError if files are missing."""
    source = checkpoint if isinstance(checkpoint, OpenCheckpoint) else OpenCheckpoint(checkpoint)
    path = source.path
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder; pass the folder of a checkpoint")
    # Of a copy on a machine (`local_save`) only some layers are there; the manifest lists all of them.
    names = None if source.manifest is None else source.manifest.files
    files: Mapping[Any, Path] = layout.layer_files(path, names)
    if files:
        layers, ranks = {layer for layer, _ in files}, {rank for _, rank in files}
        size = max(ranks) + 1
        missing = [layout.layer_file(n, r) for n in sorted(layers) for r in range(size) if (n, r) not in files]
        if missing:
            raise CheckpointError(f"{path}: incomplete: missing {', '.join(missing)}; load another `iteration`")
        return WeightFiles(source, size, frozenset(layers), files)
    files = layout.model_files(path)
    if not files:
        raise CheckpointError(f"{path}: has neither layer files nor mp_rank files, so it is not a NeoX checkpoint")
    missing = [layout.model_file(r) for r in range(max(files) + 1) if r not in files]
    if missing:
        raise CheckpointError(f"{path}: incomplete: missing {', '.join(missing)}; load another `iteration`")
    rank_tensors = _split_module(source.tensors(files[0].name), files[0])
    return WeightFiles(source, len(files), frozenset(rank_tensors), files, {0: rank_tensors})


@dataclass(frozen=True)
class CheckpointDescription:
    """Facts about a checkpoint from its files, without a configuration.

    layout, names: words for the layout of the files and for the naming of tensors.
    blocks: names of all tensors in blocks and in the layers after them.
    tensor_size: number of tensor ranks that wrote it.
    wide: dtypes of weights that may be fp32 in a 16-bit model (`may_be_wide`), by (NeoX layer index, name).
    dtypes: dtypes of all other weights.
    vocab_rows: rows of the embedding, summed over tensor ranks.
    ffn_size: inner width of the first MLP; None if no file shows it.
    """

    layout: str
    names: str
    blocks: frozenset[str]
    tensor_size: int
    dtypes: frozenset[torch.dtype]
    vocab_rows: int
    ffn_size: int | None
    wide: Mapping[tuple[int, str], torch.dtype]


def describe_checkpoint(path: str | Path) -> CheckpointDescription:
    """Returns facts about a checkpoint from names, dtypes and shapes in its files.

    No configuration is needed, and no weight is read or checked. Raises CheckpointError."""
    source = open_weight_files(OpenCheckpoint(path, verified=False))
    layout_name = "layer files (pipeline)" if source.mp_rank_tensors is None else "mp_rank files (no pipeline)"
    states = {layer: source.tensors(layer, 0) for layer in sorted(source.layers)}
    all_dtypes = {
        (layer, n): t.dtype for layer, state in states.items() for n, t in state.items() if isinstance(t, Tensor)
    }
    wide = {place: dtype for place, dtype in all_dtypes.items() if may_be_wide(place[1])}
    dtypes = frozenset(dtype for place, dtype in all_dtypes.items() if place not in wide)
    embedding = source.tensors(0, 0).get("word_embeddings.weight")
    blocks = [(name, value) for layer, state in states.items() if layer >= 2 for name, value in state.items()]
    if embedding is None:
        raise CheckpointError(f"{path}: layer 0 has no word_embeddings.weight, so it is not a GPT-NeoX model")
    down = "mlp.linear2.weight"
    ffn = next((t.shape[1] * source.tensor_size for n, t in blocks if neox_name_of(n, (down,)) == down), None)
    rows = embedding.shape[0] * source.tensor_size
    block_names = frozenset(name for name, _ in blocks)
    names = naming_of(block_names)
    return CheckpointDescription(layout_name, names, block_names, source.tensor_size, dtypes, rows, ffn, wide)


def describe_layout(path: str | Path, args: ModelArgs) -> str:
    """Returns words for a checkpoint's file layout, tensor ranks, tensor naming and row order.

    Raises CheckpointError."""
    facts = describe_checkpoint(path)
    words = f"{facts.layout}, {facts.tensor_size} tensor ranks, names {facts.names}"
    grouped = [a for a in (attention_of(args, n + 2) for n in range(args.num_layers)) if a and a.kv_heads < a.heads]
    if not grouped:
        return words
    old = has_old_rows(facts.blocks, grouped[0], rows_key(Path(path), args))
    return f"{words}, rows of grouped queries as {'before' if old else 'since'} #1315"


def rows_key(path: Path, args: ModelArgs) -> str | None:
    """Returns `args.compat_gqa_rows` for a GPT-NeoX checkpoint; None for ours, whose row order is fixed."""
    return None if (path / MANIFEST).is_file() else args.compat_gqa_rows
