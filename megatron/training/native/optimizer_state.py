"""Gathers the optimizer's state by parameter from all data ranks for checkpoints, and restores it."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.checkpointing import MASTER
from megatron.training.engine import HostCopy, State
from megatron.training.native.shards import Shard, Weights


class OptimizerState:
    """Reads and writes `state`, the optimizers' state of each trained shard by its `local`."""

    def __init__(self, weights: Weights, state: MutableMapping[Tensor, dict[str, Any]], dtype: torch.dtype) -> None:
        self._weights, self._state, self._dtype = weights, state, dtype

    def gather_weights(
        self, shards: Sequence[tuple[int, str, Shard]], writer_of: Mapping[int, int], copy: HostCopy
    ) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Yields (layer, weights by name) as `gather` does, in the dtype of the run.

        shards: by layer and name in checkpoint files; a shard that layers share is listed for each.
        """
        for layer, worker, writes in self._layers(writer_of):
            tensors: dict[str, Tensor] = {}
            for shard_layer, name, shard in shards:
                if shard_layer == layer:
                    full = self._weights.gather(shard, shard.local.detach().to(shard.dtype(self._dtype)), worker)
                    if full is not None:
                        tensors[name] = copy(full)
            if writes:
                yield layer, tensors

    def gather(self, writer_of: Mapping[int, int], copy: HostCopy) -> Iterator[tuple[int, dict[str, State]]]:
        """Yields (layer, state by name) of the layers that this data rank writes, one after another.

        `copy` makes each tensor. writer_of: layer -> data rank; other layers are left out. All ranks of a
        data group iterate to the end together. A rank holds no more than one layer that it writes, and one
        parameter on its device.
        """
        for layer, worker, writes in self._layers(writer_of):
            states = {s.name: self._full_state(s, worker, copy) for s in self._weights.trained if s.layer == layer}
            if writes:
                yield layer, states

    def _layers(self, writer_of: Mapping[int, int]) -> Iterator[tuple[int, int, bool]]:
        """Yields (layer, worker that writes it, whether that is this rank) of the layers that workers
        write."""
        for layer, writer in writer_of.items():
            worker = self._weights.worker_of(writer)
            if worker is not None:
                yield layer, worker, worker == self._weights.workers[0]

    def _full_state(self, shard: Shard, worker: int, copy: HostCopy) -> State:
        """Returns the full state of this tensor rank's part; {} on data ranks other than the worker."""
        is_worker, full = worker == self._weights.workers[0], {}
        state = self._state.get(shard.local, {})
        parts = {MASTER: shard.local.detach()} if self._dtype != torch.float32 else {}
        parts |= {key: value for key, value in state.items() if isinstance(value, Tensor) and value.dim() > 0}
        for key, part in parts.items():
            value = self._weights.gather(shard, part, worker)
            if is_worker:
                assert value is not None
                full[key] = copy(value)
        if is_worker and "step" in state:
            full["step"] = copy(state["step"])
        return full

    @torch.no_grad()
    def restore(self, read: Callable[[int, str], State]) -> None:
        """Set moments and step counts.

        read: returns the state of a parameter's tensor-parallel part for a layer and name. If parameters have
        no state, the optimizer stays fresh.
        """
        for shard in self._weights.trained:
            state = read(shard.layer, shard.name)
            if state:
                self._state[shard.local] = {
                    key: value.to(shard.local.device, torch.float32, copy=True)
                    if key == "step"
                    else shard.slice_of(value).to(shard.local.device, copy=True)
                    for key, value in state.items()
                }
