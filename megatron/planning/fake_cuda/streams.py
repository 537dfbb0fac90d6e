"""Streams and events of fake CUDA: which work on memory has waited for which, as vector clocks tell it."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

Clock = dict[int, int]
"""Tracks how much of each stream's work is known to be done."""


class Streams:
    """All streams of a case, and who touched which storage last. current: where work goes now."""

    def __init__(self) -> None:
        self._num_streams = 0
        self.current = self.default = FakeStream(self)
        self._written = WeakIdKeyDictionary()  # of a storage (stream, its work's number)
        self._read = WeakIdKeyDictionary()  # Clock of those who read it since

    def number(self) -> int:
        self._num_streams += 1
        return self._num_streams

    @contextlib.contextmanager
    def on(self, stream: "FakeStream | None") -> Iterator[None]:
        """`torch.cuda.stream`."""
        previous, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = previous

    def work(self, func: Any, args: Any, kwargs: Any, output: Any) -> str | None:
        """Note an operation; what it has not waited for, in words."""
        stream, changed = self.current, []
        if isinstance(func, torch._ops.OpOverload):  # others, of functions, change nothing
            schema = func._schema
            if any(returned.alias_info is not None and not returned.alias_info.is_write for returned in schema.returns):
                return None  # a view
            bound = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
            names = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
            if schema.name.startswith("c10d::"):  # says of itself that it changes nothing
                names = [schema.arguments[0].name]
            changed = [bound.get(name) for name in names]
        written, read = _storages([changed, output]), _storages([args, kwargs])
        number = stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
        problem = None
        for storage in [*read, *written]:
            if not stream.has_waited_for(*self._written.get(storage, (stream.number, 0))):
                problem = "reads, or writes, what another stream writes, without a wait for it"
        for storage in written:
            if not all(stream.has_waited_for(*writer) for writer in self._read.get(storage, {}).items()):
                problem = "writes what another stream still reads, without a wait for it"
            self._written[storage], self._read[storage] = (stream.number, number), {}
        for storage in read:
            self._read.setdefault(storage, {})[stream.number] = number
        return problem


def _storages(values: Any) -> list[torch.UntypedStorage]:
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.device.type == "cuda"]
    return [tensor.untyped_storage() for tensor in tensors if tensor.numel()]


class FakeStream:
    """A stream, or an event: what it has_waited_for to be done."""

    def __init__(self, streams: Streams) -> None:
        self._streams, self.number, self.clock = streams, streams.number(), Clock()

    def has_waited_for(self, stream: int, number: int) -> bool:
        """Whether this much of a stream's work is done before what comes now."""
        return self.clock.get(stream, 0) >= number

    def record(self, stream: "FakeStream | None" = None) -> "FakeStream":
        self.clock = dict((stream or self._streams.current).clock)
        return self

    def record_event(self, event: "FakeStream | None" = None) -> "FakeStream":
        return (event or FakeStream(self._streams)).record(self)

    def wait_event(self, event: "FakeStream") -> None:
        for stream, number in event.clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), number)

    wait_stream = wait_event

    def wait(self, stream: "FakeStream | None" = None) -> None:
        (stream or self._streams.current).wait_event(self)

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True
