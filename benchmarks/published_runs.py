"""Throughputs that others have published, with FLOPs counted in one way, beside those that a plan predicts.

List A tunes the planner; list B is for its test alone (benchmarks/published/).
"""

import hashlib
import json
import math
import pickle
import statistics
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml

from megatron.launch.gpus import read_gpus
from megatron.neox_arguments import NeoXArgs
from megatron.planning.machines import Link, Machine, Reached, read_links, read_reached
from megatron.planning.operations import Segment, Trace
from megatron.planning.processes import Processes
from megatron.planning.ranks import trace_steps, traced_args, without_pipeline
from megatron.process import run_command
from megatron.process.command_parser import CommandParser

if TYPE_CHECKING:
    from megatron.planning.step_model import StepModel

# Speed of FlashAttention 2 beside cuDNN's kernels on an H200, forward and backward: 4.00 ms / 6.95 ms.
_FLASH = 0.575
GENERATIONS = ("ampere", "ada", "hopper", "blackwell")
FOLDER = Path(__file__).with_name("published")


class Framework(NamedTuple):
    """The properties of another program.

    product, attention, memory: factors of what it reaches (`Reached`), and of bytes of memory-bound
        operations.
    fused: whether these run in fused kernels, also where a row does not say "torch.compile".
    flash: attention is FlashAttention 2's. zero: ZeRO stage, where a row does not say it. fp8_experts:
    whether FP8 is also for products of experts. fp8_gathers: whether activations are gathered over tensor
    ranks in FP8. overlap, host, tensor: factors of the same of `Reached`. expert_loop: the host starts a
    product for each expert.
    """

    product: float = 1.0
    attention: float = 1.0
    memory: float = 1.0
    overlap: float = 1.0
    tensor: float = 1.0
    fused: bool = True
    flash: bool = False
    host: float = 8.0
    expert_loop: bool = False
    zero: int = 1
    fp8_experts: bool = False
    fp8_gathers: bool = False


def read_rows(name: str) -> list[dict[str, Any]]:
    """Returns the rows of list "a" or "b", each with the shape of its model under `shape`."""
    text = yaml.safe_load((FOLDER / f"list_{name}.yml").read_text(encoding="utf-8"))
    return [{**row, "shape": text["models"][row["model"]]} for row in text["rows"]]


def read_frameworks() -> dict[str, Framework]:
    """Returns the frameworks by the beginning of their name in a row."""
    text = (FOLDER / "frameworks.toml").read_text(encoding="utf-8")
    return {name: Framework(**values) for name, values in tomllib.loads(text).items()}


def framework_of(row: Mapping[str, Any], frameworks: Mapping[str, Framework]) -> Framework:
    """Raises KeyError if the table lacks the framework."""
    names = [name for name in frameworks if row["framework"].startswith(name)]
    if not names:
        raise KeyError(f"frameworks.toml lacks {row['framework']}")
    framework = frameworks[max(names, key=len)]
    # FP8's casts are in fused kernels everywhere.
    is_fused = framework.fused or "torch.compile" in row["note"] or row["precision"] == "fp8"
    return framework._replace(fused=is_fused)


def _values(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns keys of a row's model, layout and batch. Experts are not sharded."""
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
    return values


def planned_args_of(row: Mapping[str, Any], framework: Framework) -> NeoXArgs:
    """Returns the configuration with all that a row says of its run."""
    values = _values(row) | {"zero_optimization": {"stage": row.get("zero", framework.zero)}}
    values |= {"distributed_backend": "nccl", "first_last_layers_bf16": False}
    is_split = row["model_parallel_size"] > 1
    # Megatron also shares experts out to tensor ranks; here they are shared out to data ranks alone.
    data = row["gpus"] // (row["model_parallel_size"] * row.get("pipe_parallel_size", 1))
    experts = math.gcd(row.get("expert_parallel_size", data if "DeepEP" in row["note"] else 1), data)
    values |= {"expert_parallel_size": experts, "expert_parallel_across_nodes": experts > 1}
    values["sequence_parallel"] = is_split and row.get("sequence_parallel", True)
    if row.get("virtual_stages", 1) > 1:
        values |= {"pipeline_schedule": "interleaved", "virtual_pipeline_stages": row["virtual_stages"]}
    if row.get("recompute") in ("full", "selective"):
        values |= {"checkpoint_activations": True, "recompute_granularity": row["recompute"]}
    if row.get("context_parallel_size", 1) > 1:
        values["context_parallel_type"] = "allgather"
    if row["precision"] == "fp8":
        values["precision_fp8"] = "tensorwise"
    return NeoXArgs.from_dict(values).for_world(row["gpus"])


def machine_of(
    row: Mapping[str, Any], framework: Framework, reached: Mapping[str, Reached], links: Mapping[str, Link]
) -> Machine:
    """Returns the machines of a row. What it does not say of its network is that of the GPU's reference
    machine."""
    gpu = read_gpus()[row["gpu"]]
    name = row.get("net", "none")
    network = {"none": gpu.network, "ethernet": "roce-200"}.get(name, name)
    shares = reached[gpu.generation]
    attention = framework.attention * (_FLASH if framework.flash and gpu.generation in ("hopper", "blackwell") else 1)
    shares = shares._replace(
        product=shares.product * framework.product, fp8_product=shares.fp8_product * framework.product,
        attention=shares.attention * attention, overlap=shares.overlap * framework.overlap,
        attention_backward=shares.attention_backward * attention, copy=shares.copy / framework.memory,
        host=shares.host * framework.host, tensor=shares.tensor * framework.tensor,
    )  # fmt: skip
    per_node = row.get("gpus_per_node", 72 if row["gpu"].startswith("gb") else 8)
    return Machine(gpu, shares, links[gpu.link], links[network], per_node)


def traces(rows: Sequence[Mapping[str, Any]], processes: Processes, folder: Path | None = None) -> list[Trace]:
    """Returns the trace of each row. folder: keeps traces; None: they are recorded each time."""
    frameworks = read_frameworks()
    planned = [planned_args_of(row, framework_of(row, frameworks)) for row in rows]
    configurations = [traced_args(without_pipeline(args)) for args in planned]
    keys = [hashlib.sha256(args.to_json().encode()).hexdigest()[:24] for args in configurations]
    trace_of_key: dict[str, Trace] = {}
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        trace_of_key = {path.stem: pickle.loads(path.read_bytes()) for path in folder.glob("*.trace")}
    missing = {key: args for key, args in zip(keys, configurations, strict=True) if key not in trace_of_key}
    new = trace_steps([(args, 0) for args in missing.values()], processes) if missing else iter(())
    for number, (key, trace) in enumerate(zip(missing, new, strict=True), 1):
        trace_of_key[key] = trace
        print(f"\rtrace {number} of {len(missing)}", end="", file=sys.stderr, flush=True)
        if folder is not None:
            (folder / f"{key}.trace").write_bytes(pickle.dumps(trace))
    return [trace_of_key[key] for key in keys]


def model_of(row: Mapping[str, Any], trace: Trace, framework: Framework, machine: Machine) -> "StepModel":
    """Returns the model of a row's step."""
    from megatron.planning.step_model import StepModel  # imports torch, which the processes of `traces` must not

    if row["precision"] == "fp8":
        trace = replace(trace, segments=tuple(_with_fp8(trace, framework)))
    if framework.expert_loop:
        trace = replace(trace, segments=tuple(map(_with_expert_loop, trace.segments)))
    return StepModel(planned_args_of(row, framework), [trace], machine, framework.fused)


def tokens_per_second(row: Mapping[str, Any], model: "StepModel") -> float:
    """Returns the predicted tokens per second and GPU."""
    batch = model.args.train_batch_size
    assert batch is not None
    return float(batch * model.args.seq_length / (model.step().seconds * row["gpus"]))


def _with_fp8(trace: Trace, framework: Framework) -> Iterator[Any]:
    """Yields segments in which all is in FP8 that the framework has in it, besides products of weights."""
    for segment in trace.segments:
        operations = []
        for operation in segment.operations:
            if framework.fp8_experts and operation.kind == "grouped":
                operation = operation._replace(dtype="float8_e4m3fn")
            if framework.fp8_gathers and (operation.kind, operation.axis) == ("all_gather", "tensor"):
                operation = operation._replace(size=operation.size / 2)
            operations.append(operation)
        yield segment._replace(operations=tuple(operations))


def _with_expert_loop(segment: Segment) -> Segment:
    """Returns a segment in which the host starts a product for each expert of a rank."""
    operations = (
        operation._replace(launches=operation.shape[-1]) if operation.kind == "grouped" else operation
        for operation in segment.operations
    )
    return segment._replace(operations=tuple(operations))


def tflops(row: Mapping[str, Any]) -> float:
    """Returns the TFLOP/s of a GPU: `model_flops`, in which attention counts as the half that causality
    leaves."""
    return float(row["tokens_per_s"] * _token_flops(json.dumps(row["shape"]), row["seq_length"]) / 1e12)


@cache
def _token_flops(shape: str, seq: int) -> float:
    """Returns the FLOPs of a token, which no layout changes. shape: as JSON."""
    from megatron.training.metrics.flops import model_flops  # imports torch

    row = {"shape": json.loads(shape), "seq_length": seq, "model_parallel_size": 1, "micro_batch": 1}
    return model_flops(NeoXArgs.from_dict(_values(row)).for_world(1)) / seq


def main() -> None:
    """Prints one line for each row."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("list", choices=("a", "b"), help="which list")
    parser.add_argument("--predict", action="store_true", help="also predict each row")
    parser.add_argument("--processes", type=int, default=2, help="processes that record steps; default: 2")
    parser.add_argument("--cache", type=Path, help="folder of recorded steps")
    options = parser.parse_args()
    rows, gpus = read_rows(options.list), read_gpus()
    if options.predict:
        with Processes(options.processes) as processes:
            _print_predictions(rows, traces(rows, processes, options.cache))
        return
    print("| framework | model | GPUs | seq | precision | tokens/s/GPU | TFLOP/s | of the peak |")
    print("|---|---|---:|---:|---|---:|---:|---:|")
    for row in rows:
        rate, precision = tflops(row), row["precision"]
        share = 100 * rate / (gpus[row["gpu"]].fp8 if precision == "fp8" else gpus[row["gpu"]].bf16)
        print(f"| {_described(row)} | {row['tokens_per_s']:,.0f} | {rate:.0f} | {share:.1f} % |")


def _described(row: Mapping[str, Any]) -> str:
    machines = f"{row['gpus']} {row['gpu']}"
    return f"{row['framework']} | {row['model']} | {machines} | {row['seq_length']} | {row['precision']}"


def _print_predictions(rows: Sequence[Mapping[str, Any]], row_traces: Sequence[Trace]) -> None:
    frameworks, links = read_frameworks(), read_links()
    reached = {name: read_reached(name) for name in GENERATIONS}
    print("| framework | model | GPUs | seq | precision | tokens/s/GPU | predicted | error |")
    print("|---|---|---:|---:|---|---:|---:|---:|")
    errors = []
    for row, trace in zip(rows, row_traces, strict=True):
        framework = framework_of(row, frameworks)
        model = model_of(row, trace, framework, machine_of(row, framework, reached, links))
        rate = tokens_per_second(row, model)
        errors.append(rate / row["tokens_per_s"] - 1)
        print(f"| {_described(row)} | {row['tokens_per_s']:,.0f} | {rate:,.0f} | {100 * errors[-1]:+.1f} % |")
    sizes = [abs(error) for error in errors]
    print(f"\n{len(rows)} rows: mean error {100 * statistics.mean(sizes):.1f} %, median "
          f"{100 * statistics.median(sizes):.1f} %, worst {100 * max(sizes):.1f} %, "
          f"root of the mean square {100 * math.sqrt(statistics.mean(e * e for e in sizes)):.1f} %")  # fmt: skip


if __name__ == "__main__":
    run_command(main)
