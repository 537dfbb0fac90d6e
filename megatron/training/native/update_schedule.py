"""Overlaps an optimizer update with the next step's forward: each part runs before its weights are used."""

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
    """The optimizer update of some of the weights. run: updates them; release: frees their gradients
    afterwards."""

    run: Callable[[], None]
    release: Callable[[], None]


class UpdateSchedule:
    """Runs each partial update before the module that first uses its weights.

    On a GPU all updates are queued at once on a separate stream. Streams that read a module's weights wait
    for its event before its forward; the host does not wait. On a CPU an update runs right before its
    module's forward.
    """

    def __init__(self, stage: Stage, modules: Iterable[nn.Module], device: torch.device) -> None:
        """Register a hook before the forward of each of `modules`, whose weights are updated separately."""
        self._stage, self._waiting = stage, dict[nn.Module, PartialUpdate]()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # The hooks of `fully_shard`, which gather weights, run after this one. Compiled code must not contain
        # it.
        hook = torch.compiler.disable(self._before_forward) if stage.compiled else self._before_forward
        self._hooks = [module.register_forward_pre_hook(hook, prepend=True) for module in modules]

    def start(self, updates: Mapping[nn.Module, PartialUpdate]) -> None:
        """Take the updates of a step by module, in the order of the forward; on a GPU queue them at once.

        The updates of the previous step must be finished.
        """
        assert not self._waiting
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        for module, update in updates.items():
            self._waiting[module] = update if self._stream is None else self._queued(update, self._stream)

    def _queued(self, update: PartialUpdate, stream: torch.cuda.Stream) -> PartialUpdate:
        """Queue an update on `stream`. Returns a PartialUpdate that waits for it and then frees its
        gradients."""
        with torch.cuda.stream(stream):
            update.run()
        # Gradients are kept until then, because their memory was allocated on other streams.
        return PartialUpdate(partial(self._wait_for, stream.record_event()), update.release)

    def _wait_for(self, event: torch.cuda.Event) -> None:
        for stream in (torch.cuda.current_stream(), *all_gather_streams(self._stage)):
            stream.wait_event(event)

    def wait(self, module: nn.Module) -> None:
        """Make a module's new weights visible to later work: run its update or wait for it, free its
        gradients."""
        if (update := self._waiting.pop(module, None)) is not None:
            update.run()
            update.release()

    def finish(self) -> None:
        """Complete the pending updates of all modules, and free their gradients."""
        for module in list(self._waiting):
            self.wait(module)

    def _before_forward(self, module: nn.Module, inputs: object) -> None:
        self.wait(module)

    def close(self) -> None:
        """Remove the hooks from the modules."""
        for hook in self._hooks:
            hook.remove()


def first_uses(stage: Stage, shards: Sequence[Shard]) -> dict[nn.Module, list[Shard]]:
    """Returns the shards grouped by the module whose forward uses their weights first, in the order of a
    forward.

    - Weights of one layer are grouped under that layer, a tied weight under the embedding.
    - Weights that blocks share are grouped under the shared module, which comes before the blocks.
    - With `fully_shard`, all other weights (not of blocks or shared modules) are grouped under the stage,
      because they are gathered before it runs.
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
