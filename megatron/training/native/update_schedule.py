"""When the parts of an update run: under the forward of the next step, each before its weights are used."""

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
    """The update of some weights. run: changes them; release: gives their gradients up, once that is done."""

    run: Callable[[], None]
    release: Callable[[], None]


class UpdateSchedule:
    """Runs partial updates before the modules that use their weights first.

    On a GPU all are queued at once, on a stream of their own; the streams that read a module's weights wait
    for its event before its forward, and the host waits for nothing. A CPU has no streams: an update runs
    when its module does.
    """

    def __init__(self, stage: Stage, modules: Iterable[nn.Module], device: torch.device) -> None:
        """modules: of the updates, each with a hook from now on."""
        self._stage, self._waiting = stage, dict[nn.Module, PartialUpdate]()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # `fully_shard` gathers weights in hooks of its own, which come later. Compiled code has none.
        hook = torch.compiler.disable(self._before_forward) if stage.compiled else self._before_forward
        self._hooks = [module.register_forward_pre_hook(hook, prepend=True) for module in modules]

    def start(self, updates: Mapping[nn.Module, PartialUpdate]) -> None:
        """Take the updates of a step, in the order of the forward. The step before must be finished."""
        assert not self._waiting
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        for module, update in updates.items():
            self._waiting[module] = update if self._stream is None else self._queued(update, self._stream)

    def _queued(self, update: PartialUpdate, stream: torch.cuda.Stream) -> PartialUpdate:
        """The rest of an update that runs on a stream from now on."""
        with torch.cuda.stream(stream):
            update.run()
        # Until the wait gradients are kept: their memory belongs to streams that do not know of this one.
        return PartialUpdate(partial(self._wait_for, stream.record_event()), update.release)

    def _wait_for(self, event: torch.cuda.Event) -> None:
        for stream in (torch.cuda.current_stream(), *all_gather_streams(self._stage)):
            stream.wait_event(event)

    def wait(self, module: nn.Module) -> None:
        """Let whatever runs from now on see the new weights of a module."""
        if (update := self._waiting.pop(module, None)) is not None:
            update.run()
            update.release()

    def finish(self) -> None:
        """`wait` for all modules."""
        for module in list(self._waiting):
            self.wait(module)

    def _before_forward(self, module: nn.Module, inputs: object) -> None:
        self.wait(module)

    def close(self) -> None:
        """Release hooks."""
        for hook in self._hooks:
            hook.remove()


def first_uses(stage: Stage, shards: Sequence[Shard]) -> dict[nn.Module, list[Shard]]:
    """Shards by the module whose forward uses them first, in the order of a forward.

    That is their layer, and a module that blocks share by itself (it runs before them). A tied weight is the
    embedding's. What `fully_shard` gathers before the stage runs, all but blocks and shared modules, is the
    stage's.
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
    uses = {module: [shard for shard in shards if user[shard.param] is module] for module in order}
    return {module: found for module, found in uses.items() if found}
