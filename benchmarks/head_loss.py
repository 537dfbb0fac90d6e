"""Output layer and loss alone, forward and backward: kernels, bytes of traffic, peak of memory and products,
of all logits at once and in chunks.

Every operation is seen at dispatch and counted as a kernel that meets its operands in memory once: of a
fake GPU with --fake (no numbers), of a CPU with --device cpu; what torch.compile makes of it is not seen.
On a GPU also times, beside the three products alone, which are the floor: in eager and compiled form.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.mpu import HeadInput

Pass = Callable[[], Any]
# Tokens, hidden size, vocabulary.
SHAPES = {"1.4B": (16384, 2048, 50304), "rehearsal": (64, 32, 512)}


class Row(NamedTuple):
    """The costs of one way to compute the head and its loss, forward and backward.

    kernels: number of operations. moved: bytes read and written. peak: most bytes allocated besides the
    inputs. products: FLOPs of matrix products, divided by the floor's. milliseconds, over_floor: time, and
    time divided by the floor's; None without a GPU."""

    name: str
    kernels: int
    moved: int
    peak: int
    products: float
    milliseconds: float | None = None
    over_floor: float | None = None


def inputs(options: argparse.Namespace, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns random hidden states, head weight and labels, and token weights of one."""
    import torch

    tensor_options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
    hidden = torch.randn(options.tokens, 1, options.hidden, **tensor_options)
    weight = torch.randn(options.vocab, options.hidden, **tensor_options)
    labels = torch.randint(0, options.vocab, (options.tokens, 1), device=device)
    return hidden, weight, labels, torch.ones_like(labels)


def passes(options: argparse.Namespace, device: str) -> tuple[dict[str, Pass], list[Tensor]]:
    """Returns a function for each way, by name, which runs forward and backward; and their common inputs."""
    import torch.nn.functional as F

    from megatron.mpu import (
        HeadInput,
        LossOfTokens,
        OutputLayer,
        PlainProduct,
        compiled_kernels,
        plain_kernels,
        token_logprobs,
        token_loss_sum,
    )
    from megatron.objectives.language_modelling import nll

    hidden, weight, labels, weights = inputs(options, device)

    def at_once() -> Tensor:
        logits = F.linear(hidden, weight).float()
        return F.cross_entropy(logits.view(-1, options.vocab), labels.view(-1), reduction="sum")

    def head(kernels: Any) -> HeadInput:
        return HeadInput(hidden, lambda x, use: use(x, OutputLayer(weight, PlainProduct(), kernels)))

    def backward(value: Tensor) -> None:
        hidden.grad = weight.grad = None
        (value / options.tokens).backward()

    def run_loss(chunks: HeadInput) -> None:
        backward(token_loss_sum(chunks, labels, weights, LossOfTokens(nll), None)[0])

    def run_logprobs(chunks: HeadInput) -> None:
        backward(-token_logprobs(chunks, labels, None).sum())

    pass_by_name: dict[str, Pass] = {"all logits at once": lambda: backward(at_once())}
    forms = {"": plain_kernels()} | (
        {", compiled": compiled_kernels()} if device == "cuda" and not options.fake else {}
    )
    for form, kernels in forms.items():
        chunks = head(kernels)
        pass_by_name[f"loss in chunks{form}"] = partial(run_loss, chunks)
        pass_by_name[f"log-probabilities in chunks{form}"] = partial(run_logprobs, chunks)
    return pass_by_name, [hidden, weight, labels, weights]


def count_pass(name: str, run: Pass, options: argparse.Namespace, input_tensors: list[Tensor]) -> Row:
    """Runs a way once, and counts its operations, bytes and FLOPs as torch dispatches them."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from benchmarks.step_bytes import moved_bytes
    from tests.live_bytes import LiveBytes

    kernels, moved, flops = Counter[str](), Counter[str](), Counter[str]()

    class OperationCounter(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            label, kwargs = str(func), kwargs or {}
            # On a fake GPU it returns another tensor than `out`.
            output = kwargs["out"] if label == "aten.addmm.dtype_out" else func(*args, **kwargs)
            if label.startswith(("aten.gather.", "aten.scatter_.")):  # which meet a few elements of their operand
                size = 2 * args[2].nbytes
            else:
                size = moved_bytes(func._schema, args, kwargs, output)
            if size and not label.startswith("prim."):
                kernels[label] += 1
                moved[label] += size
            if label.startswith(("aten.mm.", "aten.addmm.")):
                left, right = args[1:3] if "addmm" in label else args[:2]
                flops[label] += 2 * left.numel() * right.shape[1]
            return output

    with LiveBytes() as live:
        for tensor in input_tensors:
            tensor.detach()  # seen, and not to be counted
        base_bytes = live.now
        with OperationCounter():
            run()
    floor = 3 * 2 * options.tokens * options.vocab * options.hidden
    return Row(name, kernels.total(), moved.total(), live.peak - base_bytes, flops.total() / floor)


def timed(run: Pass, rounds: int) -> tuple[float, int]:
    """Returns the milliseconds of the fastest round, and the peak bytes allocated besides the inputs."""
    import torch

    run()
    torch.cuda.synchronize()
    base_bytes = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return min(times), torch.cuda.max_memory_allocated() - base_bytes


def floor_of(options: argparse.Namespace) -> Pass:
    """Returns a function that runs only the three matrix products of the head, forward and backward."""
    hidden, weight, _, _ = inputs(options, "cuda")
    x, w = hidden.detach()[:, 0], weight.detach()

    def run() -> None:
        logits = x @ w.t()
        logits @ w
        logits.t() @ x

    return run


def rows(options: argparse.Namespace) -> list[Row]:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    if options.fake:
        from megatron.planning.fake_cuda.devices import fake_cuda

        with fake_cuda(), FakeTensorMode():
            ways, input_tensors = passes(options, "cuda")
            return [count_pass(name, run, options, input_tensors) for name, run in ways.items()]
    if options.device == "cpu":
        ways, input_tensors = passes(options, "cpu")
        return [count_pass(name, run, options, input_tensors) for name, run in ways.items()]
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU; add --device cpu or --fake")
    measured_rows, (floor, _) = [], timed(floor_of(options), options.rounds)
    ways, input_tensors = passes(options, "cuda")
    for name, run in ways.items():
        milliseconds, peak = timed(run, options.rounds)
        row = count_pass(name, run, options, input_tensors)
        measured_rows.append(row._replace(peak=peak, milliseconds=milliseconds, over_floor=milliseconds / floor))
    return measured_rows


def table(rows: list[Row]) -> str:
    """Returns the rows as a Markdown table."""
    lines = ["| | kernels | traffic, GB | peak, GB | products / floor | ms | ms / floor |", "|---|" + "---:|" * 6]
    for row in rows:
        times = ["-" if value is None else f"{value:.2f}" for value in (row.milliseconds, row.over_floor)]
        sizes = f"{row.kernels} | {row.moved / 1e9:.1f} | {row.peak / 1e9:.2f} | {row.products:.2f}"
        lines.append(f"| {row.name} | {sizes} | {times[0]} | {times[1]} |")
    return "\n".join(lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="1.4B", help="tokens, hidden size and vocabulary (1.4B)")
    parser.add_argument("--tokens", type=int, help="instead of the shape's")
    parser.add_argument("--hidden", type=int, help="instead of the shape's")
    parser.add_argument("--vocab", type=int, help="instead of the shape's")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: count what would run, without times (cuda)"
    )
    parser.add_argument("--rounds", type=int, default=10, help="on a GPU, of which the fastest counts (10)")
    parser.add_argument("--fake", action="store_true", help="count on a fake GPU, for which a C++ compiler is needed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    options = parser.parse_args(argv)
    for name, size in zip(("tokens", "hidden", "vocab"), SHAPES[options.shape], strict=True):
        if getattr(options, name) is None:
            setattr(options, name, size)
    return options


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    if options.fake:
        from megatron.planning.fake_cuda.shim import build, lacking, preload

        if (reason := lacking()) is not None:
            raise SystemExit(f"--fake: {reason}")
        preload(build())
    measured_rows = rows(options)
    print(table(measured_rows))
    if options.json:
        sizes = {name: getattr(options, name) for name in ("tokens", "hidden", "vocab")}
        options.json.write_text(json.dumps({**sizes, "rows": [row._asdict() for row in measured_rows]}, indent=1))


if __name__ == "__main__":
    run_command(main)
