"""Records a step of a model with few blocks on fake CUDA, layer by layer: operations and memory.

Blocks of a kind are alike, so that a few of them tell what a step of all costs.
"""

import contextlib
import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from megatron.data import trains_preferences
from megatron.model.pipeline_partition import partition_layers
from megatron.model.specs import LayerSpec
from megatron.mpu import configured_groups
from megatron.mpu.cross_entropy import SLICE
from megatron.mpu.deferred import DeferredGradients
from megatron.mpu.head import chunks
from megatron.mpu.pending_sends import PendingSends
from megatron.neox_arguments import NeoXArgs
from megatron.planning.dry_run import example_batch, has_chunks
from megatron.planning.fake_cuda.devices import (
    DEVICE,
    fake_cuda,
    local_bytes,
    process_group,
    resizes_seen,
    shared_out_evenly,
)
from megatron.planning.fake_cuda.observer import COLLECTIVES, Observer, collective_size, members, name_of
from megatron.planning.fake_cuda.streams import Streams
from megatron.planning.kinds import block_kinds
from megatron.planning.operations import DATA_AXES, Operation, Segment, Trace, merged
from megatron.training.native.engine import NativeEngine
from megatron.training.native.pipeline import Pipeline
from megatron.training.native.pipeline_schedule import Action
from megatron.training.native.shards import GradientPass, Shard
from megatron.training.native.update import Update
from megatron.training.setup import build_engine

_LONGEST_PERIOD = 16
_AXES = ("tensor", "context", "context_heads", "context_keys", "expert", *DATA_AXES, "pipe")
# The place of the first factor among the arguments; the second follows.
_PRODUCTS = {
    "aten.mm": 0, "aten.addmm": 1, "aten.addmm_": 1, "aten.bmm": 0, "aten.baddbmm": 1, "aten.baddbmm_": 1,
    "aten._scaled_mm": 0, "aten._grouped_mm": 0, "aten._scaled_grouped_mm": 0, "megatron.grouped_mm": 0,
}  # fmt: skip
_WITHOUT_WORK = ("aten.empty", "aten.new_empty", "aten._unsafe_view", "prim.", "profiler.", "aten.detach", "c10d.")


def trace_step(args: NeoXArgs, rank: int) -> Trace:
    """Returns the trace of a step of a rank. Needs a process whose torch has fake CUDA.

    args: with few micro-batches (`ranks.traced_args`).
    """
    assert args.world_size is not None
    kinds = block_kinds(args)
    streams = _UnseenStreams()
    recorder = Recorder(streams)
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(fake_cuda(streams=streams))
        enter(resizes_seen(recorder))
        enter(process_group(rank, args.world_size))
        groups = configured_groups(args, DEVICE)
        recorder.groups, recorder.world_size = groups.members, args.world_size
        for module in ("megatron.model.stage", "megatron.training.native.pipeline"):
            enter(mock.patch(f"{module}.partition_layers", partial(_few_blocks, kinds)))
        for module in ("megatron.model.init", "megatron.training.native.shards"):  # weights have no values
            enter(mock.patch(f"{module}.initial_part", lambda *_: iter(())))
        enter(mock.patch("megatron.mpu.cross_entropy._in_slices", partial(_in_equal_slices, recorder)))
        if not trains_preferences(args):  # their head joins the log-probabilities of all chunks
            enter(mock.patch("megatron.mpu.head.chunks", partial(_few_chunks, recorder)))
        enter(mock.patch.object(PendingSends, "add", lambda *args: None))  # sent at once, as in a dry run
        enter(FakeTensorMode())
        enter(shared_out_evenly(args))
        batches = [example_batch(args, groups)] * args.gradient_accumulation_steps
        enter(recorder)
        engine = build_engine(args, groups, engine=NativeEngine)
        assert isinstance(engine, NativeEngine)
        short_batches = [example_batch(_with_short_rows(args), groups)]
        engine.train_step(batches if has_chunks(args) else short_batches, 1e-4)
        recorder.findings.clear()
        recorder.begin_step(0)
        kept_bytes = recorder.live
        for patch in _marks(engine, recorder):
            enter(patch)
        recorder.begin_segment(engine.stage.specs[0].index, "forward")
        engine.train_step(batches, 1e-4)
        recorder.end_segment()
        layers = tuple(tuple(spec.index for spec in chunk) for chunk in engine.stage.chunks)
        return Trace(
            layers, kinds, tuple(recorder.segments), _layer_bytes(engine), kept_bytes,
            tuple(recorder.findings),
        )  # fmt: skip


def _with_short_rows(args: NeoXArgs) -> NeoXArgs:
    """Returns the configuration of the first step, which only makes gradients and optimizer states."""
    is_plain = args.moe_num_experts <= 1 and args.context_parallel_size == 1 and args.seq_length > 256
    return args.replace(seq_length=256) if is_plain else args


def _few_blocks(kinds: Mapping[int, int], args: NeoXArgs, stages: int) -> list[tuple[LayerSpec, ...]]:
    """Splits the layers over stages as `partition_layers` does, and leaves out blocks like others.

    A block that stands for others has two blocks before it and one after it, if there are enough: weights of
    the next one are gathered while it runs, and gradients of the last two summed.
    """
    return [
        tuple(spec for spec in stage if spec.kind != "block" or spec.index in _chosen(kinds, stage))
        for stage in partition_layers(args, stages)
    ]


def _chosen(kinds: Mapping[int, int], stage: Sequence[LayerSpec]) -> set[int]:
    blocks = [spec.index for spec in stage if spec.kind == "block"]
    stage_kinds = [kinds[block] for block in blocks]
    for period in range(1, min(_LONGEST_PERIOD, len(blocks)) + 1):
        if all(a == b for a, b in zip(stage_kinds, stage_kinds[period:], strict=False)):
            return {*blocks[: period + 2], *blocks[-1:]}
    places = [[i for i, stage_kind in enumerate(stage_kinds) if stage_kind == kind][:4] for kind in set(stage_kinds)]
    return {blocks[place] for kind_places in places for place in kind_places} | {*blocks[:2], *blocks[-1:]}


class _UnseenStreams(Streams):
    """Streams whose waits nobody checks."""

    def work(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Note nothing."""


class Recorder(Observer):
    """Records operations by layer and pass, besides what `Observer` does."""

    def __init__(self, streams: Streams) -> None:
        super().__init__(streams)
        self.segments: list[Segment] = []
        self.action: Action | None = None
        self._place: tuple[int, str, int] | None = None
        self._begin_bytes = 0
        self._operations: list[Operation] = []
        self._chain, self._times = _Chain(), 1
        self.groups: Mapping[str, tuple[int, ...]] = {}
        self.world_size = 1

    def _note(self, func: Any, args: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        if self._place is None or not isinstance(func, torch._ops.OpOverload):
            return
        inputs, outputs = _on_device(inputs), _on_device(outputs)
        if func is torch.ops.aten.embedding.default:
            inputs = [*inputs[1:], *outputs]  # of the table only those rows are read
        operation = operation_of(func, args, inputs, outputs)
        if operation is None:
            return
        if operation.ranks:
            operation = operation._replace(axis=self.axis_of(operation))
        if operation.kind == "memory":
            self._chain.add(inputs, outputs, self._times)
        else:
            self._end_chain()
        self._operations.append(operation._replace(times=self._times))

    def axis_of(self, operation: Operation) -> str:
        """Returns the axis along which a collective goes.

        Axes with the same ranks share a group. Then the calling code tells them apart.
        """
        axes = [axis for axis, ranks in self.groups.items() if ranks == operation.ranks and axis in _AXES]
        if len(axes) < 2:
            return axes[0] if axes else "all ranks" if len(operation.ranks) == self.world_size else "pipe"
        caller = _calling_code()
        order = {"data": DATA_AXES, "expert": ("expert",), "context": ("context_heads", "context_keys", "context")}
        return next(axis for axis in (*order[caller], *_AXES) if axis in axes)

    @contextlib.contextmanager
    def repeated(self, times: int) -> Iterator[None]:
        """Count each operation in this context so many times."""
        outer = self._times
        self._times = outer * times
        try:
            yield
        finally:
            self._times = outer

    def _end_chain(self) -> None:
        if (size := self._chain.end()) > 0:
            self._operations.append(Operation("fused", "", 0.0, size))

    def begin_segment(self, layer: int, phase: str) -> None:
        """Begin the segment of a layer's pass; it ends where another one begins."""
        place = layer, phase, 0 if self.action is None else self.action.micro_batch
        if place == self._place:
            return
        self.end_segment()
        self._place = place
        self._begin_bytes, self.peak = self.live, self.live

    @property
    def kind(self) -> str:
        """The kind of the action that runs."""
        return "update" if self.action is None else self.action.kind

    @property
    def layer(self) -> int:
        """The layer whose segment is open."""
        assert self._place is not None
        return self._place[0]

    def end_segment(self) -> None:
        self._end_chain()
        if self._place is not None:
            operations = merged(self._operations)
            self.segments.append(Segment(*self._place, operations, self._begin_bytes, self.live, self.peak))
        self._place, self._operations = None, []


def _marks(engine: NativeEngine, recorder: Recorder) -> Iterator[Any]:
    """Makes layers begin segments of the recorder. The last norm, the head and the loss are one.

    Yields patches, by which passes of the pipeline and the update do so too.
    """
    stage = engine.stage
    for spec in stage.specs:
        if spec.kind not in ("head", "score"):
            module = stage.layers[str(spec.index)]
            module.register_forward_pre_hook(partial(_mark_forward, recorder, spec.index), prepend=True)
            if spec.kind != "norm":
                module.register_forward_hook(partial(_mark_backward, recorder, spec.index))

    def last_of(action: Action) -> int:
        chunk = [spec for spec in stage.chunks[engine.chunk_of(action.stage)] if spec.kind not in ("head", "score")]
        return chunk[-1].index

    def marked(name: str, layer_of: Callable[[Action], int]) -> Any:
        run = getattr(Pipeline, name)

        def run_marked(pipeline: Pipeline, action: Action, *arguments: Any) -> Any:
            recorder.action = action
            recorder.begin_segment(layer_of(action), action.kind)
            return run(pipeline, action, *arguments)

        return mock.patch.object(Pipeline, name, run_marked)

    yield marked("_forward", lambda action: stage.chunks[engine.chunk_of(action.stage)][0].index)
    yield marked("_backward", last_of)
    yield marked("_backward_weight", last_of)
    yield mock.patch.object(DeferredGradients, "add", _marked_deferral(recorder))
    end_gradients = engine.shards.end_gradients

    def marked_end(gradient_pass: GradientPass) -> None:
        if gradient_pass.is_deferred:
            assert recorder.action is not None
            recorder.begin_segment(last_of(recorder.action), "sum")
        end_gradients(gradient_pass)

    yield mock.patch.object(engine.shards, "end_gradients", marked_end)
    judge = Update.judge

    def marked_judge(update: Update, *gradients: Any) -> Tensor:
        recorder.action = None
        recorder.begin_segment(stage.specs[-1].index, "update")
        return judge(update, *gradients)

    yield mock.patch.object(Update, "judge", marked_judge)


def _marked_deferral(recorder: Recorder) -> Callable[[DeferredGradients, Tensor, Callable[[], Tensor]], None]:
    """Returns `DeferredGradients.add`, by which a gradient is of the layer that leaves it for later."""
    add = DeferredGradients.add

    def add_marked(deferred: DeferredGradients, weight: Tensor, gradient: Callable[[], Tensor]) -> None:
        layer = recorder.layer

        def marked_gradient() -> Tensor:
            recorder.begin_segment(layer, recorder.kind)
            return gradient()

        add(deferred, weight, marked_gradient)

    return add_marked


def _mark_forward(recorder: Recorder, index: int, *_: Any) -> None:
    if recorder.action is not None and recorder.action.kind == "forward":  # not in recomputation
        recorder.begin_segment(index, "forward")


def _mark_backward(recorder: Recorder, index: int, module: nn.Module, inputs: Any, output: Any) -> None:
    hidden = output[0] if isinstance(output, tuple) else output
    if hidden.requires_grad and recorder.action is not None and recorder.action.kind == "forward":
        hidden.register_hook(lambda gradient: recorder.begin_segment(index, recorder.kind))


def _few_chunks(recorder: Recorder, rows: int, row_bytes: int) -> Iterator[slice]:
    """As `head.chunks`, but of the chunks between the first and the last, one runs for all."""
    slices = list(chunks(rows, row_bytes))
    yield slices[0]
    if len(slices) > 2:
        with recorder.repeated(len(slices) - 2):
            yield slices[1]
    yield from slices[1:][-1:]


def _in_equal_slices(recorder: Recorder, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """As `cross_entropy._in_slices`, but one slice runs for all that are equal."""

    def sliced(logits: Tensor, *inputs: Any) -> Tensor:
        rows, size = logits.shape
        step = max(1, SLICE // max(1, size))
        parts = []
        for start, length, times in ((0, step, rows // step), (rows - rows % step, rows % step, 1)):
            if times and length:
                slices = [x[..., start : start + length] if isinstance(x, Tensor) else x for x in inputs]
                with recorder.repeated(times):
                    parts += [function(logits[start : start + length], *slices)] * times
        return torch.cat(parts, -1)

    return sliced


class _Chain:
    """Operations between two products, as one kernel would run them: what it reads and what outlives it."""

    def __init__(self) -> None:
        self._read: dict[_Part, int] = {}  # bytes of what was there before
        self._written: dict[_Part, int] = {}
        self._new_storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}  # storages, with their bytes

    def add(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], times: int) -> None:
        """times: so many such operations on other parts of the storages."""
        storages = {tensor.untyped_storage()._cdata for tensor in inputs}
        for tensor in inputs:
            if (part := _part(tensor)).storage not in self._new_storages and part not in self._written:
                self._read[part] = times * _bytes(tensor)
        for tensor in outputs:
            part, storage = _part(tensor), tensor.untyped_storage()
            if part.storage in storages and part.storage not in self._new_storages:
                self._written[part] = times * _bytes(tensor)
            else:
                self._new_storages[part.storage] = weakref.ref(storage), storage.nbytes()

    def end(self) -> int:
        """Returns the bytes that the kernel reads and writes, and begins anew."""
        living = sum(size for storage, size in self._new_storages.values() if storage() is not None)
        size = sum(self._read.values()) + sum(self._written.values()) + living
        for sizes in (self._read, self._written, self._new_storages):
            sizes.clear()
        return size


class _Part(NamedTuple):
    storage: int
    offset: int
    elements: int


def _calling_code() -> str:
    """Returns "data" if `fully_shard` or the engine starts a collective, "expert" if experts do, else
    "context"."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if "/distributed/fsdp/" in file or "/megatron/training/" in file:
            return "data"
        if "/megatron/" in file and "/megatron/planning/" not in file:
            return "expert" if "/moe/" in file else "context"
        frame = frame.f_back  # type: ignore[assignment]
    return "data"


def _part(tensor: Tensor) -> _Part:
    return _Part(tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tensor.numel())


def _on_device(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.device.type == "cuda"]


def operation_of(func: Any, args: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Operation | None:
    """Returns the operation on the device that a call is; None for a view, or no work."""
    name = name_of(func)
    if name in COLLECTIVES:
        ranks = members(args)
        size, dtype = collective_size(name, [*inputs, *outputs], ranks)
        return Operation(COLLECTIVES[name], name, 0.0, size, dtype=dtype, ranks=ranks)
    if func.is_view or name.startswith(_WITHOUT_WORK) or not (inputs or outputs):
        return None
    moved_bytes = sum(_bytes(tensor) for tensor in (*inputs, *outputs))
    if "attention" in name or "attn" in name:
        kind = "attention_backward" if "backward" in name else "attention"
        return Operation(kind, name, _attention_flops(inputs, kind), moved_bytes, dtype=_dtype(inputs[0]))
    if name in _PRODUCTS:
        a, b = args[_PRODUCTS[name] :][:2]
        kind = "grouped" if "grouped" in name else "product"
        shape: tuple[int, ...] = (math.prod(a.shape[:-1]), b.shape[-1], a.shape[-1])
        if 0 in shape:
            return None
        flops = 2.0 * math.prod(shape)
        if kind == "grouped":
            rows, columns, length = shape
            groups = inputs[-1].numel()  # the ends of the groups
            # Gradients of weights sum over a group's rows: as many results as groups.
            results = (rows, columns, length) if b.dim() == 3 else (rows * groups, columns, length // groups)
            shape = (*results, groups)
        return Operation(kind, name, flops, moved_bytes, shape, _dtype(a))
    return Operation("memory", name, 0.0, moved_bytes)


def _attention_flops(inputs: Sequence[Tensor], kind: str) -> float:
    """Returns the FLOPs of the full square: two products forward, five backward."""
    tensors = [tensor for tensor in inputs if tensor.dim() >= 3]
    if kind == "attention":
        q, k = tensors[:2]
    else:
        q, k = tensors[1:3]
    if q.dim() == 3:  # [tokens, heads, width], documents one after another
        scores = q.shape[0] * k.shape[0] * q.shape[1]
    else:
        batch, heads, seq = q.shape[0], q.shape[1], q.shape[2]
        keys = k.shape[2]
        scores = batch * heads * seq * keys
    return (4.0 if kind == "attention" else 10.0) * scores * q.shape[-1]


def _bytes(tensor: Tensor) -> int:
    """Returns the bytes of a tensor; of an expanded one, those that it has."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# -- memory between steps ------------------------------------------------------------------------------------


def _layer_bytes(engine: NativeEngine) -> dict[int, dict[str, int]]:
    """Returns bytes between steps of each layer, by part. Gradients are divided by numbers of elements, among
    parameters that are not sharded, if there are any: only their gradients have memory between steps."""
    gradients = sum(map(local_bytes, engine.tensors()["gradients"]))
    full = [shard for shard in engine.shards.trained if not isinstance(shard.param, DTensor)]
    owners = full or engine.shards.trained
    elements = sum(shard.local.numel() for shard in owners)
    result: dict[int, Counter[str]] = {}
    for shard in (*engine.shards.trained, *engine.shards.frozen):
        sizes = result.setdefault(shard.layer, Counter())
        sizes.update(_shard_bytes(engine, shard))
        if shard in owners:
            sizes["gradients"] += round(gradients * shard.local.numel() / elements)
    return {layer: dict(sizes) for layer, sizes in result.items()}


def _shard_bytes(engine: NativeEngine, shard: Shard) -> dict[str, int]:
    return {part: sum(map(local_bytes, tensors)) for part, tensors in engine.tensors_of(shard).items()}
