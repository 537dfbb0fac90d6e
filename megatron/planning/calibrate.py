"""Measures what this machine's GPU, or CPU, reaches, and writes a file for `deepy.py plan --gpu FILE`."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron.launch.gpus import Gpu, gpu_named
from megatron.planning.machines import Machine, Reached, machine_text, read_links, read_reached
from megatron.planning.operations import Operation
from megatron.planning.processes import PlanError
from megatron.process.command_parser import CommandParser

_SMALL = 2000  # tiny operations, one after another
_GPU_SECONDS, _CPU_SECONDS = 3.0, 0.3


def main(argv: Sequence[str]) -> int:
    """Measures, and writes the file. Returns the exit code."""
    parser = CommandParser(
        prog="deepy.py plan calibrate", description="Measure in about two minutes what a GPU, or this machine's CPU, "
        "reaches: products, attention, copies, starts of kernels. deepy.py plan --gpu FILE computes times by them.",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="file to write, such as mine.toml")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPU, if there is one")
    options = parser.parse_args(argv)
    try:
        if options.out.suffix != ".toml":
            raise PlanError(f"--out {options.out}: its name must end with .toml")
        _check_writable(options.out)
        gpu, reached = measured(options.device)
        options.out.write_text(machine_text(gpu, reached), encoding="utf-8")
    except PlanError as problem:
        sys.stderr.write(problem.error_lines("deepy.py plan calibrate"))
        return 1
    print(machine_text(gpu, reached))
    print(f"wrote {options.out}; plan with it: deepy.py plan a.yml --gpu {options.out}")
    return 0


def _check_writable(path: Path) -> None:
    """Raises PlanError if the file cannot be written, before minutes are spent."""
    if not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK) or path.is_dir():
        raise PlanError(f"--out {path}: cannot be written; name a file in a folder that exists")


def measured(name: str | None = None) -> tuple[Gpu, Reached]:
    """Returns the sheet of a device, and the shares of it that are reached. name: cuda or cpu.

    Of a known GPU the sheet is the vendor's. Otherwise it holds what was measured.
    Raises PlanError if there is no GPU although "cuda" is asked for.
    """
    import torch

    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise PlanError("--device cuda: torch finds no GPU here")
    measuring = _Measuring(torch.device(name))
    for measure in (measuring.copies, measuring.starts, measuring.products, measuring.attention, measuring.experts):
        measure()
    return measuring.gpu, measuring.reached


class _Measuring:
    """A device, and what is known of it so far."""

    def __init__(self, device: Any) -> None:
        self.device, self.is_cuda = device, device.type == "cuda"
        self.gpu, self.reached = _sheet(device)

    def note(self, **fields: float) -> None:
        """Take fields of `Gpu` and `Reached`, and print them."""
        print(", ".join(f"{key} {value:.4g}" for key, value in fields.items()), file=sys.stderr, flush=True)
        sheet: dict[str, Any] = {key: value for key, value in fields.items() if key in Gpu._fields}
        self.gpu = self.gpu._replace(**sheet)
        self.reached = self.reached._replace(**{key: v for key, v in fields.items() if key in Reached._fields})

    def share(self, operation: Operation, seconds: float, field: str) -> float:
        """Returns the field of `Reached` by which a plan of this operation takes so many seconds."""
        link = read_links()["tcp"]
        machine = Machine(self.gpu, self.reached._replace(**{field: 1.0, "launch": 0.0}), link, link, 1)
        return machine.seconds(operation) / max(seconds - self.reached.launch, 1e-9)

    def copies(self) -> None:
        """Measure the memory's bandwidth."""
        import torch

        source = torch.empty(2**28 if self.is_cuda else 2**25, device=self.device)
        target = torch.empty_like(source)
        bandwidth = 8 * source.numel() / _seconds(lambda: target.copy_(source), self.device) / 1e9
        if self.gpu.bandwidth:
            self.note(copy=bandwidth / self.gpu.bandwidth)
        else:
            self.note(bandwidth=bandwidth, copy=1.0)

    def products(self) -> None:
        """Measure large products of each dtype."""
        import torch

        size = 8192 if self.is_cuda else 512
        product = Operation("product", "", 2.0 * size**3, 0.0, (size, size, size), "bfloat16")
        seconds = {}
        for dtype in (torch.float32, torch.bfloat16):
            x, y = (torch.randn(size, size, device=self.device).to(dtype) for _ in range(2))
            seconds[dtype] = _seconds(partial(torch.mm, x, y), self.device)
        if self.gpu.bf16 == 0.0:
            self.note(bf16=product.flops / seconds[torch.bfloat16] / 1e12)
        self.note(product=self.share(product, seconds[torch.bfloat16], "product"))
        # A share of what the file says is reached, as of bf16.
        self.note(fp32=product.flops / seconds[torch.float32] / 1e12 / self.reached.product)
        if self.is_cuda and torch.cuda.get_device_capability(self.device) >= (8, 9):
            x, y = (torch.randn(size, size, device=self.device).to(torch.float8_e4m3fn) for _ in range(2))
            scale = torch.ones((), device=self.device)
            run = partial(torch._scaled_mm, x, y.t(), scale, scale, out_dtype=torch.bfloat16)
            fp8_seconds = _seconds(run, self.device)
            if self.gpu.fp8 == 0.0:
                self.note(fp8=product.flops / fp8_seconds / 1e12)
            work = product._replace(dtype="float8_e4m3fn")
            self.note(fp8_product=self.share(work, fp8_seconds, "fp8_product"))

    def attention(self) -> None:
        """Measure causal attention, forward and backward."""
        import torch

        heads, rows = (32, 8192) if self.is_cuda else (4, 512)
        size = 1, heads, rows, 128
        q, k, v = (torch.randn(size, device=self.device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        attend = partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, is_causal=True)
        gradient = torch.randn_like(q)
        forward = _seconds(attend, self.device)
        backward = _seconds(lambda: attend().backward(gradient), self.device) - forward
        square = 4.0 * heads * rows * rows * 128
        self.note(attention=self.share(Operation("attention", "", square, 0.0), forward, "attention"))
        work = Operation("attention_backward", "", 2.5 * square, 0.0)
        self.note(attention_backward=self.share(work, max(backward, forward), "attention_backward"))

    def experts(self) -> None:
        """Measure products of eight experts."""
        import torch

        from megatron.mpu.grouped import grouped_mm

        rows, width, groups = (16384, 4096, 8) if self.is_cuda else (1024, 256, 8)
        x = torch.randn(rows, width, device=self.device, dtype=torch.bfloat16)
        weights = torch.randn(groups, width, width, device=self.device, dtype=torch.bfloat16)
        ends = torch.arange(1, groups + 1, device=self.device, dtype=torch.int32) * (rows // groups)
        shape = rows, width, width, groups
        work = Operation("grouped", "", 2.0 * rows * width * width, 0.0, shape, "bfloat16")
        seconds = _seconds(lambda: grouped_mm(x, weights, ends), self.device)
        self.note(grouped=self.share(work, seconds, "grouped"))

    def starts(self) -> None:
        """Measure the seconds in which a kernel starts on the device, and in which the host starts it."""
        import torch

        x = torch.zeros(1, device=self.device)

        def add_often() -> None:
            for _ in range(_SMALL):
                x.add_(1.0)

        if not self.is_cuda:
            self.note(launch=_seconds(add_often, self.device) / _SMALL, host=0.0)
            return
        add_often()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        add_often()
        host = (time.perf_counter() - begin) / _SMALL
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            add_often()
        self.note(launch=_seconds(graph.replay, self.device) / _SMALL, host=host)


def _sheet(device: Any) -> tuple[Gpu, Reached]:
    """Returns what is known without measuring. One device cannot measure collectives."""
    import torch

    if device.type == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        gpu = Gpu(memory, 0.0, 0.0, 0.0, 0.0, 1, "cpu", "tcp", "tcp", "deepy.py plan calibrate, on a CPU")
        return gpu, read_reached("hopper")._replace(overlap=1.0, tensor=1.0)
    properties = torch.cuda.get_device_properties(device)
    sheet = gpu_named(properties.name)
    if sheet is not None:
        return sheet, read_reached(sheet.generation)
    generation = {8: "ampere", 9: "hopper"}.get(properties.major, "blackwell")
    generation = "ada" if (properties.major, properties.minor) == (8, 9) else generation
    link = "pcie5" if properties.major >= 9 else "pcie4"
    sheet = Gpu(
        properties.total_memory / 2**30, 0.0, 0.0, 0.0, 0.0, properties.multi_processor_count, generation, link, "tcp",
        f"deepy.py plan calibrate, on {properties.name}",
    )  # fmt: skip
    return sheet, read_reached(generation)


def _seconds(function: Callable[[], Any], device: Any) -> float:
    """Returns the mean seconds of a call, over seconds of calls: GPUs are slower when they are warm."""
    import torch

    function()
    count, limit = 1, _GPU_SECONDS if device.type == "cuda" else _CPU_SECONDS
    while True:
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        if seconds > limit:
            return seconds / count
        count = max(2 * count, int(count * limit / max(seconds, 1e-9)))
