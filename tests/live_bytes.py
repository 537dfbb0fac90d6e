"""How much memory a piece of code takes, on any device: counted, not measured."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Bytes of tensors made under it that are alive (`now`), the most there were (`peak`), and the number of
    elements of the largest fp32 one. Tensors on the meta device count nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.largest = 0
        self._storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                self._note(tensor)
        return result

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._storages:
            return
        size = storage.nbytes()
        self._storages.add(storage._cdata)
        self.now += size
        self.peak = max(self.peak, self.now)
        if tensor.dtype == torch.float32:
            self.largest = max(self.largest, tensor.numel())
        weakref.finalize(storage, self._forget, storage._cdata, size)

    def _forget(self, key: int, size: int) -> None:
        self._storages.discard(key)
        self.now -= size
