"""What the memory of a device holds while a piece of training runs, by part: counted storage by storage,
since no allocator knows what a block of memory is for. torch's own `MemTracker` knows modules and optimizers
by hooks on them: no output layer that makes its loss, no fp32 master weights or flat buffers of an engine."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from megatron.model import Stage
from megatron.model.block import Block
from megatron.model.head import OutputProjection

PARTS = ("weights", "gradients", "optimizer states", "buffers", "activations", "logits", "other")
_BY_MOMENT = ("activations", "logits", "other")  # of what nothing more is known than when it was allocated
_POINTS = 200  # of a timeline

Held = Mapping[str, Iterable[Tensor]]
"""Tensors by part, as `Engine.tensors` gives them."""


class MemoryTimeline(NamedTuple):
    """Bytes by part at the peak, whose sum is `peak`; and after the changes number `moments` (allocations and
    frees, of which there were `changes`) those of each part."""

    parts: dict[str, int]
    peak: int
    changes: int
    moments: list[int]
    bytes_by_part: dict[str, list[int]]


class _Storage:
    """A storage that was seen. part: see `PARTS`; size: bytes."""

    __slots__ = ("part", "reference", "size")

    def __init__(self, part: str, reference: weakref.ref[torch.UntypedStorage]) -> None:
        self.part, self.reference, self.size = part, reference, 0


class MemoryTracker(TorchDispatchMode):
    """Counts, while it is entered, the storages of a device: which are alive, and what for. The part of a
    storage is the first of these that it ever is, so that a gradient is one from its allocation on:

    - weights: of a parameter, gathered ones too (also those of frozen models beside the trained one);
    - gradients: what a backward pass brings a parameter, and what holds it until the update, or between
      steps;
    - optimizer states: master weights, moments;
    - buffers: of modules; and of each micro-batch the rotary tables, masks and document boundaries that its
      blocks share;
    - logits: allocated inside the output layer with the loss that is made in it, or in the backward pass of
      what was computed there: logits, their gradients, the gradient of the hidden states, sums of the
      gradient of the output layer's weight in another precision than its own;
    - activations: allocated at any other place before the update: what blocks keep for the backward pass,
      what that makes on its way, buffers of communication, the micro-batches on the device;
    - other: allocated in the update or after it; or not allocated by an operation, but there before the step
      or made by a library (gloo's buffers), which is counted from the first operation on that takes it.

    What kernels take and give back within one operation is not seen, nor are the tensors within compiled
    code.
    """

    supports_higher_order_operators = True

    def __init__(self, device: torch.device, held: Callable[[], Held], compiled: bool) -> None:
        """held: gives the tensors that are kept between steps. compiled: there is compiled code, in which
        nothing may be hooked, and what comes from it was allocated there."""
        super().__init__()
        self._device, self._held, self._compiled = device.type, held, compiled
        self._storages: dict[int, _Storage] = {}
        self._kept = 0  # the first changes, that make what is there before the step
        self._changes: list[tuple[_Storage, int]] = []
        self._in_head, self._first, self._of_head = False, 0, set[int]()  # numbers of the head's autograd nodes
        self._updating = False
        self._hooked: dict[int, Any] = {}  # parameters

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs under this mode; torch runs it eagerly under others."""
        return True

    @contextmanager
    def watching(self, stage: Stage) -> Iterator[None]:
        """Count what a step of this stage allocates."""
        hooks = [register_optimizer_step_pre_hook(self._begin_update)]
        for module in stage.modules():
            if isinstance(module, OutputProjection):
                hooks.append(module.register_forward_pre_hook(self._enter_head))
                hooks.append(module.register_forward_hook(self._leave_head))
            elif isinstance(module, Block) and not self._compiled:
                hooks.append(module.register_forward_pre_hook(self._note_inputs))
        for part, tensors in self._held().items():
            self._label(tensors, part)
        self._label(stage.buffers(), "buffers")
        self._kept = len(self._changes)
        try:
            with self, self._resizing():
                yield
        finally:
            for part, tensors in self._held().items():
                self._label(tensors, part)
            for hook in (*hooks, *self._hooked.values()):
                hook.remove()
            self._hooked.clear()
            self._storages.clear()  # and with them what is called when a storage goes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back with the tensors it is made of
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for tensor in inputs:
            self._see(tensor, is_new=self._compiled)
        output = func(*args, **kwargs)
        for tensor in (*inputs, *tree_leaves(output)):  # inputs may have another size now
            if isinstance(tensor, Tensor):
                self._see(tensor, is_new=True)
        return output

    # -- what a storage is for -------------------------------------------------------------------------------

    def _see(self, tensor: Tensor, is_new: bool) -> None:
        storage = self._note(tensor, is_new)
        if storage is None or not isinstance(tensor, nn.Parameter):
            return
        self._become(storage, "weights")
        if tensor.requires_grad and id(tensor) not in self._hooked and not self._compiled:
            self._hooked[id(tensor)] = tensor.register_hook(self._note_gradient)

    def _label(self, tensors: Iterable[Tensor], part: str) -> None:
        for tensor in tensors:
            if (storage := self._note(tensor, False)) is not None:
                self._become(storage, part)

    @staticmethod
    def _become(storage: _Storage, part: str) -> None:
        if storage.part in _BY_MOMENT:
            storage.part = part

    def _part_now(self) -> str:
        node = torch._C._current_autograd_node()
        if self._in_head or (node is not None and node._sequence_nr() in self._of_head):
            return "logits"
        return "other" if self._updating else "activations"

    def _enter_head(self, module: nn.Module, given: Any) -> None:
        self._in_head, self._first = True, torch.autograd._get_sequence_nr()

    def _leave_head(self, module: nn.Module, given: Any, result: Any) -> None:
        self._in_head = False
        self._of_head.update(range(self._first, torch.autograd._get_sequence_nr()))

    def _note_inputs(self, module: nn.Module, given: tuple[Any, ...]) -> None:
        _, inputs, *_ = given
        self._label((leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)), "buffers")

    def _note_gradient(self, gradient: Tensor) -> None:
        self._label([gradient], "gradients")

    def _begin_update(self, optimizer: Optimizer, *given: Any) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        of_params = [param.grad for param in params if param.grad is not None]
        self._label([*self._held()["gradients"], *of_params], "gradients")
        self._updating = True

    # -- what is alive ---------------------------------------------------------------------------------------

    def _note(self, tensor: Tensor, is_new: bool) -> _Storage | None:
        """The record of a tensor's storage, with its size as it is now; None on another device. is_new: if it
        was never seen, an operation has just allocated it."""
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if tensor.device.type != self._device or is_traceable_wrapper_subclass(tensor):
            return None
        return self._note_storage(tensor.untyped_storage(), is_new)

    def _note_storage(self, storage: torch.UntypedStorage, is_new: bool) -> _Storage:
        key, size = storage._cdata, storage.nbytes()
        found = self._storages.get(key)
        if found is None:
            found = _Storage(self._part_now() if is_new else "other", weakref.ref(storage, lambda _: self._free(key)))
            self._storages[key] = found
        self._resize(found, size)
        return found

    def _free(self, key: int) -> None:
        if (storage := self._storages.pop(key, None)) is not None:
            self._resize(storage, 0)

    def _resize(self, storage: _Storage, size: int) -> None:
        if size != storage.size:
            self._changes.append((storage, size - storage.size))
            storage.size = size

    @contextmanager
    def _resizing(self) -> Iterator[None]:
        """See storages that get another size without an operation, as those that `fully_shard` gathers
        weights into: torch has no hook for it."""
        resize = torch.UntypedStorage.resize_

        def resize_and_note(storage: torch.UntypedStorage, size: int) -> Any:
            if storage.device.type == self._device:
                self._note_storage(storage, self._compiled)  # as it was
            result = resize(storage, size)
            if storage.device.type == self._device:
                self._note_storage(storage, True)
            return result

        torch.UntypedStorage.resize_ = resize_and_note  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    # -- the account -----------------------------------------------------------------------------------------

    def timeline(self) -> MemoryTimeline:
        """What was alive at the peak, and on the way there and back."""
        total = peak = at = 0
        for moment, (_, change) in enumerate(self._changes, 1):
            total += change
            if total > peak:
                peak, at = total, moment
        first, last = self._kept, len(self._changes)
        chosen = {at, last, *(first + (last - first) * n // _POINTS for n in range(_POINTS))}
        now, shown = dict.fromkeys(PARTS, 0), dict[int, dict[str, int]]()
        for moment, (storage, change) in enumerate(self._changes, 1):
            now[storage.part] += change
            if moment in chosen:
                shown[moment] = dict(now)
        points = {part: [values[part] for values in shown.values()] for part in PARTS}
        return MemoryTimeline(shown[at], peak, last - first, [moment - first for moment in shown], points)
