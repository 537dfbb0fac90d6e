"""Mixers with states, forwards and backwards, beside transformers' and beside their floor.

Mamba, Mamba 2, Gated DeltaNet (Qwen 3-Next's) and Kimi Delta Attention.

One mixer in one process, in turns: ours, ours compiled (on a GPU, or with --compile), ours on the kernels of
mamba_ssm where it is installed, transformers' (which takes mamba_ssm's kernels where they are, else plain
torch), and the floor, the products of in_proj and out_proj and nothing else. All have the same weights, and
outputs are compared first. On a CPU in fp32, on a GPU in bf16.
"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.experts import Run, in_turns, print_rows
from megatron.checkpointing.families.kimi_linear import KIMI_LINEAR
from megatron.checkpointing.families.qwen3_next import QWEN3_NEXT
from megatron.model import block_specs
from megatron.model.block import MIXERS, kind_of
from megatron.model.mamba import ScanKernels, StateInputs, choose_scans
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.model_args import DELTA_BLOCKS
from megatron.process import run_command
from megatron.process.command_parser import CommandParser


class Shape(NamedTuple):
    """The sizes of one mixer. kind: its name in `attention_config`. seq: tokens of a row."""

    kind: str
    hidden: int
    seq: int
    rows: int


SHAPES = {
    "mamba 130M": Shape("mamba", 768, 256, 1),
    "mamba2 130M": Shape("mamba2", 768, 1024, 1),
    "gated delta net 130M": Shape("gated_delta_net", 768, 1024, 1),
    "kimi delta attention 130M": Shape("kimi_delta_attention", 768, 1024, 1),
    "mamba 2.8B": Shape("mamba", 2560, 2048, 4),
    "mamba2 2.7B": Shape("mamba2", 2560, 2048, 1),  # transformers' own formula takes 80 GB at four times as much
    "rehearsal": Shape("mamba2", 64, 64, 1),
}
"""Widths of the published models, those of Mamba for delta rules too, and a rehearsal's."""
_HEAD = 64  # width of a head of delta rules


class Row(NamedTuple):
    """The time of one way to run a mixer: medians over rounds.

    beside_ours: speed divided by that of this project's mixer in the same round.
    """

    mixer: str
    name: str
    seconds: float
    beside_ours: float


def neox_args(shape: Shape, backend: str) -> NeoXArgs:
    """Returns the configuration of a model with one such mixer. backend: value of `mamba_backend`."""
    return NeoXArgs.from_dict({
        "num_layers": 1, "hidden_size": shape.hidden, "num_attention_heads": 8, "seq_length": shape.seq,
        "max_position_embeddings": shape.seq, "norm": "rmsnorm", "rms_norm_epsilon": 1e-5,
        "attention_config": [shape.kind],
        **({"mamba_num_groups": 1} if shape.kind == "mamba2" else {}),
        **(delta_keys(shape) if shape.kind in DELTA_BLOCKS else {"mamba_backend": backend}),
    })  # fmt: skip


def neox_mixer(shape: Shape, device: torch.device, backend: str) -> Any:
    """Returns this project's mixer, with random projections. backend: value of `mamba_backend`."""
    args = neox_args(shape, backend)
    spec: Any = block_specs(args)[0].mixer
    scans = ScanKernels() if shape.kind in DELTA_BLOCKS else choose_scans(args, device, [spec])
    mixer = kind_of(MIXERS, spec)(spec, ParallelGroups.single(device), backends=scans)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, param in mixer.named_parameters():
            if name.endswith("A_log"):
                param.copy_(torch.rand_like(param).mul(15).add(1).log())
            elif name.endswith(("D", "norm.weight")):
                param.fill_(1.0)
            else:
                param.normal_(-4.0 if name in ("dt_bias", "dt_proj.bias") else 0.0, 0.02)
    return mixer


def delta_keys(shape: Shape) -> dict[str, int]:
    """Returns the sizes of a delta rule. Gated DeltaNet has half as many heads of keys as of values."""
    heads = shape.hidden // _HEAD
    return {
        "linear_num_key_heads": heads if shape.kind == "kimi_delta_attention" else heads // 2,
        "linear_num_value_heads": heads, "linear_key_head_dim": _HEAD, "linear_value_head_dim": _HEAD,
    }  # fmt: skip


def transformers_mixer(shape: Shape, mixer: Any) -> nn.Module:
    """Returns transformers' mixer, with the weights of `mixer`."""
    if shape.kind in DELTA_BLOCKS:
        return _transformers_delta(shape, mixer)
    from transformers import Mamba2Config, MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    if shape.kind == "mamba":
        module: nn.Module = MambaMixer(MambaConfig(hidden_size=shape.hidden, num_hidden_layers=1), 0)
    else:
        heads = 2 * shape.hidden // 64
        config = Mamba2Config(hidden_size=shape.hidden, num_heads=heads, n_groups=1, num_hidden_layers=1)
        module = Mamba2Mixer(config, 0)
    module.load_state_dict(mixer.state_dict())
    weight_of_input = mixer.in_proj.weight
    return module.to(weight_of_input.device, weight_of_input.dtype)


def _transformers_delta(shape: Shape, mixer: Any) -> nn.Module:
    """Returns transformers' mixer with a delta rule, with the weights of `mixer`."""
    from transformers import KimiLinearConfig, Qwen3NextConfig
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    sizes: dict[str, Any] = delta_keys(shape)
    spec = block_specs(neox_args(shape, "torch"))[0].mixer
    common: dict[str, Any] = {"hidden_size": shape.hidden, "num_hidden_layers": 1, "rms_norm_eps": 1e-5}
    if shape.kind == "gated_delta_net":
        module: nn.Module = Qwen3NextGatedDeltaNet(Qwen3NextConfig(**common, **sizes), 0)
        family = QWEN3_NEXT
    else:
        heads: dict[str, Any] = {"linear_num_heads": sizes["linear_num_value_heads"], "linear_head_dim": _HEAD}
        module, family = KimiLinearDeltaAttention(KimiLinearConfig(**common, **heads), 0), KIMI_LINEAR
    stored: dict[str, Tensor] = {}
    for row in family.rows:
        if row.neox_name.startswith("mixer."):
            parts = row.split(mixer.get_parameter(row.neox_name.removeprefix("mixer.")).detach(), spec, None)
            names = (name.rpartition("linear_attn.")[2].rpartition("self_attn.")[2] for name in row.hf_names)
            stored |= dict(zip(names, parts, strict=True))
    if shape.kind == "kimi_delta_attention":  # in memory, convolutions are one tensor, and decays have a module
        stored["conv1d.weight"] = torch.cat([stored.pop(f"{part}_conv1d.weight") for part in "qkv"])
        for name in ("f_a_proj.weight", "f_b_proj.weight", "dt_bias", "A_log"):
            stored[f"forget_gate.{name}"] = stored.pop(name)
    module.load_state_dict(stored)
    weight_of_input = mixer.in_proj.weight
    return module.to(weight_of_input.device, weight_of_input.dtype)


def floor(mixer: Any) -> Run:
    """Returns a function with the minimal work: only the input and the output projection."""
    rows = mixer.out_proj.weight.shape[1]

    def run(x: Tensor) -> Tensor:
        return F.linear(F.linear(x, mixer.in_proj.weight)[..., :rows], mixer.out_proj.weight)

    return run


def measured(name: str, device: torch.device, rounds: int, steps: int, compiled: bool) -> list[Row]:
    """Checks on one shape that all outputs are equal, measures all ways, and prints a table."""
    shape, dtype = SHAPES[name], torch.bfloat16 if device.type == "cuda" else torch.float32

    def as_run(mixer: Any) -> Run:
        return lambda x: mixer.output(mixer.core(x, StateInputs()))

    mixer = neox_mixer(shape, device, "torch").to(dtype)
    x = torch.randn(shape.seq, shape.rows, shape.hidden, device=device, dtype=dtype)
    hf_mixer = transformers_mixer(shape, mixer)
    runs: dict[str, tuple[Run, list[nn.Parameter]]] = {"ours": (as_run(mixer), list(mixer.parameters()))}
    if compiled:
        runs["ours, compiled"] = torch.compile(as_run(mixer), fullgraph=True), list(mixer.parameters())
    if device.type == "cuda" and (packaged := neox_mixer(shape, device, "auto").to(dtype)).kernels.package != "torch":
        runs[f"ours on {packaged.kernels.package}"] = as_run(packaged), list(packaged.parameters())
    runs["transformers"] = lambda x: hf_mixer(x.transpose(0, 1)).transpose(0, 1), list(hf_mixer.parameters())
    with torch.no_grad():
        outputs = {key: run(x).float() for key, (run, _) in runs.items()}
    for key, out in outputs.items():
        error = float((out - outputs["ours"]).norm() / outputs["ours"].norm())
        assert error < (2e-2 if dtype == torch.bfloat16 else 1e-5), f"{key}: another output, by {error:.1e}"
    runs["floor"] = floor(mixer), list(mixer.parameters())
    rows = [Row(name, *row) for row in in_turns(runs, x, rounds, steps)]
    print(f"\n{name}: hidden {shape.hidden}, {shape.rows} x {shape.seq} tokens, ", end="")
    print(f"{str(dtype).removeprefix('torch.')} on {device.type}\n")
    print_rows(rows)
    return rows


def main() -> None:
    """Measures the chosen shapes, and prints a table for each: times, and speeds relative to ours."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", help="default: those of 130M, on a GPU larger ones")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPU, where there is one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1, help="passes of a turn")
    parser.add_argument("--compile", action="store_true", help="ours compiled too; on a GPU always")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    options = parser.parse_args()
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu, rows = device.type == "cuda", list[Row]()
    for name in options.shape or (list(SHAPES)[4:6] if on_gpu else list(SHAPES)[:4]):
        rows += measured(name, device, options.rounds, options.steps, options.compile or on_gpu)
        if options.json is not None:
            options.json.write_text(json.dumps({"rows": [row._asdict() for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)
