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
    """Sizes of the parameters on one tensor rank.

    trained, frozen: numbers of elements. block: elements of the largest block, trained and frozen. packed:
    bytes of quantised weights, with their scales; no other field counts these weights."""

    trained: int
    frozen: int
    block: int
    packed: int


class Bytes(NamedTuple):
    """The memory of one rank, in bytes.

    held: weights between steps, without master weights. gathered: full copies of sharded weights that a step
    computes with. gradients: fp32. optimizer: Adam's moments and fp32 master weights."""

    held: float
    gathered: float
    gradients: float
    optimizer: float


def counts(args: NeoXArgs, tensor: int) -> Counts:
    """Counts the parameters of rank 0 of `tensor` tensor ranks. `args.padded_vocab_size` must be set."""
    single_rank = ParallelGroups.single()
    stage = build_stage(args, replace(single_rank, sizes={**single_rank.sizes, "tensor": tensor}))
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


def bytes_of(params: Counts, zero_stage: int, data: int) -> Bytes:
    """Returns the memory of one of `data` data ranks at a ZeRO stage. Packed weights are not sharded."""
    num_params = params.trained + params.frozen
    if zero_stage == 0:
        return Bytes(2 * num_params + params.packed, 0, 4 * params.trained, 12 * params.trained)
    gathered = 2 * num_params if zero_stage < 3 else 4 * params.block  # of stage 3 a block and the next one
    gradients = 4 * params.trained / (1 if zero_stage == 1 else data)
    return Bytes(2 * params.frozen / data + params.packed, gathered, gradients, 12 * params.trained / data)


def table() -> str:
    """Returns a Markdown table of one rank's GB, with a row per model, trained adapter and ZeRO stage."""
    lines = [
        "| model, tensor ranks | trained | ZeRO | held | gathered | gradients | optimizer | sum |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for shape, (file, tensor) in SHAPES.items():
        for method, lora in METHODS.items():
            args = load([str(ROOT / "configs" / "llama2" / file)])
            args = args.replace(lora=None, padded_vocab_size=32000)
            params = counts(args if lora is None else with_lora(args, lora), tensor)
            for stage in range(4):
                rank_bytes = bytes_of(params, stage, DATA_RANKS)
                numbers = " | ".join(f"{value / 1e9:.2f}" for value in (*rank_bytes, sum(rank_bytes)))
                lines.append(f"| {shape}, {tensor} | {method} | {stage} | {numbers} |")
    return "\n".join(lines)


def with_lora(args: NeoXArgs, lora: dict[str, Any]) -> NeoXArgs:
    """Returns the configuration with its key `lora` set to `lora`."""
    lora_args = NeoXArgs.from_dict({**args.user_values, "lora": lora})
    return lora_args.replace(padded_vocab_size=args.padded_vocab_size)


def main(argv: list[str] | None = None) -> int:
    CommandParser(description=__doc__).parse_args(argv)
    print(table())
    return 0


if __name__ == "__main__":
    run_command(main)
