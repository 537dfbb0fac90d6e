"""The files of weights in a checkpoint directory, of any writer: finding them, reading a layer, describing
them.

Layouts: one file for each layer and tensor rank (pipe >= 1); one mp_rank file for each tensor rank with keys
`sequential.N.name` (pipe 0); the fork converters' `{"module": {"module": {"N.name": ...}}}`.
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
from megatron.checkpointing.parameter_names import has_old_rows, naming_of, our_name
from megatron.model.weight_map import attention_of, may_be_wide
from megatron.neox_arguments import NeoXArgs


@dataclass
class WeightFiles:
    """The files that hold the weights of a checkpoint.

    source: the checkpoint. tensor_size: number of tensor ranks that wrote it. layers: NeoX indices of the
    layers that it holds.
    files: by (layer, tensor rank), or by tensor rank where an mp_rank file holds all layers; `whole` then has
    the tensors of the files that were read, by rank, layer and name.
    """

    source: OpenCheckpoint
    tensor_size: int
    layers: frozenset[int]
    files: Mapping[Any, Path]
    whole: dict[int, dict[int, dict[str, Tensor]]] | None = field(default=None, repr=False)  # rank -> layer -> name

    @property
    def path(self) -> Path:
        """The checkpoint's directory."""
        return self.source.path

    def file(self, layer: int, rank: int) -> Path:
        key = rank if self.whole is not None else (layer, rank)
        return self.files[key]

    def tensors(self, layer: int, rank: int) -> dict[str, Tensor]:
        """One layer of one tensor rank under the names of the file; memory-mapped, so only what is used is
        read."""
        if self.whole is not None:
            if rank not in self.whole:
                self.whole[rank] = _split_module(self.source.tensors(self.files[rank].name), self.files[rank])
            return self.whole[rank].get(layer, {})
        state = self.source.tensors(self.files[layer, rank].name)
        if not isinstance(state, dict) or not all(_is_entry(k, v) for k, v in state.items()):
            raise CheckpointError(f"{self.files[layer, rank]}: not a layer file (expected a flat dict of tensors)")
        return state


def _is_entry(name: Any, value: Any) -> bool:
    return isinstance(name, str) and (isinstance(value, Tensor) or name.endswith("_extra_state"))


def _split_module(state: Any, file: Path) -> dict[int, dict[str, Tensor]]:
    """The tensors of an mp_rank file by layer and name.

    state: a dict with keys `sequential.N.name` or `N.name`, in any number of nested "module" dicts.
    Raises CheckpointError for other content.
    """
    while isinstance(state, dict) and "module" in state:
        state = state["module"]
    if not isinstance(state, dict) or not state:
        raise CheckpointError(
            f"{file}: holds no weights and there are no layer files beside it; for ZeRO 3 write one with "
            "stage3_gather_16bit_weights_on_model_save, else load another `iteration`"
        )
    layers: dict[int, dict[str, Tensor]] = {}
    for key, value in state.items():
        number, _, name = key.removeprefix("sequential.").partition(".")
        if not number.isdigit() or not name or not _is_entry(key, value):
            raise CheckpointError(f"{file}: {key}: not a weight under a NeoX name (sequential.N.name or N.name)")
        layers.setdefault(int(number), {})[name] = value
    return layers


def open_weight_files(checkpoint: str | Path | OpenCheckpoint) -> WeightFiles:
    """The files of weights of a checkpoint, in whichever layout; of a directory each is checked before it is
    first read. Raises CheckpointError when some are missing."""
    source = checkpoint if isinstance(checkpoint, OpenCheckpoint) else OpenCheckpoint(checkpoint)
    path = source.path
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such checkpoint")
    files: Mapping[Any, Path] = layout.layer_files(path)
    if files:
        layers, ranks = {layer for layer, _ in files}, {rank for _, rank in files}
        size = max(ranks) + 1
        missing = [layout.layer_file(n, r) for n in sorted(layers) for r in range(size) if (n, r) not in files]
        if missing:
            raise CheckpointError(f"{path}: incomplete, without {', '.join(missing)}; load another `iteration`")
        return WeightFiles(source, size, frozenset(layers), files)
    files = layout.model_files(path)
    if not files:
        raise CheckpointError(f"{path}: neither layer files nor mp_rank files; not a NeoX checkpoint")
    missing = [layout.model_file(r) for r in range(max(files) + 1) if r not in files]
    if missing:
        raise CheckpointError(f"{path}: incomplete, without {', '.join(missing)}; load another `iteration`")
    first = _split_module(source.tensors(files[0].name), files[0])
    return WeightFiles(source, len(files), frozenset(first), files, {0: first})


@dataclass(frozen=True)
class CheckpointDescription:
    """What the files of a checkpoint say of it without a configuration.

    layout, names: the layout of the files and the naming of tensors, in words. blocks: the names of the
    tensors of all blocks, which in a hybrid are of several kinds, and of what follows them. tensor_size:
    number of tensor ranks that wrote it. dtypes: of all weights but those of `wide`, which may be fp32 beside
    others in 16 bits (`may_be_wide`), by NeoX layer index and name. vocab_rows: rows of the embedding over
    all ranks. ffn_size: inner width of the first MLP; None where no file says it.
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
    """Describe the files of a checkpoint directory without a configuration; no weight is read, and none
    checked. Raises CheckpointError."""
    source = open_weight_files(OpenCheckpoint(path, verified=False))
    layout_name = "layer files (pipeline)" if source.whole is None else "mp_rank files (no pipeline)"
    states = {layer: source.tensors(layer, 0) for layer in sorted(source.layers)}
    every = {(layer, n): t.dtype for layer, state in states.items() for n, t in state.items() if isinstance(t, Tensor)}
    wide = {place: dtype for place, dtype in every.items() if may_be_wide(place[1])}
    dtypes = frozenset(dtype for place, dtype in every.items() if place not in wide)
    embedding = source.tensors(0, 0).get("word_embeddings.weight")
    blocks = [(name, value) for layer, state in states.items() if layer >= 2 for name, value in state.items()]
    if embedding is None:
        raise CheckpointError(f"{path}: layer 0 holds no word_embeddings.weight; not a model of GPT-NeoX")
    down = "mlp.linear2.weight"
    ffn = next((t.shape[1] * source.tensor_size for n, t in blocks if our_name(n, (down,)) == down), None)
    rows = embedding.shape[0] * source.tensor_size
    of_blocks = frozenset(name for name, _ in blocks)
    names = naming_of(of_blocks)
    return CheckpointDescription(layout_name, names, of_blocks, source.tensor_size, dtypes, rows, ffn, wide)


def describe_layout(path: str | Path, args: NeoXArgs) -> str:
    """The layout, the naming and the order of rows of a checkpoint directory, as text. Raises
    CheckpointError."""
    facts = describe_checkpoint(path)
    words = f"{facts.layout}, {facts.tensor_size} tensor ranks, names {facts.names}"
    grouped = [a for a in (attention_of(args, n + 2) for n in range(args.num_layers)) if a and a.kv_heads < a.heads]
    if not grouped:
        return words
    old = has_old_rows(facts.blocks, grouped[0], rows_key(Path(path), args))
    return f"{words}, rows of grouped queries as {'before' if old else 'since'} #1315"


def rows_key(path: Path, args: NeoXArgs) -> str | None:
    """`compat_gqa_rows` for a checkpoint of GPT-NeoX; None for ours, whose rows are always in today's
    order."""
    return None if (path / MANIFEST).is_file() else args.compat_gqa_rows
