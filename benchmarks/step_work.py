"""What a training step spends its time on: the operations of a profiler's trace by kind, beside their floors.

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
_BESIDE_FUSED_UPDATE = {**_BYTES_OF_LISTS, "_foreach_norm": 2}


@dataclass(frozen=True)
class Operation:
    """What launched a piece of work.

    within: names of what it was called in, the outermost first. shapes, dtypes: of its arguments, () and ""
    where one is no tensor.
    """

    name: str
    within: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.within, self.name)


@dataclass(frozen=True)
class Model:
    """What a trace does not say of the model: parameters, size of the vocabulary, FLOPs of attention over
    whole rows in a step (forward and backward)."""

    parameters: int
    vocabulary: int
    attention_flops: float


@dataclass(frozen=True)
class Rates:
    """What the device reaches: FLOP/s of products, bytes/s that copies read and write."""

    products: float
    copies: float


@dataclass(frozen=True)
class WorkRow:
    """Work of one kind and name in one step. calls: of its operation. floor: the seconds it would take at the
    device's rates, None where its FLOPs and bytes are not known."""

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
    """The kind of a piece of work. Updates and copies come first, as their tensors have the shapes of all."""
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
    """The name of a row: a product's sizes, else the operation, without what a compiler numbers."""
    if operation.name in _FACTORS and kind in (PRODUCTS, HEAD):
        left, right = factors(operation)
        return " x ".join(map(str, (*left, right[-1]))) + (_IN_FP8 if "scaled" in operation.name else "")
    if kind == COPIES and any("AccumulateGrad" in name for name in operation.names):
        return "gradients of micro-batches"
    return _NUMBERED.sub("", operation.name)


def factors(operation: Operation) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of a product's two matrices."""
    left, right = _FACTORS[operation.name]
    return operation.shapes[left], operation.shapes[right]


def flops_of(operation: Operation) -> float:
    """Of a product; 0 of all else."""
    if operation.name not in _FACTORS:
        return 0.0
    left, right = factors(operation)
    return 2.0 * math.prod(left) * right[-1]


def bytes_of(operation: Operation) -> float:
    """That it reads and writes, each operand once. An operation that makes a tensor is taken to make one as
    large as its largest operand; of a product the result is known."""
    if _VIEW.search(operation.name):
        return 0.0
    sizes = [math.prod(s) * _SIZES.get(d, 0) for s, d in zip(operation.shapes, operation.dtypes, strict=False) if s]
    if not sizes:
        return 0.0
    if operation.name in _FACTORS:
        left, right = factors(operation)
        of_result = max(_SIZES.get(operation.dtypes[_FACTORS[operation.name][0]], 0), 2)  # of 8 bits it has 16
        return sum(sizes[:3]) + math.prod(left[:-1]) * right[-1] * of_result
    return float(sum(sizes) + (0 if _NO_OUTPUT.search(operation.name) else max(sizes)))


# -- reading a trace -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """A piece of work: what launched it, the kernel's name ("" on a CPU), seconds from `begin` to `end`."""

    operation: Operation
    kernel: str
    begin: float
    end: float


def pieces(events: Sequence[Mapping[str, Any]]) -> list[Piece]:
    """The work of a trace: of the device where there is one, else of the CPU."""
    calls, alone = _operations(events)
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not kernels:
        return alone
    unknown = Operation("")
    made = [(calls.get(e["args"].get("External id"), unknown), e["name"], e["ts"], e["dur"]) for e in kernels]
    return [Piece(operation, name, ts * 1e-6, (ts + dur) * 1e-6) for operation, name, ts, dur in made]


def _operations(events: Sequence[Mapping[str, Any]]) -> tuple[dict[Any, Operation], list[Piece]]:
    """The operations of the host by their number; and each by itself, in pieces without those it calls."""
    threads: dict[Any, list[Mapping[str, Any]]] = {}
    for event in events:
        if event.get("cat") in ("cpu_op", "user_annotation") and event.get("ph") == "X":
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
    calls: dict[Any, Operation] = {}
    alone: list[Piece] = []
    for thread in threads.values():
        stack = _CallStack(alone)
        for event in sorted(thread, key=lambda event: (event["ts"], -event["dur"])):
            stack.advance(event["ts"])
            about = event.get("args", {})
            shapes = tuple(map(_shape, about.get("Input Dims", ())))
            operation = Operation(event["name"], stack.names, shapes, tuple(about.get("Input type", ())))
            calls[about.get("External id")] = operation
            stack.enter(operation, event["ts"] + event["dur"], event["cat"] == "cpu_op")
        stack.advance(math.inf)
    return calls, alone


class _CallStack:
    """What runs on a thread of the host, in microseconds; the time of each operation of torch's, without
    those it calls, goes to `pieces`."""

    def __init__(self, pieces: list[Piece]) -> None:
        self._pieces, self._now = pieces, 0.0
        self._calls: list[tuple[Operation, float, bool]] = []  # operation, end, whether it is one of torch's

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(operation.name for operation, _, _ in self._calls)

    def enter(self, operation: Operation, end: float, counts: bool) -> None:
        self._calls.append((operation, end, counts))

    def advance(self, until: float) -> None:
        """Give the time until then to what runs, the innermost first."""
        while self._calls:
            operation, end, counts = self._calls[-1]
            upto = min(end, until)
            if counts and upto > self._now:
                self._pieces.append(Piece(operation, "", self._now * 1e-6, upto * 1e-6))
            self._now = max(self._now, upto)
            if end > until:
                return
            self._calls.pop()
        self._now = until


def _shape(dims: Sequence[Any]) -> tuple[int, ...]:
    return tuple(dims) if all(isinstance(size, int) for size in dims) else ()  # else a list of tensors


def shares(found: Sequence[Piece], begin: float, end: float) -> tuple[list[float], float]:
    """Seconds of each piece between two times, and those in which none ran. An instant in which several run
    is shared out among them, so that all add up to the time between."""
    seconds, idle, now = [0.0] * len(found), 0.0, begin
    running: list[tuple[float, int]] = []  # (end, number), the first to end on top
    starts = sorted((piece.begin, number) for number, piece in enumerate(found))

    def run(until: float) -> None:
        nonlocal now, idle
        while now < until:
            while running and running[0][0] <= now:
                heapq.heappop(running)
            if not running:
                idle, now = idle + until - now, until
                return
            step = min(until, running[0][0])
            for _, number in running:
                seconds[number] += (step - now) / len(running)
            now = step

    for start, number in starts:
        run(min(max(start, begin), end))
        if found[number].end > now:
            heapq.heappush(running, (found[number].end, number))
    run(end)
    return seconds, idle


def step_window(events: Iterable[Mapping[str, Any]], first: str, last: str) -> tuple[float, float]:
    """Seconds at which the annotated steps begin and end, on the device where it has them."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for event in events:
        if event.get("cat") in ("user_annotation", "gpu_user_annotation") and event["name"] in (first, last):
            times = event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6
            found.setdefault(event["cat"], {})[event["name"]] = times
    steps = found.get("gpu_user_annotation") or found["user_annotation"]
    return steps[first][0], steps[last][1]


def work_rows(
    events: Sequence[Mapping[str, Any]], window: tuple[float, float], steps: int, model: Model, rates: Rates
) -> list[WorkRow]:
    """A row for each kind and name of work between two times, of one step of several; the longest first."""
    found = [piece for piece in pieces(events) if piece.end > window[0] and piece.begin < window[1]]
    seconds, idle = shares(found, *window)
    totals: dict[tuple[str, str], list[float]] = {}
    numbers: dict[tuple[str, str], set[int]] = {}
    counted: set[int] = set()
    for piece, own in zip(found, seconds, strict=True):
        kind = kind_of(piece.operation, piece.kernel, model)
        key = kind, name_of(piece.operation, kind) or piece.kernel
        row = totals.setdefault(key, [0.0, 0.0, 0.0])
        row[0] += own
        # What one call asks for, however many pieces it is done in
        numbers.setdefault(key, set()).add(id(piece.operation))
        if id(piece.operation) not in counted:
            counted.add(id(piece.operation))
            row[1] += flops_of(piece.operation)
            row[2] += bytes_of(piece.operation)
    attention = sum(row[0] for (kind, _), row in totals.items() if kind == ATTENTION)
    of_lists = _BESIDE_FUSED_UPDATE if (OPTIMIZER, _FUSED_UPDATE) in totals else _BYTES_OF_LISTS
    made = []
    for (kind, name), (taken, flops, size) in totals.items():
        if kind == ATTENTION:  # a trace does not say which places a mask leaves out
            flops = steps * model.attention_flops * taken / attention
        size = steps * model.parameters * of_lists.get(name, 0) or size
        faster = 2 if name.endswith(_IN_FP8) else 1  # than in 16 bits, on Hopper and later
        floor = max(flops / rates.products / faster, size / rates.copies) / steps if flops or size else None
        calls = len(numbers[kind, name]) / steps
        made.append(WorkRow(kind, name, calls, taken / steps, flops / steps, size / steps, floor))
    made.append(WorkRow(IDLE, "nothing runs", 0, idle / steps, 0.0, 0.0, 0.0))
    return sorted(made, key=lambda row: -row.seconds)


def by_kind(rows: Sequence[WorkRow]) -> list[WorkRow]:
    """The sums of each kind that there is, in the order of `KINDS`. A row without a floor counts as being at
    its own."""
    sums = []
    for kind in KINDS:
        own = [row for row in rows if row.kind == kind]
        if own:
            floor = sum(row.seconds if row.floor is None else row.floor for row in own)
            calls, seconds, flops, size = (
                sum(each) for each in zip(*(row[2:6] for row in map(astuple, own)), strict=True)
            )
            sums.append(WorkRow(kind, kind, calls, seconds, flops, size, floor))
    return sums


def gaps(rows: Sequence[WorkRow], count: int = 3) -> str:
    """The rows that are farthest above their floors, in words."""
    most = sorted((row for row in rows if row.floor is not None), key=lambda row: -row.above_floor)[:count]
    words = [f"{row.kind}, {row.name}: {row.above_floor * 1e3:.1f} ms above its floor" for row in most]
    return "largest gaps: " + "; ".join(words)
