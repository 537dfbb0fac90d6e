"""Collects facts of this machine: GPU, driver, libraries, and the rates of matrix products and copies.

`python -m benchmarks.gpu_run.facts FILE` writes an object of JSON; `--rehearse`: of the CPU.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron.process import run_command
from megatron.process.command_parser import CommandParser

PACKAGES = (
    "deepspeed", "transformers", "trl", "datasets", "accelerate", "triton", "numpy", "tokenizers", "pytest",
)  # fmt: skip


def versions() -> dict[str, str | None]:
    """Returns the version of each package in PACKAGES; None if it is not installed."""
    version_of: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            version_of[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            version_of[name] = None
    return version_of


def cores_here() -> int:
    """Returns the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpu_facts() -> dict[str, Any]:
    """Returns name, memory and driver versions of the first GPU. Raises RuntimeError if there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError(
            f"torch {torch.__version__} finds no GPU here; `python deepy.py doctor` says why, and `make gpu-rehearsal` "
            "runs every part on a CPU"
        )
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    return {
        "device": properties.name,
        "gpus": torch.cuda.device_count(),
        "capability": list(torch.cuda.get_device_capability(0)),
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": total,
        "free_bytes": free,
        "cuda": torch.version.cuda,
        "driver": ask_nvidia_smi("driver_version"),
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "architectures": torch.cuda.get_arch_list(),
    }


def ask_nvidia_smi(field: str) -> str | None:
    """Returns a field of nvidia-smi for the first GPU; None without nvidia-smi or a GPU."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=20)
    return result.stdout.splitlines()[0].strip() if result.returncode == 0 and result.stdout.strip() else None


def copy_rate(device: Any, size: int) -> float:
    """Returns the bytes per second, read and written, of the fastest of five copies of `size` bytes."""
    import torch

    from benchmarks.train_throughput import wait

    source = torch.empty(size, dtype=torch.uint8, device=device)
    target, best = torch.empty_like(source), 0.0
    for _ in range(5):
        wait(device)
        start = time.perf_counter()
        target.copy_(source)
        wait(device)
        best = max(best, 2 * size / (time.perf_counter() - start))
    return best


def main() -> int:
    parser = CommandParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    import torch

    from benchmarks.train_throughput import matmul_ceiling

    on_gpu = not options.rehearse
    try:
        facts = gpu_facts() if on_gpu else {"device": "CPU", "gpus": 0}
    except RuntimeError as problem:
        sys.stderr.write(f"{problem}\n")
        return 1
    facts |= {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": cores_here(),
        "compiler": next(filter(None, map(shutil.which, ("gcc", "clang"))), None) is not None,
        "packages": versions(),
    }
    options.file.write_text(json.dumps(facts))
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32} if on_gpu else {"fp32": torch.float32}
    facts["product_flops"] = {name: matmul_ceiling(device, dtype) for name, dtype in dtypes.items()}
    facts["copy_bytes_per_second"] = copy_rate(device, 4 * 2**30 if on_gpu else 2**24)
    options.file.write_text(json.dumps(facts))
    return 0


if __name__ == "__main__":
    run_command(main)
