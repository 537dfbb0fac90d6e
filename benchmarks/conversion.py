"""Time and memory of converting a synthetic HuggingFace model to a checkpoint and back, beside copying files.

A LLaMA of random numbers, with --experts a Mixtral, is written to a folder in shards. Then, as often as
asked: its files are copied (`cp`, and synced to disk), it is imported, and the checkpoint is exported. Before
each of the three the files that will be read are dropped from the page cache, and the memory that pages will
need is touched, which a virtual machine may have to get from its host at a fraction of the speed of a disk. A
conversion is a process of its own; told are its seconds beyond the start of Python, against those of the
copy, and its peak memory beyond what the imported libraries take: `needed` is anonymous and shared memory,
`resident` has the pages of mapped files too, which the kernel takes back when it wants them. The check
against transformers is told apart.
"""

import hashlib
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402

# Imports everything first, so that what is measured is the conversion's own; and tells when its phases begin.
MEASURED = """
import sys, time, transformers
from pathlib import Path
from transformers import LlamaForCausalLM, MixtralForCausalLM
from benchmarks.conversion import prepare
from megatron.checkpointing.huggingface import exporting, importing
from tools.ckpts import {command}

def phase(name):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak of resident memory begins anew
    print("phase", name, time.monotonic(), file=sys.stderr, flush=True)

def checked(*args, compare=exporting.compare_logits):
    phase("check")
    try:
        return compare(*args)
    finally:
        phase("publish")

importing.compare_logits = exporting.compare_logits = checked
prepare(Path(sys.argv[1]))
phase("convert")
{command}.main(sys.argv[2:])
phase("end")
"""
VOCAB = 16384
WAYS = {"there": "convert_hf_to_neox", "back": "convert_neox_to_hf"}


def model(hidden: int, layers: int, experts: int) -> dict[str, Any]:
    """Returns the config.json of a random LLaMA with grouped queries; of a Mixtral if `experts` exceeds 1."""
    mixture = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": experts,
               "intermediate_size": hidden * 3 // experts}  # fmt: skip
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 256,
        "intermediate_size": hidden * 3, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
        **(mixture if experts > 1 else {}),
    }  # fmt: skip


def write_model(folder: Path, config: dict[str, Any], precision: str, shard_bytes: int) -> tuple[int, int]:
    """Writes a model with random weights to `folder`. Returns its bytes, and those of its largest layer."""
    import torch

    from megatron.checkpointing.families.convert import from_hf, hf_shapes
    from megatron.checkpointing.huggingface.weight_writer import weight_bytes, write_weights
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
    write_weights(folder, shapes, dtype, tensors(), shard_bytes)
    (folder / "config.json").write_text(json.dumps(config))
    sizes = [sum(torch.Size(s.shape).numel() for s in specs) for specs in layer_params(args).values()]
    return weight_bytes(shapes.values(), dtype), max(sizes) * dtype.itemsize


def prepare(folder: Path) -> None:
    """Drops a folder's files from the page cache, and touches memory of 2.5 times their size.

    So files are read from disk, and a virtual machine has enough pages from its host. Call it just before a
    measurement, because a host takes free pages back in seconds.
    """
    size = 0
    for file in (file for file in folder.rglob("*") if file.is_file()):
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)
        size += file.stat().st_size
    with mmap.mmap(-1, int(2.5 * size)) as memory:
        for offset in range(0, len(memory), mmap.PAGESIZE):
            memory[offset] = 1


def copy(source: Path, target: Path) -> float:
    """Returns the seconds it takes to copy the safetensors files of `source` and to sync the copy to disk."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    prepare(source)
    start = time.monotonic()
    subprocess.run(["cp", *map(str, sorted(source.glob("*.safetensors"))), str(target)], check=True)
    for file in target.iterdir():
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    seconds = time.monotonic() - start
    shutil.rmtree(target)
    return seconds


def run(command: str, source: Path, *argv: str) -> dict[str, dict[str, float]]:
    """Runs a conversion script. Returns the numbers of its phases `convert`, `check` and `publish`.

    They are `seconds`, and peak bytes above the start of the conversion: `needed` for allocated memory,
    `resident` also for mapped files. The script's output goes to stderr."""
    words = [sys.executable, "-c", MEASURED.format(command=command), str(source), *argv]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(words, cwd=ROOT, stdout=sys.stderr, stderr=errors)
        samples: list[tuple[float, int, int, int]] = []
        while process.poll() is None:
            samples.append((time.monotonic(), *_memory(process.pid)))
            time.sleep(0.005)
        errors.seek(0)
        lines = errors.read().splitlines()
    if process.returncode:
        sys.exit("\n".join(lines))
    marks = [(line.split()[1], float(line.split()[2])) for line in lines if line.startswith("phase ")]
    base = [sample for sample in samples if sample[0] <= marks[0][1]][-1]
    phases: dict[str, dict[str, float]] = {}
    for (name, begin), (_, end) in zip(marks, marks[1:], strict=False):
        phase_samples = [sample for sample in samples if begin <= sample[0] <= end] or [base]
        allocated, resident = (max(sample[column] for sample in phase_samples) for column in (1, 2))
        phases[name] = {"seconds": end - begin, "needed": allocated - base[1], "resident": resident - base[3]}
    return phases


def _memory(pid: int) -> tuple[int, int, int]:
    """Returns bytes of a process: anonymous and shared memory, peak resident memory, current resident memory.

    All are 0 if the process has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0, 0
    fields = dict(line.split(":", 1) for line in text.splitlines())
    if "VmHWM" not in fields:  # it has ended
        return 0, 0, 0
    names = ("RssAnon", "RssShmem", "VmHWM", "VmRSS")
    anonymous, shared, peak, now = (int(fields[key].split()[0]) * 1024 for key in names)
    return anonymous + shared, peak, now


def measure(folder: Path, tp: int) -> dict[str, Any]:
    """Runs one round: copies the model, converts it to a checkpoint, and converts that back.

    Returns the seconds of `copy`, and the result of `run` for `there` and for `back`."""
    hf, neox, back = (folder / name for name in ("hf", "neox", "back"))
    for output_dir in (neox, back):
        shutil.rmtree(output_dir, ignore_errors=True)
    measured: dict[str, Any] = {"copy": copy(hf, folder / "copy")}
    measured["there"] = run(WAYS["there"], hf, "--hf-model", str(hf), "--output-dir", str(neox), "--tp", str(tp))
    measured["back"] = run(WAYS["back"], neox, "--input_dir", str(neox), "--output_dir", str(back))
    return measured


def main() -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=3.0, help="about so many GB of weights")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=1, help="a Mixtral with so many, as large as a LLaMA")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--shard-mb", type=float, default=500.0, help="of the source's files, at most")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size of the checkpoint")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write; four times the size is needed")
    parser.add_argument("--json", action="store_true", help="one object instead of a table")
    options = parser.parse_args()
    width = {"fp32": 4, "bf16": 2}[options.precision]
    layer = width * options.hidden**2 * (3 * 3 + 2 + 0.5)
    layers = max(1, round((options.gb * 1e9 - 2 * VOCAB * options.hidden * width) / layer))
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        config = model(options.hidden, layers, options.experts)
        size, largest = write_model(folder / "hf", config, options.precision, int(options.shard_mb * 1e6))
        files = sorted((folder / "hf").glob("*.safetensors"))
        rounds = [measure(folder, options.tp) for _ in range(options.repeats)]
        written = sorted((folder / "back").glob("*.safetensors"))
        is_same = _content(files) == _content(written)
        shard = max(file.stat().st_size for file in files)
    finally:
        shutil.rmtree(folder)
    summary = {"bytes": size, "largest_layer": largest, "largest_shard": shard, "same": is_same, "rounds": rounds}
    if options.json:
        print(json.dumps(summary))
        return
    print(f"{size / 1e9:.2f} GB ({options.precision}, {layers} layers, the largest {largest / 1e6:.0f} MB), "
          f"{len(files)} shards, the largest {shard / 1e6:.0f} MB")  # fmt: skip
    copies = [round_result["copy"] for round_result in rounds]
    print(f"copy, synced       {median(copies):6.1f} s  ({min(copies):.1f} to {max(copies):.1f})")
    for way, name in (("there", "HF -> checkpoint"), ("back", "checkpoint -> HF")):
        for phase in ("convert", "check"):
            rows = [round_result[way][phase] for round_result in rounds]
            seconds = [row["seconds"] for row in rows]
            if phase == "convert":  # to publish is a part of it, but what the check leaves in memory is not
                seconds = [
                    phase_s + round_result[way]["publish"]["seconds"]
                    for phase_s, round_result in zip(seconds, rounds, strict=True)
                ]
            allocated, resident = (max(row[key] for row in rows) for key in ("needed", "resident"))
            ratios = [phase_s / base for phase_s, base in zip(seconds, copies, strict=True)]
            title = name if phase == "convert" else "  its check"
            print(
                f"{title:18s} {median(seconds):6.1f} s  {median(ratios):4.2f} x "
                f"({min(ratios):.2f} to {max(ratios):.2f})  needed {allocated / 1e6:5.0f} MB = {allocated / shard:.2f} "
                f"shards  resident {resident / 1e6:5.0f} MB = {resident / shard:.2f}"
            )
    print(f"weights after both: {'the same bytes' if is_same else 'OTHER BYTES'}")


def _content(files: list[Path]) -> str:
    """Returns a SHA-256 of all tensors in safetensors files; it does not depend on which file holds which."""
    import torch

    from megatron.checkpointing.huggingface.folder import SafetensorsFile

    opened = {name: file for path in files for file in [SafetensorsFile(path)] for name in file.shapes}
    digest = hashlib.sha256()
    for name in sorted(opened):
        digest.update(name.encode())
        digest.update(opened[name].get(name).contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


if __name__ == "__main__":
    run_command(main)
