"""Throughputs that others have published, with FLOPs counted in one way: shares of the peak side by side.

List A may tune a planner; list B is for its test alone (benchmarks/published/).
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml

from megatron.launch.gpus import read_gpus
from megatron.neox_arguments import NeoXArgs
from megatron.process import run_command
from megatron.process.command_parser import CommandParser
from megatron.training.metrics.flops import model_flops

FOLDER = Path(__file__).with_name("published")


def read_rows(name: str) -> list[dict[str, Any]]:
    """Returns the rows of list "a" or "b", each with the shape of its model under `shape`."""
    text = yaml.safe_load((FOLDER / f"list_{name}.yml").read_text(encoding="utf-8"))
    return [{**row, "shape": text["models"][row["model"]]} for row in text["rows"]]


def args_of(row: Mapping[str, Any]) -> NeoXArgs:
    """Returns a configuration with a row's model, layout and batch, on its number of GPUs.

    Experts are not sharded, which changes no FLOPs.
    """
    shape, seq, tensor = dict(row["shape"]), row["seq_length"], row["model_parallel_size"]
    shape["padded_vocab_size"] += -shape["padded_vocab_size"] % tensor
    gated, tied = shape.pop("gated_mlp"), shape.pop("tied", False)
    names = ("model_parallel_size", "pipe_parallel_size", "context_parallel_size")
    layout = {name: row[name] for name in names if name in row}
    values = {
        **shape, **layout, "seq_length": seq, "max_position_embeddings": seq, "pos_emb": "rotary", "norm": "rmsnorm",
        "activation": "swiglu" if gated else "gelu", "compat_ffn_width": "none", "no_weight_tying": not tied,
        "use_bias_in_attn_linear": not gated, "use_bias_in_mlp": not gated, "precision": "bfloat16",
        "train_micro_batch_size_per_gpu": row["micro_batch"], "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }  # fmt: skip
    if "moe_num_experts" in shape:
        values |= {"moe_router_type": "topk", "moe_intermediate_size": values.pop("intermediate_size")}
    if "global_batch" in row:
        values["train_batch_size"] = row["global_batch"]
    return NeoXArgs.from_dict(values).for_world(row["gpus"])


def tflops(row: Mapping[str, Any]) -> float:
    """Returns the TFLOP/s of a GPU: `model_flops`, in which attention counts as the half that causality
    leaves."""
    args = args_of(row)
    assert args.train_batch_size is not None
    flops_of_a_token = model_flops(args) / (args.train_batch_size * args.seq_length)
    return float(row["tokens_per_s"] * flops_of_a_token / 1e12)


def main() -> None:
    """Prints one line for each row."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("list", choices=("a", "b"), help="which list")
    gpus = read_gpus()
    print("| framework | model | GPUs | seq | precision | tokens/s/GPU | TFLOP/s | of the peak |")
    print("|---|---|---:|---:|---|---:|---:|---:|")
    for row in read_rows(parser.parse_args().list):
        rate, precision = tflops(row), row["precision"]
        share = 100 * rate / (gpus[row["gpu"]].fp8 if precision == "fp8" else gpus[row["gpu"]].bf16)
        machines = f"{row['gpus']} {row['gpu']}"
        print(
            f"| {row['framework']} | {row['model']} | {machines} | {row['seq_length']} | {precision} | "
            f"{row['tokens_per_s']:,.0f} | {rate:.0f} | {share:.1f} % |"
        )


if __name__ == "__main__":
    run_command(main)
