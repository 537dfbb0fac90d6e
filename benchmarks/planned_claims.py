"""Claims about run times beside plans, and beside the hours that FLOPs take at the full peak."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.launch import install_root
from megatron.launch.gpus import read_gpus
from megatron.neox_arguments.neox_args import load_assignments
from megatron.neox_arguments.reading.files import parse_overrides
from megatron.neox_arguments.reading.presets import files_of
from megatron.planning.processes import Processes
from megatron.process import run_command
from megatron.process.command_parser import CommandParser

if TYPE_CHECKING:
    from megatron.planning.plan import Plan

# The staged 7B: 32 layers x 4096, 8 key-value heads, vocabulary 50,304; 100,000 steps of 32 rows.
_STAGED = ("padded_vocab_size=50304", "seq_length=2048", "train_batch_size=32", "train_micro_batch_size_per_gpu=2",
           "train_iters=100000", "checkpoint_activations=false", "compile=block",
           "zero_optimization.stage=2")  # fmt: skip
_NEOX = ("padded_vocab_size=50304", "checkpoint_activations=false", "compile=block", "train_batch_size=null",
         "gradient_accumulation_steps=1")  # fmt: skip
# SmolLM3-3B: 36 layers x 2048.
_SMALL = ("padded_vocab_size=128256", "num_layers=36", "hidden_size=2048", "num_attention_heads=16", "num_kv_heads=4",
          "intermediate_size=11008", "no_weight_tying=false", "seq_length=2048", "compile=block",
          "train_micro_batch_size_per_gpu=2", "train_batch_size=32", "checkpoint_activations=true",
          "zero_optimization.stage=1")  # fmt: skip


@dataclass(frozen=True)
class Claim:
    """A claim about a run.

    claimed: from and to, in `unit`. ratio_to: the claim of the run with which the speed is compared.
    """

    name: str
    config: str
    keys: tuple[str, ...]
    gpus: int
    gpu: str
    claimed: tuple[float, float]
    unit: str
    gpus_per_node: int = 8
    net: str | None = None
    ratio_to: str = ""


CLAIMS = (
    Claim("staged 7B, A100, bf16", "llama3-1/8B", _STAGED, 8, "a100-80gb", (45, 50), "hours"),
    Claim("staged 7B, H100, bf16", "llama3-1/8B", _STAGED, 8, "h100", (35, 40), "hours"),
    Claim("staged 7B, H100, FP8", "llama3-1/8B", (*_STAGED, "precision_fp8=rowwise"), 8, "h100", (25, 30), "hours"),
    Claim("6.85B, 1 node of GH200", "neox_7b", _NEOX, 4, "gh200", (9065, 9065), "tokens/s", 4, "slingshot"),
    Claim("6.85B, 4 nodes of GH200", "neox_7b", _NEOX, 16, "gh200", (6784, 6784), "tokens/s", 4, "slingshot"),
    Claim("6.85B, 16 nodes, rows of 16,384", "neox_7b",
          (*_NEOX, "seq_length=16384", "max_position_embeddings=16384", "train_micro_batch_size_per_gpu=1"),
          64, "gh200", (6910, 6910), "tokens/s", 4, "slingshot"),
    Claim("6.85B, 4 nodes, TCP sockets", "neox_7b", _NEOX, 16, "gh200", (17, 17), "times slower", 4, "tcp",
          ratio_to="6.85B, 4 nodes of GH200"),
    Claim("3B, one L40S", "llama3-1/8B", _SMALL, 1, "l40s", (1, 1), "times faster", 1, ratio_to="3B, one L40S"),
    Claim("3B, four L40S, one in each machine", "llama3-1/8B", _SMALL, 4, "l40s", (4, 4), "times faster", 1, "tcp",
          ratio_to="3B, one L40S"),
    Claim("3B, four L40S in one machine", "llama3-1/8B", _SMALL, 4, "l40s", (4, 4), "times faster", 4,
          ratio_to="3B, one L40S"),
)  # fmt: skip


_HEAD = """# Claims and plans

Run times that others have claimed, beside plans of this project's own runs.
`python benchmarks/planned_claims.py > docs/planned-claims.md` writes this page. Plans are good to about 10 % for
layouts like those of [the lists](planning.md#how-good-is-it).

- Staged 7B: 100,000 steps of 32 rows of 2,048 tokens. The claims name no number of GPUs. Rows begin with 512 tokens
  there, and grow. Eight GPUs are planned, with full rows.
- 6.85B: GPT-NeoX on GH200 with Slingshot, as its users measured it. GPT-NeoX's formula counts the full square of
  attention.
- 3B: SmolLM3-3B on L40S, one in each machine of a Kubernetes job. Four are claimed to be four times as fast as one.

"At the full peak" is the best that the GPUs can do with the FLOPs of the run. A better claim cannot hold.

| run | GPUs | claimed | planned | at the full peak | TFLOP/s (GPT-NeoX's formula) | memory of a step |
|---|---:|---:|---:|---:|---:|---:|"""


def planned(claim: Claim, processes: Processes) -> "Plan":
    """Returns the plan of a claim's run."""
    # These import torch, which the processes must not do as they start.
    from megatron.planning.machines import Machine, read_links, read_reached
    from megatron.planning.plan import make_plan

    links, gpu = read_links(), read_gpus()[claim.gpu]
    machine = Machine(
        gpu, read_reached(gpu.generation), links[gpu.link], links[claim.net or gpu.network], claim.gpus_per_node
    )
    paths, _ = files_of([f"configs/{claim.config}.yml"], preset_root=install_root())
    args = load_assignments(paths, parse_overrides(list(claim.keys), "--set")).check_planning()
    return make_plan(
        args, claim.gpus, machine, has_gpu=True, gpu_memory=None, price=None, failures=None, processes=processes,
        compares=False, finds_ways=False,
    )  # fmt: skip


def _row(claim: Claim, plans: Mapping[str, "Plan"]) -> str:
    from megatron.planning.output import run_facts
    from megatron.planning.plan import GIB

    plan = plans[claim.name]
    assert plan.time is not None
    values, gpu = run_facts(plan), plan.machine.gpu
    peak = (gpu.bf16 if plan.args.precision_fp8 in (None, "off") else gpu.fp8) * 1e12
    rate = values["tokens_per_s_per_gpu"]
    best_rate = rate * plan.time.seconds / (plan.size.flops / peak / claim.gpus)
    if claim.ratio_to:
        world = plans[claim.ratio_to].args.world_size
        assert world is not None
        base_rate = run_facts(plans[claim.ratio_to])["tokens_per_s_per_gpu"] * world
        ratio = rate * claim.gpus / base_rate
        value, best = (1 / ratio if "slower" in claim.unit else ratio), ""
        result = f"{value:.2f} {claim.unit}"
    elif claim.unit == "hours":
        hours = values["days"] * 24
        result, best = f"{hours:.1f} hours", f"{hours * rate / best_rate:.1f} hours"
    else:
        result, best = f"{rate:,.0f} tokens/s", f"{best_rate:,.0f} tokens/s"
    claimed = " to ".join(f"{value:,.0f}" for value in dict.fromkeys(claim.claimed)) + f" {claim.unit}"
    flops = plan.size.neox_flops / plan.time.seconds / claim.gpus / 1e12
    memory = f"{plan.step_bytes / GIB:.0f} of {gpu.memory:.0f} GiB{'' if plan.fits_memory else ': does not fit'}"
    gpus = f"{claim.gpus} {claim.gpu}, {claim.net}" if claim.net else f"{claim.gpus} {claim.gpu}"
    return f"| {claim.name} | {gpus} | {claimed} | {result} | {best} | {flops:.0f} | {memory} |"


def main() -> None:
    """Prints the page."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2, help="processes that record steps; default: 2")
    options = parser.parse_args()
    plans = {}
    with Processes(options.processes) as processes:
        for claim in CLAIMS:
            plans[claim.name] = planned(claim, processes)
            print(f"\r{len(plans)} of {len(CLAIMS)}", end="", file=sys.stderr, flush=True)
    print(_HEAD)
    for claim in CLAIMS:
        print(_row(claim, plans))
    plan = plans[CLAIMS[0].name]
    flops = plan.size.flops * 100_000
    hours = [f"{flops / peak / 3600:.0f}" for peak in (312e12, 989.4e12, 1978.9e12)]
    slow, fast = plans["6.85B, 4 nodes, TCP sockets"], plans["6.85B, 4 nodes of GH200"]
    assert slow.time is not None and fast.time is not None
    bandwidth = slow.machine.network.bandwidth * slow.time.seconds / (17 * fast.time.seconds)
    print(f"""
One GPU cannot do what is claimed of the staged 7B. Its {flops:.3g} FLOPs take {hours[0]} hours at the full peak of an
A100, {hours[1]} of an H100, {hours[2]} in FP8.

Sockets are 17 times slower if they carry about {bandwidth:.1f} GB/s for each GPU; planned are
{slow.machine.network.bandwidth} GB/s.""")


if __name__ == "__main__":
    run_command(main)
