"""Bytes of one rank of the native engine for full fine-tuning, LoRA and QLoRA (r 16, all linears), in bf16.

The model is built on the meta device, so that a 70B takes no memory. `held`: weights between steps, beside
fp32 master weights; `gathered`: the copies of cut weights that a step computes with; `gradients`: fp32;
`optimizer`: Adam's moments and fp32 master weights. Activations are not counted. ZeRO is over 8 data ranks.
"""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.model import build_stage, freeze  # noqa: E402
from megatron.model.init import stage_parameters  # noqa: E402
from megatron.mpu import Linear, ParallelGroups  # noqa: E402
from megatron.neox_arguments import NeoXArgs, load  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402

LORA = {"r": 16, "alpha": 32}
METHODS: Mapping[str, dict[str, Any] | None] = {"full": None, "LoRA": LORA, "QLoRA": {**LORA, "quantization": "nf4"}}
SHAPES = {"Llama 2 7B": ("7B.yml", 1), "Llama 2 70B": ("70B.yml", 8)}
DATA_RANKS = 8


class Counts(NamedTuple):
    """Elements of a tensor rank's parameters, those of the largest block (trained and frozen), and bytes of
    packed weights."""

    trained: int
    frozen: int
    block: int
    packed: int


class Bytes(NamedTuple):
    """As the module says."""

    held: float
    gathered: float
    gradients: float
    optimizer: float


def counts(args: NeoXArgs, tensor: int) -> Counts:
    """Of the first of so many tensor ranks; `args.padded_vocab_size` must be known."""
    alone = ParallelGroups.single()
    stage = build_stage(args, replace(alone, sizes={**alone.sizes, "tensor": tensor}))
    freeze(stage_parameters(stage), args)
    packed = [m.weight for s in stage.blocks for m in stage.layers[str(s.index)].modules() if isinstance(m, Linear)]
    packed = packed if args.quantized else []
    left_out = {id(weight) for weight in packed}
    params = [param for _, _, param in stage_parameters(stage) if id(param) not in left_out]
    blocks = [
        sum(p.numel() for p in stage.layers[str(s.index)].parameters() if id(p) not in left_out) for s in stage.blocks
    ]
    return Counts(
        sum(p.numel() for p in params if p.requires_grad),
        sum(p.numel() for p in params if not p.requires_grad),
        max(blocks),
        sum(weight.numel() // 2 + 4 * -(-weight.numel() // 64) for weight in packed),  # a fp32 scale for 64
    )


def bytes_of(found: Counts, zero_stage: int, data: int) -> Bytes:
    """Of a rank with so many data ranks. Packed weights are whole on each."""
    every = found.trained + found.frozen
    if zero_stage == 0:
        return Bytes(2 * every + found.packed, 0, 4 * found.trained, 12 * found.trained)
    gathered = 2 * every if zero_stage < 3 else 4 * found.block  # of stage 3 a block and the next one
    gradients = 4 * found.trained / (1 if zero_stage == 1 else data)
    return Bytes(2 * found.frozen / data + found.packed, gathered, gradients, 12 * found.trained / data)


def table() -> str:
    """GB of a rank, as Markdown."""
    lines = [
        "| model, tensor ranks | trained | ZeRO | held | gathered | gradients | optimizer | sum |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for shape, (file, tensor) in SHAPES.items():
        for method, lora in METHODS.items():
            args = load([str(ROOT / "configs" / "llama2" / file)])
            args = args.replace(lora=None, padded_vocab_size=32000)
            found = counts(args if lora is None else with_lora(args, lora), tensor)
            for stage in range(4):
                each = bytes_of(found, stage, DATA_RANKS)
                numbers = " | ".join(f"{value / 1e9:.2f}" for value in (*each, sum(each)))
                lines.append(f"| {shape}, {tensor} | {method} | {stage} | {numbers} |")
    return "\n".join(lines)


def with_lora(args: NeoXArgs, lora: dict[str, Any]) -> NeoXArgs:
    """The same model with adapters."""
    given = NeoXArgs.from_dict({**args.user_values, "lora": lora})
    return given.replace(padded_vocab_size=args.padded_vocab_size)


def main(argv: list[str] | None = None) -> int:
    CommandParser(description=__doc__).parse_args(argv)
    print(table())
    return 0


if __name__ == "__main__":
    run_command(main)
