"""Mixers of Mamba and Mamba 2, forwards and backwards, beside transformers' and beside their floor.

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
from megatron.model import block_specs
from megatron.model.mamba import Mamba, Mamba2, StateInputs, choose_scans
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
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
    "mamba 2.8B": Shape("mamba", 2560, 2048, 4),
    "mamba2 2.7B": Shape("mamba2", 2560, 2048, 1),  # transformers' own formula takes 80 GB at four times as much
    "rehearsal": Shape("mamba2", 64, 64, 1),
}
"""Widths of the published models, and a rehearsal's."""


class Row(NamedTuple):
    """The time of one way to run a mixer: medians over rounds.

    beside_ours: speed divided by that of this project's mixer in the same round.
    """

    mixer: str
    name: str
    seconds: float
    beside_ours: float


def neox_mixer(shape: Shape, device: torch.device, backend: str) -> Mamba | Mamba2:
    """Returns this project's mixer, with random projections. backend: value of `mamba_backend`."""
    args = NeoXArgs.from_dict({
        "num_layers": 1, "hidden_size": shape.hidden, "num_attention_heads": 8, "seq_length": shape.seq,
        "max_position_embeddings": shape.seq, "norm": "rmsnorm", "rms_norm_epsilon": 1e-5,
        "attention_config": [shape.kind], "mamba_backend": backend,
        **({"mamba_num_groups": 1} if shape.kind == "mamba2" else {}),
    })  # fmt: skip
    spec: Any = block_specs(args)[0].mixer
    kind = Mamba if shape.kind == "mamba" else Mamba2
    mixer: Any = kind(spec, ParallelGroups.single(device), backends=choose_scans(args, device, [spec]))
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


def transformers_mixer(shape: Shape, mixer: Mamba | Mamba2) -> nn.Module:
    """Returns transformers' mixer, with the weights of `mixer`."""
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


def floor(mixer: Mamba | Mamba2) -> Run:
    """Returns a function with the minimal work: only the input and the output projection."""
    rows = mixer.out_proj.weight.shape[1]

    def run(x: Tensor) -> Tensor:
        return F.linear(F.linear(x, mixer.in_proj.weight)[..., :rows], mixer.out_proj.weight)

    return run


def measured(name: str, device: torch.device, rounds: int, steps: int, compiled: bool) -> list[Row]:
    """Checks on one shape that all outputs are equal, measures all ways, and prints a table."""
    shape, dtype = SHAPES[name], torch.bfloat16 if device.type == "cuda" else torch.float32

    def as_run(mixer: Mamba | Mamba2) -> Run:
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
    for name in options.shape or (list(SHAPES)[2:4] if on_gpu else list(SHAPES)[:2]):
        rows += measured(name, device, options.rounds, options.steps, options.compile or on_gpu)
        if options.json is not None:
            options.json.write_text(json.dumps({"rows": [row._asdict() for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)
