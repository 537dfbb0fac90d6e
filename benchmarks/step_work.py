"""Reads from a profiler's trace how a training step spends its time, by kind of operation, with floors.

A trace is that of `torch.profiler` in Chrome's format, with shapes. On a GPU a piece of work is a kernel or
a copy, told by the operation that launched it; on a CPU it is an operation without those it calls.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

PRODUCTS, ATTENTION, POINTWISE, HEAD, OPTIMIZER, NORM, COPIES, COLLECTIVES, IDLE = KINDS = (
    "products", "attention", "norm and elementwise", "head and loss", "optimizer", "gradient norm", "copies",
    "collectives", "idle",
)  # fmt: skip
_SIZES = {
    "float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "long": 8, "int": 4, "short": 2,
    "signed char": 1, "unsigned char": 1, "bool": 1, "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1,
}  # fmt: skip
# Products by where their two matrices stand among the arguments.
_FACTORS = {
    "aten::mm": (0, 1), "aten::bmm": (0, 1), "aten::addmm": (1, 2), "aten::baddbmm": (1, 2), "aten::_scaled_mm": (0, 1),
    "aten::_grouped_mm": (0, 1), "aten::_scaled_grouped_mm": (0, 1),
}  # fmt: skip
_ATTENTION = re.compile(r"scaled_dot_product|flash_attention|_attention_(forward|backward)|flex_attention|varlen_attn")
_COLLECTIVE = re.compile(r"^(nccl|c10d|gloo)[:D_]|^record_param_comms")
_OPTIMIZER = re.compile(r"^Optimizer\.step|::_fused_(adam|sgd)|::_foreach_(addcmul|addcdiv|lerp)")
_NORMS = re.compile(r"::_foreach_norm|linalg_vector_norm")
_COPY = re.compile(r"AccumulateGrad|::(_foreach_)?copy_$|::(_to_copy|clone|zero_|fill_|_foreach_zero_)$")
_NUMBERED = re.compile(r"^aten::|^triton_[a-z]+_fused_+|_[0-9]+$")
_VIEW = re.compile(
    r"::(_unsafe_view|view|view_as|as_strided|slice|transpose|t|permute|expand|expand_as|unsqueeze|squeeze|detach|empty|"
    r"empty_like|empty_strided|select|narrow|split|unbind|alias|reshape|flatten|result_type|resize_|lift_fresh|chunk)$|^detach"
)
_NO_OUTPUT = re.compile(r"_$|^triton_|::(copy_|sum|mean|amax|any|all|dot|embedding|index_select)")
# Bytes a parameter and step of operations over lists of tensors, whose shapes a trace lacks: gradients, which
# clipping divides in place, and state in fp32; weights in 16 bits. `fused_update` reads gradients in 16 bits.
_FUSED_UPDATE, _IN_FP8 = "megatron::adamw", ", FP8"
_BYTES_OF_LISTS = {"_fused_adamw_": 32, "_fused_adam_": 32, "_foreach_norm": 4, "_foreach_copy_": 6, _FUSED_UPDATE: 28}
_BYTES_WITH_FUSED_UPDATE = {**_BYTES_OF_LISTS, "_foreach_norm": 2}


@dataclass(frozen=True)
class Operation:
    """A torch operation, which may launch kernels.

    callers: names of the operations that called it, the outermost first. shapes, dtypes: one entry for each
    argument; () and "" for an argument that is not a tensor.
    """

    name: str
    callers: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.callers, self.name)


@dataclass(frozen=True)
class Model:
    """Facts of the model that a trace does not contain.

    attention_flops: FLOPs of attention in a step, forward and backward, over rows of a single document.
    """

    parameters: int
    vocabulary: int
    attention_flops: float


@dataclass(frozen=True)
class Rates:
    """The device's measured rates: FLOP/s of matrix products, and bytes/s that copies read and write."""

    products: float
    copies: float


@dataclass(frozen=True)
class WorkRow:
    """All work of one kind and name in one step.

    calls: number of calls of its operation. floor: least seconds, at the device's rates; None if neither
    FLOPs nor bytes are known.
    """

    kind: str
    name: str
    calls: float
    seconds: float
    flops: float
    bytes: float
    floor: float | None

    @property
    def above_floor(self) -> float:
        return self.seconds - (self.floor or 0.0)


def kind_of(operation: Operation, kernel: str, model: Model) -> str:
    """Returns the kind of a piece of work, one of KINDS. kernel: its name, "" on a CPU.

    Updates and copies are tested first, because their tensors can have the shape of any weight."""
    names = (kernel, *operation.names)
    if any(_COLLECTIVE.search(name) for name in names):
        return COLLECTIVES
    if any(_OPTIMIZER.search(name) for name in names):
        return OPTIMIZER
    if any(_NORMS.search(name) for name in names):
        return NORM
    if any("AccumulateGrad" in name for name in names) or (not operation.name and kernel.startswith("Mem")):
        return COPIES
    if any(model.vocabulary in shape for shape in operation.shapes) and "embedding" not in operation.name:
        return HEAD
    if any(_ATTENTION.search(name) for name in names):
        return ATTENTION
    if operation.name in _FACTORS:
        return PRODUCTS
    return COPIES if _COPY.search(operation.name) else POINTWISE


def name_of(operation: Operation, kind: str) -> str:
    """Returns the name of a row: the sizes of a matrix product, else the operation without its number."""
    if operation.name in _FACTORS and kind in (PRODUCTS, HEAD):
        left, right = factors(operation)
        return " x ".join(map(str, (*left, right[-1]))) + (_IN_FP8 if "scaled" in operation.name else "")
    if kind == COPIES and any("AccumulateGrad" in name for name in operation.names):
        return "gradients of micro-batches"
    return _NUMBERED.sub("", operation.name)


def factors(operation: Operation) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shapes of the two factors of a matrix product."""
    left, right = _FACTORS[operation.name]
    return operation.shapes[left], operation.shapes[right]


def flops_of(operation: Operation) -> float:
    """Returns the FLOPs of a matrix product; 0 for any other operation."""
    if operation.name not in _FACTORS:
        return 0.0
    left, right = factors(operation)
    return 2.0 * math.prod(left) * right[-1]


def bytes_of(operation: Operation) -> float:
    """Returns the bytes that an operation reads and writes, each operand once.

    A new tensor is assumed to be as large as the largest operand; the result of a product is computed.
    """
    if _VIEW.search(operation.name):
        return 0.0
    sizes = [math.prod(s) * _SIZES.get(d, 0) for s, d in zip(operation.shapes, operation.dtypes, strict=False) if s]
    if not sizes:
        return 0.0
    if operation.name in _FACTORS:
        left, right = factors(operation)
        result_bytes = max(_SIZES.get(operation.dtypes[_FACTORS[operation.name][0]], 0), 2)  # of 8 bits it has 16
        return sum(sizes[:3]) + math.prod(left[:-1]) * right[-1] * result_bytes
    return float(sum(sizes) + (0 if _NO_OUTPUT.search(operation.name) else max(sizes)))


# -- reading a trace -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """A stretch of work in a trace.

    operation: the operation that launched it. kernel: its name; "" on a CPU. begin, end: in seconds."""

    operation: Operation
    kernel: str
    begin: float
    end: float


def pieces(events: Sequence[Mapping[str, Any]]) -> list[Piece]:
    """Returns the pieces of work in a trace: kernels of the GPU; without kernels, CPU operations."""
    calls, cpu_pieces = _operations(events)
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not kernels:
        return cpu_pieces
    unknown = Operation("")
    launches = [(calls.get(e["args"].get("External id"), unknown), e["name"], e["ts"], e["dur"]) for e in kernels]
    return [Piece(operation, name, ts * 1e-6, (ts + dur) * 1e-6) for operation, name, ts, dur in launches]


def _operations(events: Sequence[Mapping[str, Any]]) -> tuple[dict[Any, Operation], list[Piece]]:
    """Returns CPU operations by their External id, and the time of each without the operations it calls."""
    threads: dict[Any, list[Mapping[str, Any]]] = {}
    for event in events:
        if event.get("cat") in ("cpu_op", "user_annotation") and event.get("ph") == "X":
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
    calls: dict[Any, Operation] = {}
    cpu_pieces: list[Piece] = []
    for thread in threads.values():
        stack = _CallStack(cpu_pieces)
        for event in sorted(thread, key=lambda event: (event["ts"], -event["dur"])):
            stack.advance(event["ts"])
            arguments = event.get("args", {})
            shapes = tuple(map(_shape, arguments.get("Input Dims", ())))
            operation = Operation(event["name"], stack.names, shapes, tuple(arguments.get("Input type", ())))
            calls[arguments.get("External id")] = operation
            stack.enter(operation, event["ts"] + event["dur"], event["cat"] == "cpu_op")
        stack.advance(math.inf)
    return calls, cpu_pieces


class _CallStack:
    """Tracks the operations that run on a host thread, in microseconds.

    It adds the time of each torch operation, without the operations it calls, to `pieces`.
    """

    def __init__(self, pieces: list[Piece]) -> None:
        self._pieces, self._now = pieces, 0.0
        self._calls: list[tuple[Operation, float, bool]] = []  # operation, end, whether it is one of torch's

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(operation.name for operation, _, _ in self._calls)

    def enter(self, operation: Operation, end: float, counts: bool) -> None:
        self._calls.append((operation, end, counts))

    def advance(self, time: float) -> None:
        """Attributes the time up to `time` to the running operations, the innermost first."""
        while self._calls:
            operation, end, counts = self._calls[-1]
            upto = min(end, time)
            if counts and upto > self._now:
                self._pieces.append(Piece(operation, "", self._now * 1e-6, upto * 1e-6))
            self._now = max(self._now, upto)
            if end > time:
                return
            self._calls.pop()
        self._now = time


def _shape(dims: Sequence[Any]) -> tuple[int, ...]:
    return tuple(dims) if all(isinstance(size, int) for size in dims) else ()  # else a list of tensors


def shares(work: Sequence[Piece], begin: float, end: float) -> tuple[list[float], float]:
    """Returns the seconds of each piece between two times, and the idle seconds.

    Time in which several pieces run is divided equally among them, so all add up to `end - begin`."""
    seconds, idle, now = [0.0] * len(work), 0.0, begin
    running: list[tuple[float, int]] = []  # (end, number), the first to end on top
    starts = sorted((piece.begin, number) for number, piece in enumerate(work))

    def run(time: float) -> None:
        nonlocal now, idle
        while now < time:
            while running and running[0][0] <= now:
                heapq.heappop(running)
            if not running:
                idle, now = idle + time - now, time
                return
            step = min(time, running[0][0])
            for _, number in running:
                seconds[number] += (step - now) / len(running)
            now = step

    for start, number in starts:
        run(min(max(start, begin), end))
        if work[number].end > now:
            heapq.heappush(running, (work[number].end, number))
    run(end)
    return seconds, idle


def step_window(events: Iterable[Mapping[str, Any]], first_step: str, last_step: str) -> tuple[float, float]:
    """Returns when the first step began and the last ended, in seconds, by their annotations.

    GPU annotations are used if the trace has any."""
    windows: dict[str, dict[str, tuple[float, float]]] = {}
    for event in events:
        if event.get("cat") in ("user_annotation", "gpu_user_annotation") and event["name"] in (first_step, last_step):
            times = event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6
            windows.setdefault(event["cat"], {})[event["name"]] = times
    steps = windows.get("gpu_user_annotation") or windows["user_annotation"]
    return steps[first_step][0], steps[last_step][1]


def work_rows(
    events: Sequence[Mapping[str, Any]], window: tuple[float, float], steps: int, model: Model, rates: Rates
) -> list[WorkRow]:
    """Returns a row for each kind and name of work in a trace, the longest first.

    window: begin and end in seconds. steps: number of steps in it; rows hold the mean of one step."""
    work = [piece for piece in pieces(events) if piece.end > window[0] and piece.begin < window[1]]
    seconds, idle = shares(work, *window)
    totals: dict[tuple[str, str], list[float]] = {}
    numbers: dict[tuple[str, str], set[int]] = {}
    counted_calls: set[int] = set()
    for piece, piece_s in zip(work, seconds, strict=True):
        kind = kind_of(piece.operation, piece.kernel, model)
        key = kind, name_of(piece.operation, kind) or piece.kernel
        row = totals.setdefault(key, [0.0, 0.0, 0.0])
        row[0] += piece_s
        # What one call asks for, however many pieces it is done in
        numbers.setdefault(key, set()).add(id(piece.operation))
        if id(piece.operation) not in counted_calls:
            counted_calls.add(id(piece.operation))
            row[1] += flops_of(piece.operation)
            row[2] += bytes_of(piece.operation)
    attention = sum(row[0] for (kind, _), row in totals.items() if kind == ATTENTION)
    list_bytes = _BYTES_WITH_FUSED_UPDATE if (OPTIMIZER, _FUSED_UPDATE) in totals else _BYTES_OF_LISTS
    rows = []
    for (kind, name), (kind_s, flops, size) in totals.items():
        if kind == ATTENTION:  # a trace does not say which places a mask leaves out
            flops = steps * model.attention_flops * kind_s / attention
        size = steps * model.parameters * list_bytes.get(name, 0) or size
        faster = 2 if name.endswith(_IN_FP8) else 1  # than in 16 bits, on Hopper and later
        floor = max(flops / rates.products / faster, size / rates.copies) / steps if flops or size else None
        calls = len(numbers[kind, name]) / steps
        rows.append(WorkRow(kind, name, calls, kind_s / steps, flops / steps, size / steps, floor))
    rows.append(WorkRow(IDLE, "nothing runs", 0, idle / steps, 0.0, 0.0, 0.0))
    return sorted(rows, key=lambda row: -row.seconds)


def totals_by_kind(rows: Sequence[WorkRow]) -> list[WorkRow]:
    """Returns the sum of the rows of each kind, in the order of `KINDS`.

    A row without a floor adds its own time to the floor of its kind."""
    sums = []
    for kind in KINDS:
        rows_of_kind = [row for row in rows if row.kind == kind]
        if rows_of_kind:
            floor = sum(row.seconds if row.floor is None else row.floor for row in rows_of_kind)
            calls, seconds, flops, size = (
                sum(column) for column in zip(*(row[2:6] for row in map(astuple, rows_of_kind)), strict=True)
            )
            sums.append(WorkRow(kind, kind, calls, seconds, flops, size, floor))
    return sums


def gaps(rows: Sequence[WorkRow], count: int = 3) -> str:
    """Describes in words the `count` rows that exceed their floors most."""
    farthest = sorted((row for row in rows if row.floor is not None), key=lambda row: -row.above_floor)[:count]
    words = [f"{row.kind}, {row.name}: {row.above_floor * 1e3:.1f} ms above its floor" for row in farthest]
    return "largest gaps: " + "; ".join(words)
