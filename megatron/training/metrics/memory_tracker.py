"""Tracks the memory of a device by part (weights, gradients, ...) while training runs, storage by storage.

torch's own `MemTracker` hooks modules and optimizers. So it misses a loss that is computed inside the output
layer, and an engine's fp32 master weights and flat buffers.
"""

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
_MOMENT_PARTS = ("activations", "logits", "other")  # parts known only by the moment of the allocation
_POINTS = 200  # of a timeline

Held = Mapping[str, Iterable[Tensor]]
"""Maps the name of a part, such as `weights`, to its tensors, as `Engine.tensors` does."""


class MemoryTimeline(NamedTuple):
    """Bytes by part, at the peak and over time.

    parts: bytes of each part at the peak; their sum is `peak`.
    changes: number of allocations and frees.
    moments: numbers of the changes after which `bytes_by_part` was sampled.
    bytes_by_part: bytes of each part at each of `moments`.
    """

    parts: dict[str, int]
    peak: int
    changes: int
    moments: list[int]
    bytes_by_part: dict[str, list[int]]


class _Storage:
    """The record of a storage. part: one of `PARTS`. reference: weak reference to it. size: bytes."""

    __slots__ = ("part", "reference", "size")

    def __init__(self, part: str, reference: weakref.ref[torch.UntypedStorage]) -> None:
        self.part, self.reference, self.size = part, reference, 0


class MemoryTracker(TorchDispatchMode):
    """Counts the live storages of a device by part, while it is entered as a context.

    Each storage belongs to one part. Weights, gradients, optimizer states and buffers are recognised by their
    tensors, and count as such from their allocation on. Any other storage is assigned by the moment at which
    it was allocated.

    - weights: parameters, also gathered ones and those of frozen models;
    - gradients: of parameters, and buffers that hold gradients until the update or between steps;
    - optimizer states: master weights and moments;
    - buffers: of modules; also rotary tables, masks and document boundaries, which a micro-batch's blocks
      share;
    - logits: allocated in the output layer and its loss, or in their backward pass, such as logits, their
      gradients and the gradient of the hidden states;
    - activations: allocated anywhere else before the update, such as values kept for the backward pass,
      communication buffers and the micro-batches on the device;
    - other: allocated before the step, in the update or after it, or by a library, such as gloo's buffers. A
      library's storage counts from the first operation that reads it.

    Memory that a kernel allocates and frees within one operation does not count, nor do tensors inside
    compiled code.
    """

    supports_higher_order_operators = True

    def __init__(self, device: torch.device, held: Callable[[], Held], compiled: bool) -> None:
        """Start with no storage recorded.

        held: returns the tensors that are kept between steps, by part.
        compiled: the blocks are compiled. Then they are not hooked, and a storage that compiled code has
            allocated counts from the first operation outside that reads it.
        """
        super().__init__()
        self._device, self._held, self._compiled = device.type, held, compiled
        self._storages: dict[int, _Storage] = {}
        self._num_initial_changes = 0  # changes that record the storages that exist before the step
        self._changes: list[tuple[_Storage, int]] = []
        self._in_head, self._head_start, self._head_nodes = False, 0, set[int]()  # numbers of the head's autograd nodes
        self._updating = False
        self._hooked: dict[int, Any] = {}  # hooks by the id of the parameter

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Returns True: compiled code then runs under this mode; torch would run it eagerly otherwise."""
        return True

    @contextmanager
    def watching(self, stage: Stage) -> Iterator[None]:
        """Count the memory that a step of this stage allocates within the `with` block."""
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
        self._num_initial_changes = len(self._changes)
        try:
            with self, self._resizing():
                yield
        finally:
            for part, tensors in self._held().items():
                self._label(tensors, part)
            for hook in (*hooks, *self._hooked.values()):
                hook.remove()
            self._hooked.clear()
            self._storages.clear()  # also drops the callbacks of the weak references

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # torch calls again with the DTensor's local tensors
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for tensor in inputs:
            self._see(tensor, is_new=self._compiled)
        output = func(*args, **kwargs)
        for tensor in (*inputs, *tree_leaves(output)):  # the operation may have resized inputs
            if isinstance(tensor, Tensor):
                self._see(tensor, is_new=True)
        return output

    # -- the part of a storage -------------------------------------------------------------------------------

    def _see(self, tensor: Tensor, is_new: bool) -> None:
        storage = self._note(tensor, is_new)
        if storage is None or not isinstance(tensor, nn.Parameter):
            return
        self._set_part(storage, "weights")
        if tensor.requires_grad and id(tensor) not in self._hooked and not self._compiled:
            self._hooked[id(tensor)] = tensor.register_hook(lambda grad: self._label([grad], "gradients"))

    def _label(self, tensors: Iterable[Tensor], part: str) -> None:
        for tensor in tensors:
            if (storage := self._note(tensor, False)) is not None:
                self._set_part(storage, part)

    @staticmethod
    def _set_part(storage: _Storage, part: str) -> None:
        if storage.part in _MOMENT_PARTS:
            storage.part = part

    def _part_now(self) -> str:
        node = torch._C._current_autograd_node()
        if self._in_head or (node is not None and node._sequence_nr() in self._head_nodes):
            return "logits"
        return "other" if self._updating else "activations"

    def _enter_head(self, module: nn.Module, hook_args: Any) -> None:
        self._in_head, self._head_start = True, torch.autograd._get_sequence_nr()

    def _leave_head(self, module: nn.Module, hook_args: Any, result: Any) -> None:
        self._in_head = False
        self._head_nodes.update(range(self._head_start, torch.autograd._get_sequence_nr()))

    def _note_inputs(self, module: nn.Module, hook_args: tuple[Any, ...]) -> None:
        _, inputs, *_ = hook_args
        self._label((leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)), "buffers")

    def _begin_update(self, optimizer: Optimizer, *hook_args: Any) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        param_gradients = [param.grad for param in params if param.grad is not None]
        self._label([*self._held()["gradients"], *param_gradients], "gradients")
        self._updating = True

    # -- the live storages -----------------------------------------------------------------------------------

    def _note(self, tensor: Tensor, is_new: bool) -> _Storage | None:
        """Returns the record of a tensor's storage, updated to its present size; None on another device.

        is_new: if the storage has no record yet, an operation has just allocated it.
        """
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if tensor.device.type != self._device or is_traceable_wrapper_subclass(tensor):
            return None
        return self._note_storage(tensor.untyped_storage(), is_new)

    def _note_storage(self, storage: torch.UntypedStorage, is_new: bool) -> _Storage:
        key, size = storage._cdata, storage.nbytes()
        record = self._storages.get(key)
        if record is None:
            record = _Storage(self._part_now() if is_new else "other", weakref.ref(storage, lambda _: self._free(key)))
            self._storages[key] = record
        self._resize(record, size)
        return record

    def _free(self, key: int) -> None:
        if (storage := self._storages.pop(key, None)) is not None:
            self._resize(storage, 0)

    def _resize(self, storage: _Storage, size: int) -> None:
        if size != storage.size:
            self._changes.append((storage, size - storage.size))
            storage.size = size

    @contextmanager
    def _resizing(self) -> Iterator[None]:
        """Track storages that are resized without an operation, such as those into which `fully_shard`
        gathers weights.

        It replaces `torch.UntypedStorage.resize_` meanwhile, because torch has no hook for it.
        """
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

    # -- the result ------------------------------------------------------------------------------------------

    def timeline(self) -> MemoryTimeline:
        """Returns bytes by part at the peak and over time."""
        total = peak = peak_moment = 0
        for moment, (_, change) in enumerate(self._changes, 1):
            total += change
            if total > peak:
                peak, peak_moment = total, moment
        start, last = self._num_initial_changes, len(self._changes)
        chosen = {peak_moment, last, *(start + (last - start) * n // _POINTS for n in range(_POINTS))}
        now, snapshots = dict.fromkeys(PARTS, 0), dict[int, dict[str, int]]()
        for moment, (storage, change) in enumerate(self._changes, 1):
            now[storage.part] += change
            if moment in chosen:
                snapshots[moment] = dict(now)
        points = {part: [values[part] for values in snapshots.values()] for part in PARTS}
        return MemoryTimeline(
            snapshots[peak_moment], peak, last - start, [moment - start for moment in snapshots], points
        )
