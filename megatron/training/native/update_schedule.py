"""Schedules the parts of an update under the forward of the next step, each before its weights are used."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from megatron.model import Stage
from megatron.mpu.torch_versions import all_gather_streams
from megatron.training.native.fully_sharded import shared_modules
from megatron.training.native.shards import Shard


class PartialUpdate(NamedTuple):
    """The update of some weights. run: updates them; release: frees their gradients afterwards."""

    run: Callable[[], None]
    release: Callable[[], None]


class UpdateSchedule:
    """Runs each partial update before the module that first uses its weights.

    On a GPU all updates are queued at once on a separate stream. Streams that read a module's weights wait
    for its event before its forward; the host does not wait. On a CPU an update runs right before its
    module's forward.
    """

    def __init__(self, stage: Stage, modules: Iterable[nn.Module], device: torch.device) -> None:
        """Register a forward hook on each of `modules`, the modules of the updates."""
        self._stage, self._waiting = stage, dict[nn.Module, PartialUpdate]()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # `fully_shard` gathers weights in hooks of its own, which come later. Compiled code has none.
        hook = torch.compiler.disable(self._before_forward) if stage.compiled else self._before_forward
        self._hooks = [module.register_forward_pre_hook(hook, prepend=True) for module in modules]

    def start(self, updates: Mapping[nn.Module, PartialUpdate]) -> None:
        """Take the updates of a step, in the order of the forward, and on a GPU queue them. The previous step
        must be finished."""
        assert not self._waiting
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        for module, update in updates.items():
            self._waiting[module] = update if self._stream is None else self._queued(update, self._stream)

    def _queued(self, update: PartialUpdate, stream: torch.cuda.Stream) -> PartialUpdate:
        """Queue an update on the stream. Returns a PartialUpdate that waits for it, then frees its
        gradients."""
        with torch.cuda.stream(stream):
            update.run()
        # Until the wait gradients are kept: their memory belongs to streams that do not know of this one.
        return PartialUpdate(partial(self._wait_for, stream.record_event()), update.release)

    def _wait_for(self, event: torch.cuda.Event) -> None:
        for stream in (torch.cuda.current_stream(), *all_gather_streams(self._stage)):
            stream.wait_event(event)

    def wait(self, module: nn.Module) -> None:
        """Make later work see a module's new weights: run or wait for its update, and free its gradients."""
        if (update := self._waiting.pop(module, None)) is not None:
            update.run()
            update.release()

    def finish(self) -> None:
        """Call `wait` for every module whose update is pending."""
        for module in list(self._waiting):
            self.wait(module)

    def _before_forward(self, module: nn.Module, inputs: object) -> None:
        self.wait(module)

    def close(self) -> None:
        """Release hooks."""
        for hook in self._hooks:
            hook.remove()


def first_uses(stage: Stage, shards: Sequence[Shard]) -> dict[nn.Module, list[Shard]]:
    """Groups shards by the module whose forward uses them first, in the order of a forward.

    - Weights of one layer belong to that layer, a tied weight to the embedding.
    - Weights that blocks share belong to the shared module, which comes before the blocks.
    - Weights that `fully_shard` gathers before the stage runs (all except those of blocks and shared modules)
      belong to the stage.
    """
    shared, blocks = shared_modules(stage), {str(spec.index) for spec in stage.blocks}
    user: dict[nn.Parameter, nn.Module] = {param: module for module in shared for param in module.parameters()}
    order: list[nn.Module] = [stage]
    for index, layer in stage.layers.items():
        if index in blocks:
            order += [module for module in shared if module not in order]
        order.append(layer)
        for param in layer.parameters():
            user.setdefault(param, stage if isinstance(stage, FSDPModule) and index not in blocks else layer)
    shards_by_module = {module: [shard for shard in shards if user[shard.param] is module] for module in order}
    return {module: module_shards for module, module_shards in shards_by_module.items() if module_shards}
