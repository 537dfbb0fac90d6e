"""CUDA graphs on a CPU.

A graph is the operations that ran while it was captured, and a launch runs them again on the tensors of then.
As on a GPU, what the host computed stays as it was, what the host would read is an error, and a capture
changes nothing. Copies from the host cannot be told from others.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_REFUSED = {"_local_scalar_dense", "nonzero", "equal"}  # the host would wait for these


class _Recorder(TorchDispatchMode):
    """Runs operations, and keeps each with its arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []
        self.storages: set[int] = set()  # storages
        self.originals: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in _REFUSED:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        if func._schema.is_mutable:
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, Tensor) and _storage(tensor) not in self.storages:
                    self.originals.append((tensor, tensor.clone()))
        input_storages = {_storage(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        out = func(*args, **kwargs)
        self.storages |= {
            _storage(tensor) for tensor in tree_leaves(out) if isinstance(tensor, Tensor)
        } - input_storages
        self.calls.append((func, args, kwargs, out))
        return out

    def undo(self) -> None:
        for tensor, value in reversed(self.originals):
            tensor.copy_(value)

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            results = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(results), strict=True):
                if isinstance(old, Tensor) and _storage(old) != _storage(new):
                    old.copy_(new)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Graphs:
    """Stands for `captured_decode.cuda_graph`, and counts."""

    def __init__(self) -> None:
        self.captured, self.launched = 0, 0

    def __call__(self, run: Callable[[], Tensor], pool: Any) -> tuple[Callable[[], None], Tensor]:
        self.captured += 1
        recorder = _Recorder()
        with recorder:
            result = run()
        with torch.no_grad():
            recorder.undo()

        def launch() -> None:
            self.launched += 1
            with torch.no_grad():
                recorder.replay()

        return launch, result
