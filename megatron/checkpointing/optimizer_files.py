"""Reads optimizer state by parameter, from files that any parallel layout can read.

`optim_layer_LL-model_TT.pt` holds {our parameter name: {key: tensor}} of layer LL and tensor rank TT. Keys
are `exp_avg` and the like, in the shape of that rank's shard of the parameter, `step`, `master`, the fp32
value of a 16-bit weight, and `ema`, the average of the weight (`ema_decay`). The files do not depend on
pipeline stages, data-parallel ranks or ZeRO.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.layout import optimizer_file, optimizer_files
from megatron.checkpointing.opening import OpenCheckpoint
from megatron.mpu import ParamSpec, shard, unshard

MASTER, AVERAGE = "master", "ema"
State = dict[str, Tensor]
_FIX = "load another `iteration`, or set no_load_optim: true to continue from the weights alone"


class OptimizerFiles:
    """The optimizer state of a checkpoint, by parameter. `bool(...)` is false if there is none.

    checkpoint: an opened checkpoint, or its directory. Files are checked against the manifest before they are
        read. Tensors stay in their files until they are used; only one layer's files are open at a time.
    """

    def __init__(self, checkpoint: str | Path | OpenCheckpoint) -> None:
        self._source = checkpoint if isinstance(checkpoint, OpenCheckpoint) else OpenCheckpoint(checkpoint)
        self.path = self._source.path
        manifest = self._source.manifest  # of a copy on a machine (`local_save`) only some layers are there
        self.files = optimizer_files(self.path, None if manifest is None else manifest.files)
        self.tensor_size = max((rank for _, rank in self.files), default=-1) + 1
        self._open: tuple[int, list[Mapping[str, Any]]] = (-1, [])

    def __bool__(self) -> bool:
        return bool(self.files)

    @property
    def has_averages(self) -> bool:
        """Whether the checkpoint has averages of its weights (`ema_decay`)."""
        manifest = self._source.manifest
        records = () if manifest is None else manifest.files.values()
        return any(name.endswith(f"/{AVERAGE}") for record in records for name in record.tensors)

    def _layer(self, layer: int) -> list[Mapping[str, Any]]:
        if self._open[0] != layer:
            names = [optimizer_file(layer, rank) for rank in range(self.tensor_size)]
            self._open = (layer, [_checked(self._source.tensors(name), self.path / name) for name in names])
        return self._open[1]

    def names(self, layers: Iterable[int]) -> set[tuple[int, str]]:
        """Returns (layer, name) of each parameter of `layers` that has optimizer state."""
        with_files = {layer for layer, _ in self.files}
        return {(layer, name) for layer in layers if layer in with_files for name in self._layer(layer)[0]}

    def read(self, layer: int, spec: ParamSpec, tensor_rank: int, tensor_size: int) -> State:
        """Returns a parameter's state by key (`exp_avg`), sharded for `tensor_rank` of `tensor_size` ranks.

        layer: its NeoX index. Returns {} if no update was done yet. Raises CheckpointError if the file lacks
            the parameter, or has it in another shape."""
        # The state of a table that all blocks share is in the first block's file.
        parts = self._layer(2 if spec.shared else layer)
        source = f"{self.path}, optimizer state of layer {layer}: {spec.name}"
        if any(spec.name not in part for part in parts):
            raise CheckpointError(f"{source} is missing; {_FIX}")
        state: State = {}
        for key, value in parts[0][spec.name].items():
            if value.dim() == 0:
                state[key] = value.clone()
                continue
            pieces, want = [part[spec.name][key] for part in parts], spec.local_shape(self.tensor_size)
            for piece in pieces:
                if tuple(piece.shape) != want:
                    raise CheckpointError(
                        f"{source}.{key}: has shape {tuple(piece.shape)} in the file, but the model "
                        f"needs {want}; {_FIX}"
                    )
            state[key] = resharded(pieces, spec, tensor_rank, tensor_size)
        return state


def resharded(pieces: Sequence[Tensor], spec: ParamSpec, tensor_rank: int, tensor_size: int) -> Tensor:
    """Returns the shard of `tensor_rank` of `tensor_size` ranks.

    pieces: the shards of all ranks that wrote the checkpoint."""
    if tensor_size == len(pieces):
        return pieces[tensor_rank]
    return shard(unshard(pieces, spec), spec, tensor_rank, tensor_size)


def _checked(state: Any, path: Path) -> Mapping[str, Any]:
    if not isinstance(state, dict) or not all(
        isinstance(param_state, dict) and all(isinstance(value, Tensor) for value in param_state.values())
        for param_state in state.values()
    ):
        raise CheckpointError(f"{path}: not a file of optimizer state (expected a dict of tensors for each parameter)")
    return state
