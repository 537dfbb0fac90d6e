"""Observes every operation: devices, collectives, memory, and what must not happen in a step."""

import sys
import weakref
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from megatron.planning.fake_cuda.streams import Streams
from megatron.planning.report import Collective

ROOT = Path(__file__).parents[2]
MOST_DOCUMENTS = 65_535  # the kernel's grid has a row for each
# Kernels for documents, and the place of cu_seqlens of queries among their arguments; those of keys and the
# longest document of both follow.
VARLEN = {"torch_attn._varlen_attn": 3, "aten._efficient_attention_forward": 4}
# Of a collective's name in torch, eager or compiled: the field's name, and which tensor is the larger one.
COLLECTIVES = {
    "c10d.allreduce_": "all_reduce", "c10d._allgather_base_": "all_gather",
    "c10d._reduce_scatter_base_": "reduce_scatter", "c10d.broadcast_": "broadcast", "c10d.alltoall_base_": "all_to_all",
    "c10d.send": "send", "c10d.recv_": "receive", "c10d.scatter_": "scatter", "c10d.gather_": "gather",
    "c10d.allgather_": "all_gather", "c10d.reduce_": "reduce", "c10d.barrier": "barrier",
    "_c10d_functional.all_reduce": "all_reduce", "_c10d_functional.all_gather_into_tensor": "all_gather",
    "_c10d_functional.all_gather_into_tensor_coalesced": "all_gather",
    "_c10d_functional.reduce_scatter_tensor": "reduce_scatter",
}  # fmt: skip


class Observer(TorchDispatchMode):
    """Records all operations while it is entered.

    findings: mistakes. collectives: in their order. varlen: arguments of kernels for documents. scaled: FP8
    products. live, peak: bytes of storages on the device.
    streams: records which stream waits for which.
    """

    supports_higher_order_operators = True

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self._streams = streams
        self.square: tuple[int, int] | None = None
        self.findings: list[str] = []
        self.collectives: list[Collective] = []
        self.kernels: Counter[str] = Counter()
        self.varlen: list[dict[str, Any]] = []
        self.scaled: Counter[tuple[Any, ...]] = Counter()
        self.live = self.peak = 0
        self._storages = WeakIdKeyDictionary()  # [bytes] of each

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs under this mode; torch runs it eagerly under others."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # autograd asks each tensor, often
            return func(*args)
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back with the tensors it is made of
        kwargs = kwargs or {}
        name, inputs = name_of(func), tensors_in((args, kwargs))
        self._check_inputs(name, inputs)
        output = func(*args, **kwargs)
        self.kernels[name] += 1
        if name in COLLECTIVES:
            self._note_collective(name, args, inputs, output)
        elif name.startswith("c10d."):
            self._find("a collective that is not counted", name)
        if name in VARLEN:
            self._note_varlen(name, args, VARLEN[name])
        if name == "aten._scaled_mm":
            self._note_scaled(func, args, kwargs)
        if (problem := self._streams.work(func, args, kwargs, output)) is not None:
            self._find(problem, name)
        outputs = tensors_in(output)
        self._check_outputs(name, inputs, outputs)
        for tensor in outputs:
            self._count(tensor)
        self._note(func, args, inputs, outputs)
        return output

    def _note(self, func: Any, args: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Note an operation that has run. inputs, outputs: its tensors."""

    def begin_step(self, seq: int) -> None:
        """Forget construction, which tries kernels with masks. From here on nothing is `[.., seq, seq]`."""
        self.square, self.peak = (seq, seq), self.live
        self.collectives.clear()
        self.kernels.clear()
        self.varlen.clear()
        self.scaled.clear()

    def _check_inputs(self, name: str, inputs: list[Tensor]) -> None:
        if name == "aten._local_scalar_dense" and inputs[0].device.type == "cuda":
            self._find("the host waits for a value (.item(), bool() or .tolist())", name)
        for tensor in inputs:
            if tensor.device.type == "cpu" and tensor.dim() > 0 and tensor.numel() > 0:
                self._find(f"a tensor {list(tensor.shape)} on the CPU", name)

    def _check_outputs(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        from_device = any(tensor.device.type == "cuda" for tensor in inputs)
        for tensor in outputs:
            if tensor.device.type == "cpu" and (from_device or tensor.dim() > 0 and tensor.numel() > 0):
                description = "a copy from the device to the host" if from_device else "a result on the CPU"
                self._find(f"{description}, {list(tensor.shape)}", name)
            elif tensor.device.type == "cuda" and tensor.shape[-2:] == self.square:
                self._find(f"a tensor of seq x seq, {list(tensor.shape)}", name)

    def _find(self, description: str, name: str) -> None:
        finding = f"{description}: {name} at {caller_line()}"
        if finding not in self.findings:
            self.findings.append(finding)

    def _note_varlen(self, name: str, args: Any, place: int) -> None:
        queries, starts, longest = args[0], args[place : place + 2], args[place + 2 : place + 4]
        documents = len(starts[0]) - 1
        if any(tensor.dtype != torch.int32 for tensor in starts):
            self._find(f"cu_seqlens are {starts[0].dtype}, the kernel reads int32", name)
        if documents > MOST_DOCUMENTS:
            self._find(f"{documents} documents, the kernel's grid has {MOST_DOCUMENTS} rows", name)
        tokens, heads, width = queries.shape[-3:]
        # What its backward asks for besides, which no fake tensor shows: gradients of queries in fp32, every
        # document padded to a block of 128 (mha_varlen_bwd of torch's flash attention).
        workspace = 4 * (tokens + 128 * documents) * heads * width
        self.varlen.append({"documents": documents, "longest": max(longest), "workspace": workspace})

    def _note_scaled(self, func: Any, args: Any, kwargs: Any) -> None:
        """Records a scaled product A B, and finds what Hopper's tensor cores do not take.

        The record: (rows, columns, summed length, format of A, of B, shape of the scale of A, of B, dtype of
        the result, whether sums may be fast).
        """
        bound = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        a, b = bound["self"], bound["mat2"]
        if a.stride(1) != 1 or b.stride(0) != 1:
            self._find(f"strides {a.stride()} and {b.stride()}; A is read by rows, B by columns", "_scaled_mm")
        if any(size % 16 for size in (*a.shape[1:], *b.shape)):
            self._find(f"{list(a.shape)} x {list(b.shape)}, not multiples of 16", "_scaled_mm")
        if a.dtype == b.dtype == torch.float8_e5m2:
            self._find("E5M2 x E5M2", "_scaled_mm")
        scales = (tuple(bound["scale_a"].shape), tuple(bound["scale_b"].shape))
        formats = (str(a.dtype).removeprefix("torch.float8_"), str(b.dtype).removeprefix("torch.float8_"))
        result = str(bound["out_dtype"]).removeprefix("torch.")
        fast = bool(bound.get("use_fast_accum", False))
        self.scaled[a.shape[0], b.shape[1], a.shape[1], *formats, *scales, result, fast] += 1

    def _note_collective(self, name: str, args: Any, inputs: list[Tensor], output: Any) -> None:
        kind = COLLECTIVES[name]
        outputs = tensors_in(output)
        ranks = members(args)
        size, dtype = collective_size(name, [*inputs, *outputs], ranks)
        peer = ranks[args[2]] if kind in ("send", "receive") else None
        places = {"broadcast": 2, "scatter": 3, "gather": 3}
        source = args[places[kind]] if kind in places else None
        self.collectives.append(Collective(ranks, kind, size, dtype, peer, source))

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if tensor.device.type == "cuda" and storage not in self._storages:
            size = self._storages[storage] = [0]
            weakref.finalize(storage, self._set, size, 0)
            self._set(size, storage.nbytes())

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage has got another size, as those of `fully_shard` do without an operation."""
        if storage in self._storages:
            self._set(self._storages[storage], storage.nbytes())

    def _set(self, size: list[int], now: int) -> None:
        self.live += now - size[0]
        size[0] = now
        self.peak = max(self.peak, self.live)


@cache
def name_of(func: Any) -> str:
    """Returns an operation's name without its overload, such as "aten.mm"."""
    return str(func.name().split(".")[0].replace("::", "."))


def tensors_in(values: Any) -> list[Tensor]:
    """Returns the tensors among arguments or results. `tree_leaves` knows more containers, and is slow."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    return [tensor for value in values for tensor in tensors_in(value)]


def collective_size(name: str, tensors: Sequence[Tensor], ranks: Sequence[int]) -> tuple[int, str]:
    """Returns the bytes of a collective's full tensor, and its dtype. tensors: inputs and outputs."""
    largest = max(tensors, key=lambda tensor: tensor.numel() * tensor.element_size())
    size = largest.numel() * largest.element_size()
    if name in ("c10d.scatter_", "c10d.gather_", "c10d.allgather_"):
        size *= len(ranks)  # a list of tensors, one for each rank
    return size, str(largest.dtype).removeprefix("torch.")


def members(args: Any) -> tuple[int, ...]:
    """Returns the global ranks of the process group among the arguments of a collective."""
    for leaf in tree_leaves(args):
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(leaf)))
        if isinstance(leaf, str) and leaf not in ("sum", "max"):
            group = dist.distributed_c10d._resolve_process_group(leaf)  # type: ignore[arg-type]
            return tuple(dist.get_process_group_ranks(group))
    raise AssertionError(f"no process group among {args}")


def caller_line() -> str:
    """Returns the nearest line of the package on the stack; autograd's own operations have none."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / "planning"):
            return f"{path.relative_to(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "autograd"
