"""A mixture of experts, forwards and backwards, beside transformers' and beside its floor.

One block's experts with their router, in one process, in turns: ours; transformers' Mixtral block with each
of its implementations (`eager`, `grouped_mm`); and the floor, the matrix products that the tokens' experts
need and nothing else, as dense products of the same number of rows. All have the same weights, and outputs
are compared first. On a CPU in fp32, on a GPU in bf16.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

from megatron.model.build_specs import moe_spec
from megatron.model.moe import MoE
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.process import run_command
from megatron.process.command_parser import CommandParser


class Shape(NamedTuple):
    """The sizes of one block of experts. width: intermediate size of each expert."""

    hidden: int
    experts: int
    top_k: int
    width: int
    tokens: int


SHAPES = {
    "mixtral": Shape(512, 8, 2, 1792, 2048),
    "fine": Shape(512, 64, 8, 192, 2048),
    "30b": Shape(2048, 128, 8, 768, 8192),
    "rehearsal": Shape(64, 8, 2, 32, 64),
}
"""Mixtral's proportions, Qwen 3's at a quarter of its width, Qwen 3 30B-A3B's block, and a rehearsal's."""


class Row(NamedTuple):
    """The time of one way to run a block of experts: medians over rounds.

    beside_ours: speed divided by that of this project's block in the same round.
    """

    experts: str
    name: str
    seconds: float
    beside_ours: float


IMPLEMENTATIONS = ("eager", "grouped_mm")  # batched_mm copies weights for every token
Run = Callable[[Tensor], Tensor]


def neox_experts(shape: Shape, device: torch.device, dtype: torch.dtype) -> MoE:
    """Returns this project's block of experts, with random weights."""
    args = NeoXArgs.from_dict({
        "num_layers": 1, "hidden_size": shape.hidden, "num_attention_heads": 8, "seq_length": 64,
        "max_position_embeddings": 64, "activation": "swiglu", "intermediate_size": shape.width,
        "compat_ffn_width": "none", "use_bias_in_mlp": False, "moe_num_experts": shape.experts,
        "moe_top_k": shape.top_k, "moe_router_type": "topk", "norm_topk_prob": True,
    })  # fmt: skip
    spec = moe_spec(args, 0)
    assert spec is not None
    module = MoE(spec, ParallelGroups.single(device))
    with torch.no_grad():
        for param in module.parameters():
            param.normal_(0.0, 0.05)
    return module.to(dtype)


def transformers_experts(shape: Shape, source: MoE, implementation: str) -> nn.Module:
    """Returns transformers' block of experts, with the weights of `source`."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(  # type: ignore[call-arg]
        hidden_size=shape.hidden, intermediate_size=shape.width, num_local_experts=shape.experts,
        num_experts_per_tok=shape.top_k, router_jitter_noise=0.0, experts_implementation=implementation,
    )  # fmt: skip
    module, experts = MixtralSparseMoeBlock(config), source.experts.mlp
    module.to(experts.w1.device, experts.w1.dtype)
    assert experts.w3 is not None
    w1, w2, w3 = (
        w.detach().view(shape.experts, shape.width, shape.hidden) for w in (experts.w1, experts.w2, experts.w3)
    )
    with torch.no_grad():
        module.gate.weight.copy_(source.router.layer.weight)
        module.experts.gate_up_proj.copy_(torch.cat([w1, w3], 1))
        module.experts.down_proj.copy_(w2.transpose(1, 2))
    return module


def floor(shape: Shape, source: MoE) -> Run:
    """Returns a function with the minimal work: every row goes through the same single expert, densely."""
    rows, experts = shape.tokens * shape.top_k, source.experts.mlp
    assert experts.w3 is not None
    w1, w2, w3 = (w.detach()[: shape.width].clone().requires_grad_() for w in (experts.w1, experts.w2, experts.w3))

    def run(x: Tensor) -> Tensor:
        x = x.flatten(0, 1).repeat(shape.top_k, 1)[:rows]
        return (nn.functional.silu(x @ w1.T) * (x @ w3.T)) @ w2

    return run


def timed(run: Run, x: Tensor, params: list[nn.Parameter], steps: int) -> float:
    """Returns the mean seconds of a forward and backward pass: CPU time on a CPU, wall time on a GPU.

    params: parameters whose gradients are dropped after each pass."""
    start = time.process_time() if x.device.type == "cpu" else time.perf_counter()
    for _ in range(steps):
        leaf = x.detach().requires_grad_()
        run(leaf).sum().backward()
        for param in params:
            param.grad = None
    if x.device.type == "cpu":
        return (time.process_time() - start) / steps
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def in_turns(
    runs: Mapping[str, tuple[Run, list[nn.Parameter]]], x: Tensor, rounds: int, steps: int
) -> list[tuple[str, float, float]]:
    """Times all runs in each round. Returns (name, seconds, speed divided by that of "ours") of each run.

    Numbers are medians over rounds; speeds are compared within a round. runs: by name, (function from x to an
    output, parameters that get gradients).
    """
    seconds: dict[str, list[float]] = {key: [] for key in runs}
    for turn in range(rounds + 1):
        for key in list(runs)[turn % len(runs) :] + list(runs)[: turn % len(runs)]:
            turn_s = timed(runs[key][0], x, runs[key][1], steps)
            if turn:  # the first warms up
                seconds[key].append(turn_s)
    return [
        (
            key,
            median(run_seconds),
            median(base_s / run_s for base_s, run_s in zip(seconds["ours"], run_seconds, strict=True)),
        )
        for key, run_seconds in seconds.items()
    ]


def print_rows(rows: Iterable[Any]) -> None:
    """Prints a Markdown table of rows, which have `name`, `seconds` and `beside_ours`."""
    print("| | ms forwards and backwards | speed beside ours |\n|---|---:|---:|")
    for row in rows:
        print(f"| {row.name} | {1e3 * row.seconds:.1f} | {row.beside_ours:.2f} |", flush=True)


def main() -> None:
    """Measures the chosen shapes, and prints a table for each: times, and speeds relative to ours."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", help="default: mixtral and fine, on a GPU 30b too")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPU, where there is one")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="passes of a turn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    options = parser.parse_args()
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    rows: list[Row] = []
    for name in options.shape or ("mixtral", "fine", "30b")[: 3 if device.type == "cuda" else 2]:
        rows += measured(name, device, options.rounds, options.steps)
        if options.json is not None:
            options.json.write_text(json.dumps({"rows": [row._asdict() for row in rows]}, indent=1) + "\n")


def measured(name: str, device: torch.device, rounds: int, steps: int) -> list[Row]:
    """Checks on one shape that transformers' output equals ours, measures all ways, and prints a table."""
    shape, dtype = SHAPES[name], torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    moe = neox_experts(shape, device, dtype)
    x = torch.randn(shape.tokens // 8, 8, shape.hidden, device=device, dtype=dtype)
    runs: dict[str, tuple[Run, list[nn.Parameter]]] = {"ours": (lambda x: moe.core(x)[0], list(moe.parameters()))}
    with torch.no_grad():
        expected = moe.core(x)[0]
    # In bf16 their router's logits are rounded: a token between two experts may go to the other.
    tolerance, allowed = (5e-2, 5e-2) if dtype == torch.bfloat16 else (1e-5, 0.0)
    for implementation in IMPLEMENTATIONS:
        block = transformers_experts(shape, moe, implementation)
        try:
            with torch.no_grad():
                out = block(x)
            leaf = x.detach().requires_grad_()
            block(leaf).sum().backward()
        except Exception as problem:  # an implementation that this device has not
            print(f"transformers {implementation}: {type(problem).__name__}: {str(problem).splitlines()[0]}")
            continue
        errors = (out - expected).norm(dim=-1) / expected.norm(dim=-1)
        share = float((errors > tolerance).float().mean())
        assert share <= allowed, f"{implementation}: {share:.1%} of the tokens have another output"
        runs[f"transformers {implementation}"] = block, list(block.parameters())
    runs["floor"] = floor(shape, moe), []
    rows = [Row(name, *row) for row in in_turns(runs, x, rounds, steps)]
    print(f"\n{name}: {shape.experts} experts of {shape.width}, top {shape.top_k}, hidden {shape.hidden}, ", end="")
    print(f"{shape.tokens} tokens, {str(dtype).removeprefix('torch.')} on {device.type}\n")
    print_rows(rows)
    return rows


if __name__ == "__main__":
    run_command(main)
