"""A training step as it is profiled on a device, or counted on a GPU that is not there; see anatomy.py."""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import train_throughput
from benchmarks.step_bytes import moved_bytes
from benchmarks.step_work import (
    ATTENTION,
    Model,
    Operation,
    Rates,
    WorkRow,
    flops_of,
    gaps,
    kind_of,
    name_of,
    step_window,
    totals_by_kind,
    work_rows,
)

BOUND = 0.02  # by which the kinds may miss the step
_STEPS, _WARM = 4, 4


class SumError(Exception):
    """The times of all work in a trace do not add up to the measured time of a step."""


class Profile(NamedTuple):
    """A trace of consecutive steps.

    window: begin of the first step and end of the last, in seconds of the trace's clock. seconds: of one
    step, by an independent clock. unprofiled_seconds: of one step just before, without the profiler.
    """

    events: Sequence[Mapping[str, Any]]
    window: tuple[float, float]
    steps: int
    seconds: float
    unprofiled_seconds: float


def profiled(step: Callable[[], Any], device: torch.device, steps: int = _STEPS, trace: Path | None = None) -> Profile:
    """Profiles `steps` steps after warm-up. trace: file for the trace; by default it is deleted."""
    from torch.profiler import ProfilerActivity, profile, record_function

    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]

    def run(count: int) -> float:
        """Runs a step that is not timed, then `count` steps. Returns the mean seconds of these steps."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_gpu else []
        start = 0.0
        for number in range(count + 1):
            if number == 1:
                start = time.perf_counter()
                if on_gpu:
                    marks[0].record()
            with record_function(f"step {number}"):
                step()
        if not on_gpu:
            return (time.perf_counter() - start) / count
        marks[1].record()
        marks[1].synchronize()
        return marks[0].elapsed_time(marks[1]) / 1e3 / count

    for _ in range(_WARM):
        step()
    with profile(activities=activities):  # the profiler's own beginnings
        step()
    train_throughput.wait(device)
    unprofiled_seconds = run(steps)
    with profile(activities=activities, record_shapes=True) as recorded:
        seconds = run(steps)
    with tempfile.TemporaryDirectory() as folder:
        path = trace or Path(folder, "trace.json")
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return Profile(events, step_window(events, "step 1", f"step {steps}"), steps, seconds, unprofiled_seconds)


def attention_flops(args: Any) -> float:
    """Returns the FLOPs of attention's products in a step, without positions that the causal mask hides.

    The forward pass has two products; the backward pass has five, because it recomputes one of them."""
    heads = args.num_attention_heads * args.head_dim
    pairs = args.train_batch_size * args.seq_length * (args.seq_length + 1) / 2
    return args.num_layers * pairs * 4 * heads * (1 + 2.5)


def model_of(args: Any) -> Model:
    from megatron.model import layer_params

    count = sum(math.prod(spec.shape) for specs in layer_params(args).values() for spec in specs)
    return Model(count, args.padded_vocab_size, attention_flops(args))


class Dispatched(TorchDispatchMode):
    """A context that sums calls, FLOPs and bytes of dispatched operations, by kind and name."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self._model = model
        self._totals: dict[tuple[str, str], list[float]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        size = 0 if func.namespace == "prim" else moved_bytes(func._schema, args, kwargs, output)
        if size:
            node = torch._C._current_autograd_node()
            shapes = tuple(tuple(argument.shape) if isinstance(argument, torch.Tensor) else () for argument in args)
            operation = Operation(func._schema.name, () if node is None else (node.name(),), shapes)
            kind = kind_of(operation, "", self._model)
            row = self._totals.setdefault((kind, name_of(operation, kind)), [0.0, 0.0, 0.0])
            for number, value in enumerate((1.0, flops_of(operation), float(size))):
                row[number] += value
        return output

    def rows(self, rates: Rates) -> list[WorkRow]:
        """Returns a row for each kind and name, the longest first. Its time is the floor at these rates."""
        attention = sum(row[2] for (kind, _), row in self._totals.items() if kind == ATTENTION)
        work_rows_at_floor = []
        for (kind, name), (calls, flops, size) in self._totals.items():
            if kind == ATTENTION:
                flops = self._model.attention_flops * size / attention
            floor = max(flops / rates.products, size / rates.copies)
            work_rows_at_floor.append(WorkRow(kind, name, calls, floor, flops, size, floor))
        return sorted(work_rows_at_floor, key=lambda row: -row.seconds)


def _rows(work: Sequence[WorkRow]) -> dict[str, Any]:
    """Returns parts of the report: a row per kind, the largest gaps in words, and all rows of work."""
    rows = [
        {"kind": row.kind, "seconds": row.seconds, "floor_ms": (row.floor or 0.0) * 1e3,
         "above_floor_ms": row.above_floor * 1e3}
        for row in totals_by_kind(work)
    ]  # fmt: skip
    return {"rows": rows, "gaps": gaps(work), "work": [asdict(row) for row in work]}


def measured(options: argparse.Namespace, step_argv: list[str]) -> dict[str, Any]:
    """Profiles a step and returns the report that `--json` writes.

    Raises SumError if the work in the trace does not add up to the time of a step.
    """
    from benchmarks.gpu_run.facts import copy_rate

    chosen = train_throughput.parse([*step_argv, "--only", options.only])
    os.environ.setdefault("DS_ACCELERATOR", chosen.device)
    device = torch.device("cuda", 0) if chosen.device == "cuda" else torch.device("cpu")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[chosen.precision]
    steps, args, attention = train_throughput.contestants(chosen, device)
    ((name, step),) = steps.items()
    model = model_of(args)
    trace = profiled(step, device, trace=options.trace)
    # Measured as warm as the steps were
    rates = Rates(
        train_throughput.matmul_ceiling(device, dtype), copy_rate(device, 4 * 2**30 if device.type == "cuda" else 2**24)
    )
    rows = work_rows(trace.events, trace.window, trace.steps, model, rates)
    total_s = sum(row.seconds for row in rows)
    if abs(total_s - trace.seconds) > BOUND * trace.seconds:
        raise SumError(f"the traced work takes {total_s * 1e3:.1f} ms, but a step took {trace.seconds * 1e3:.1f} ms")
    torch.distributed.destroy_process_group()
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {
        "name": name, "device": kind, "attention": attention, "compile": bool(args.compile), "style": chosen.style,
        "shape": chosen.shape, "precision": chosen.precision, "step_seconds": trace.seconds,
        "plain_seconds": trace.unprofiled_seconds, "sum_seconds": total_s, "product_rate": rates.products,
        "copy_rate": rates.copies, **_rows(rows),
    }  # fmt: skip


def count_fake_step(options: argparse.Namespace, step_argv: list[str]) -> dict[str, Any]:
    """Returns the report of a step on a fake GPU, where each operation takes the time of its floor."""
    import megatron.mpu
    from megatron.planning.fake_cuda.devices import DEVICE, fake_cuda, process_group
    from megatron.training.native.engine import NativeEngine
    from megatron.training.setup import build_engine
    from tests.fake.layouts import Case
    from tests.fake.runs import FakeTensorMode, make_batch

    chosen = train_throughput.parse([*step_argv, "--only", options.only, "--device", "cpu", "--precision", "bf16"])
    chosen.device, case = "cuda", Case()
    rates = Rates(options.rates[0] * 1e12, options.rates[1] * 1e12)
    with fake_cuda(case.capability), process_group(case.rank, case.world):
        args = train_throughput.settings(chosen, 0, "native").replace(compile=False)
        groups, dispatched = (
            megatron.mpu.build_groups(pipe=1, data=1, tensor=1, device=DEVICE),
            Dispatched(model_of(args)),
        )
        with FakeTensorMode():
            engine = build_engine(args, groups, engine=NativeEngine)
            batch = make_batch(args, groups, case, None)
            engine.train_step([batch], args.lr)  # makes the optimizer's state
            with dispatched:
                engine.train_step([batch], args.lr)
    rows = dispatched.rows(rates)
    total_s = sum(row.seconds for row in rows)
    return {
        "name": "native", "device": "a GPU that is not there", "attention": args.attention_backend, "compile": False,
        "style": chosen.style, "shape": chosen.shape, "precision": "bf16", "step_seconds": total_s,
        "plain_seconds": total_s, "sum_seconds": total_s, "product_rate": rates.products, "copy_rate": rates.copies,
        **_rows(rows),
    }  # fmt: skip
