"""`torch.cuda` and process groups as on one rank of a machine with GPUs, for fake tensors."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial, partialmethod
from typing import Any
from unittest import mock

import torch
import torch._dynamo.utils
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from megatron.neox_arguments import NeoXArgs
from megatron.planning.fake_cuda.observer import Observer
from megatron.planning.fake_cuda.streams import FakeStream, Streams

DEVICE = torch.device("cuda", 0)


@contextlib.contextmanager
def fake_cuda(capability: tuple[int, int] = (9, 0), streams: Streams | None = None) -> Iterator[None]:
    """torch.cuda as on a machine with GPUs, of which this process sees one, where it asks no tensor."""
    streams = streams or Streams()
    values: dict[str, Any] = {"is_available": True, "device_count": 1, "current_device": 0, "is_initialized": True}
    values |= {"get_device_capability": tuple(capability), "is_bf16_supported": True}
    values |= {"is_current_stream_capturing": False, "get_rng_state": torch.get_rng_state()}
    values |= dict.fromkeys(("_lazy_init", "synchronize", "set_device", "set_rng_state"))
    with contextlib.ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *args, _value=value, **kwargs: _value))
        make_stream = lambda *args, **kwargs: FakeStream(streams)  # noqa: E731
        stubs = {
            "Stream": make_stream,
            "Event": make_stream,
            "current_stream": lambda *args: streams.current,
            "stream": streams.on,
        }
        for name, stub in stubs.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stub))
        current_stream = torch.accelerator.current_stream

        def stream_of_caller(*args: Any) -> Any:
            """`fully_shard` waits for fake events; the compiler needs a real stream."""
            is_sharding = "/distributed/fsdp/" in sys._getframe(1).f_code.co_filename
            return streams.current if is_sharding else current_stream(*args)

        stack.enter_context(mock.patch.object(torch.accelerator, "current_stream", stream_of_caller))
        for name in ("_cuda_getDevice", "_cuda_exchangeDevice", "_cuda_maybeExchangeDevice"):
            stack.enter_context(mock.patch.object(torch._C, name, lambda *args: 0, create=True))
        # Seeds are numbers, and generators real.
        for place in ("megatron.mpu.random", "megatron.model.attention.seeded_attention", "megatron.model.moe.router"):
            stack.enter_context(mock.patch(f"{place}.fork_seed", lambda seed, device: contextlib.nullcontext()))
        compiler = partialmethod(nn.Module.compile, backend="aot_eager")
        stack.enter_context(mock.patch.object(nn.Module, "compile", compiler))
        stack.enter_context(mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")))
        # A mesh is a tensor of ranks on the host, which is made before the first step.
        stack.enter_context(mock.patch.object(DeviceMesh, "from_group", staticmethod(real(DeviceMesh.from_group))))
        stack.enter_context(mock.patch("torch.distributed.fsdp._fully_shard._fsdp_param._chunk_with_empty", _Chunks))
        # torch.tensor(.., device=) would copy before a fake tensor is made of it.
        torch._C._set_only_lift_cpu_tensors(True)
        stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        yield


class _Chunks:
    """Makes a chunk of a tensor when it is read. `fully_shard` makes one for each rank, and reads two."""

    def __init__(self, tensor: Tensor, number: int, dim: int) -> None:
        self._tensor, self._number, self._dim = tensor, number, dim

    def __getitem__(self, place: int) -> Tensor:
        size = self._tensor.shape[self._dim]
        length = -(-size // self._number)
        if place * length >= size:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, place * length, min(length, size - place * length))


def shared_out_evenly(args: NeoXArgs) -> Any:
    """A patch for what the host reads of tokens: all ranks of this tensor rank's experts get as many."""
    rows = args.train_micro_batch_size_per_gpu * args.seq_length * args.moe_top_k
    rows //= args.context_parallel_size
    rows_per_rank = rows // args.expert_parallel_size // (args.tp if args.moe_expert_tensor_parallel == "whole" else 1)
    return mock.patch(
        "megatron.model.moe.dispatch.read_sizes",
        lambda counts, peer_counts: ([rows_per_rank] * len(counts), [rows_per_rank] * len(peer_counts)),
    )


def real(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is run without fake tensors, unseen."""

    def run_real(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return run_real


@contextlib.contextmanager
def resizes_seen(observer: Observer) -> Iterator[None]:
    """`fully_shard` gives weights memory and takes it back without an operation."""

    def resize(storage: torch.UntypedStorage, size: int) -> None:
        torch._C.StorageBase.resize_(storage, size)  # type: ignore[attr-defined]
        observer.resized(storage)

    with mock.patch.object(torch.UntypedStorage, "resize_", resize):
        yield


@contextlib.contextmanager
def process_group(rank: int, world: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def local_bytes(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()
