"""Time and memory of converting a synthetic HuggingFace model to a checkpoint and back.

A LLaMA of the asked size, of random numbers, is written to a folder; each direction then runs in a process of
its own, checks against transformers included, and tells its peak memory beyond what importing the libraries
takes (pages of files that it maps count).
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# Imports everything first, so that what is measured is the conversion's own.
MEASURED = (
    "import resource, sys, transformers; from transformers import LlamaForCausalLM; "
    "from tools.ckpts import {command}; peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; "
    "base = peak(); {command}.main(sys.argv[1:]); print(base, peak())"
)
VOCAB = 16384


def model(hidden: int, layers: int) -> dict[str, Any]:
    """The config.json of a LLaMA with grouped queries."""
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 256,
        "intermediate_size": hidden * 3, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    }  # fmt: skip


def write_model(folder: Path, config: dict[str, Any], precision: str) -> tuple[int, int]:
    """Write the model to `folder`; returns the bytes of all of it and of its largest layer."""
    import torch

    from megatron.checkpointing.families import from_hf, hf_shapes
    from megatron.checkpointing.huggingface.folder import weight_bytes, write_weights
    from megatron.model.weight_map import layer_params
    from megatron.neox_arguments import NeoXArgs

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    args = NeoXArgs.from_dict(from_hf(config, lambda name: torch.empty(0))[0])
    shapes = hf_shapes(args)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        # One strip of numbers for all: to make billions would take longer than to convert them.
        strip = 0.02 * torch.randn(1 << 20, generator=generator)
        for i, (name, shape) in enumerate(shapes.items()):
            count = torch.Size(shape).numel()
            values = strip.roll(7919 * i).repeat(-(-count // len(strip)))[:count].view(shape)
            yield name, (1 + values if len(shape) == 1 else values).to(dtype)

    folder.mkdir(parents=True)
    write_weights(folder, shapes, dtype, tensors())
    (folder / "config.json").write_text(json.dumps(config))
    sizes = [sum(torch.Size(s.shape).numel() for s in specs) for specs in layer_params(args).values()]
    return weight_bytes(shapes, dtype), max(sizes) * dtype.itemsize


def run(command: str, *argv: str) -> dict[str, float]:
    """seconds, and peak memory in bytes beyond the libraries'. The command's own words go to stderr."""
    begun = time.monotonic()
    words = [sys.executable, "-c", MEASURED.format(command=command), *argv]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr or done.stdout)
    *told, last = done.stdout.splitlines()
    print("\n".join(told), file=sys.stderr)
    base, peak = (int(number) * 1024 for number in last.split())
    return {"seconds": time.monotonic() - begun, "peak": peak - base}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=8.0, help="about so many GB of weights")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel size of the checkpoint")
    parser.add_argument("--folder", type=Path, help="where to write; three times the size is needed")
    parser.add_argument("--json", action="store_true", help="one object instead of a table")
    options = parser.parse_args()
    width = {"fp32": 4, "bf16": 2}[options.precision]
    layer = width * options.hidden**2 * (3 * 3 + 2 + 0.5)
    layers = max(1, round((options.gb * 1e9 - 2 * VOCAB * options.hidden * width) / layer))
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        size, largest = write_model(folder / "hf", model(options.hidden, layers), options.precision)
        there = run(
            "convert_hf_to_neox", "--hf-model", str(folder / "hf"), "--output-dir", str(folder / "neox"),
            "--tp", str(options.tp),
        )  # fmt: skip
        back = run("convert_neox_to_hf", "--input_dir", str(folder / "neox"), "--output_dir", str(folder / "back"))
        names = [file.name for file in (folder / "hf").glob("*.safetensors")]
        same = all(_same(folder / "hf" / name, folder / "back" / name) for name in names)
    finally:
        shutil.rmtree(folder)
    found = {"bytes": size, "largest_layer": largest, "there": there, "back": back, "same": same}
    if options.json:
        print(json.dumps(found))
        return
    print(f"{size / 1e9:.2f} GB ({options.precision}, {layers} layers), largest layer {largest / 1e6:.0f} MB")
    for name, row in (("HF -> checkpoint", there), ("checkpoint -> HF", back)):
        print(f"{name:18s} {row['seconds']:7.1f} s  peak {row['peak'] / 1e6:6.0f} MB")
    print(f"weights after both: {'the same bytes' if same else 'OTHER BYTES'}")


def _same(one: Path, other: Path) -> bool:
    return subprocess.run(["cmp", "--silent", str(one), str(other)]).returncode == 0


if __name__ == "__main__":
    main()
