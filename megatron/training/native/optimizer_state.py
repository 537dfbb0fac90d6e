"""The optimizer's state by parameter, as checkpoints have it: out of what each data rank holds, and in."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.checkpointing import MASTER
from megatron.training.engine import HostCopy, State
from megatron.training.native.shards import Shard, Weights


class OptimizerState:
    """Reads and writes `state`, what optimizers keep of each trained shard by its `local`."""

    def __init__(self, weights: Weights, state: MutableMapping[Tensor, dict[str, Any]], dtype: torch.dtype) -> None:
        self._weights, self._state, self._dtype = weights, state, dtype

    def gather_weights(
        self, shards: Sequence[tuple[int, str, Shard]], writer_of: Mapping[int, int], copy: HostCopy
    ) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """As `gather`, weights in the dtype of the run. shards: by layer and name of the files they belong
        into, in which one that layers share stands for each."""
        for layer, worker, writes in self._layers(writer_of):
            tensors: dict[str, Tensor] = {}
            for at, name, shard in shards:
                if at == layer:
                    whole = self._weights.gather(shard, shard.local.detach().to(shard.dtype(self._dtype)), worker)
                    if whole is not None:
                        tensors[name] = copy(whole)
            if writes:
                yield layer, tensors

    def gather(self, writer_of: Mapping[int, int], copy: HostCopy) -> Iterator[tuple[int, dict[str, State]]]:
        """(layer, state by name) of the layers that this data rank writes, one after another, each tensor
        made by `copy`.

        writer_of: layer -> data rank; layers that are not in it are left out. All ranks of a data group
        iterate to the end together. A rank holds no more than one layer that it writes, and one parameter on
        its device.
        """
        for layer, worker, writes in self._layers(writer_of):
            states = {s.name: self._whole_state(s, worker, copy) for s in self._weights.trained if s.layer == layer}
            if writes:
                yield layer, states

    def _layers(self, writer_of: Mapping[int, int]) -> Iterator[tuple[int, int, bool]]:
        """(layer, worker that writes it, whether that is this rank) of the layers written by its workers."""
        for layer, writer in writer_of.items():
            worker = self._weights.worker_of(writer)
            if worker is not None:
                yield layer, worker, worker == self._weights.workers[0]

    def _whole_state(self, shard: Shard, worker: int, copy: HostCopy) -> State:
        """The whole of this tensor rank's part; {} on other data ranks than the worker."""
        mine, whole = worker == self._weights.workers[0], {}
        state = self._state.get(shard.local, {})
        parts = {MASTER: shard.local.detach()} if self._dtype != torch.float32 else {}
        parts |= {key: value for key, value in state.items() if isinstance(value, Tensor) and value.dim() > 0}
        for key, part in parts.items():
            value = self._weights.gather(shard, part, worker)
            if mine:
                assert value is not None
                whole[key] = copy(value)
        if mine and "step" in state:
            whole["step"] = copy(state["step"])
        return whole

    @torch.no_grad()
    def restore(self, read: Callable[[int, str], State]) -> None:
        """Set moments and step counts. read: state of a parameter's tensor-parallel part by layer and name;
        parameters without state leave a fresh optimizer."""
        for shard in self._weights.trained:
            state = read(shard.layer, shard.name)
            if state:
                self._state[shard.local] = {
                    key: value.to(shard.local.device, torch.float32, copy=True)
                    if key == "step"
                    else shard.slice_of(value).to(shard.local.device, copy=True)
                    for key, value in state.items()
                }
