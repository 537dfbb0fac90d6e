"""Checks GPUs: whether driver, torch and each GPU work together, and which number formats GPUs support."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.launch.cuda_driver import capabilities
from megatron.launch.doctor.check import Check, failed, warning
from megatron.launch.doctor.software import Torch
from megatron.launch.doctor.storage import GIB
from megatron.launch.torch_builds import NoBuild, choose, this_platform

_IN_USE = 1.0  # GiB that other processes and displays may use without a warning


@dataclass(frozen=True)
class Gpu:
    """One visible device.

    name: as CUDA_VISIBLE_DEVICES spells it.
    total, free: memory in bytes.
    problem: why a small matrix product on it failed, "" if it succeeded.
    """

    name: str
    model: str
    total: int
    free: int
    capability: tuple[int, int]
    problem: str = ""


def driver_version() -> str | None:
    """Returns the version of the loaded NVIDIA driver; None if none is loaded."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    return next((word for word in text.split() if word[0].isdigit() and word.count(".") >= 1), None)


def read_gpus(names: Sequence[str]) -> list[Gpu]:
    """Returns the properties and free memory of each GPU in `names`, and the problem if a small matrix
    product on it failed."""
    if not names:
        return []
    import torch  # names are empty if torch cannot be imported

    gpus = []
    for index, name in enumerate(names):
        try:
            properties = torch.cuda.get_device_properties(index)
            matrix = torch.ones(64, 64, device=f"cuda:{index}")
            problem = "" if (matrix @ matrix).sum().item() == 64**3 else "a product of 64 x 64 ones is wrong"
            free, total = torch.cuda.mem_get_info(index)
        except Exception as cause:  # RuntimeError, AcceleratorError, AssertionError: whatever CUDA says
            gpus.append(Gpu(name, "?", 0, 0, (0, 0), str(cause).strip().splitlines()[0]))
            continue
        gpus.append(Gpu(name, properties.name, total, free, (properties.major, properties.minor), problem))
    return gpus


def driver_check(driver: str | None, torch: Torch, gpus: int, serves: tuple[int, int] | None = None) -> Check:
    """Checks that the driver, torch's CUDA and the GPUs work together. It fails if the driver is too old for
    torch's CUDA, so that no GPU is visible.

    driver: version of the driver, None if unknown.
    gpus: number of visible GPUs.
    serves: the CUDA version that the driver supports.
    """
    if driver is None and not gpus:
        return Check("driver", "ok", "no NVIDIA driver: ranks are processes on the CPU, with gloo")
    description = f"NVIDIA {driver or 'of unknown version'}, {gpus} GPU{'s' * (gpus != 1)} visible"
    if torch.version is None or torch.problem:
        return warning("driver", description, "torch cannot be imported; see the line `torch` above")
    if torch.cuda is None:
        return warning("driver", f"{description}; torch is built without CUDA", _suited(serves))
    if not gpus and serves is not None and serves[0] < int(torch.cuda.partition(".")[0]):
        description = f"{description}; it supports CUDA {serves[0]}.{serves[1]}, torch is built for {torch.cuda}"
        return failed("driver", description, _suited(serves))
    if not gpus:
        advice = f"CUDA_VISIBLE_DEVICES hides the GPUs, or the driver is too old for CUDA {torch.cuda}: see nvidia-smi"
        return warning("driver", description, advice)
    return Check("driver", "ok", description)


def _suited(serves: tuple[int, int] | None) -> str:
    """Returns the pip command that installs a build of torch for this machine's driver and GPUs. If there is
    no such build, returns the reason.

    serves: the CUDA version that the driver supports.
    """
    if serves is None:
        return "install torch without --cpu"
    try:
        build = choose(sys.version_info[:2], this_platform(), serves, devices=capabilities())
        return f"pip install {' '.join(build.words())}"
    except NoBuild as problem:
        return str(problem)


def gpu_checks(
    gpus: Sequence[Gpu], requested: Sequence[str] = (), serves: tuple[int, int] | None = None
) -> list[Check]:
    """Returns a check for each requested GPU, or for each GPU if none is requested. A requested GPU that does
    not exist fails.

    GPUs of different models add a warning. serves: the CUDA version that the driver supports.
    """
    checks = []
    for name in requested:
        if name not in [gpu.name for gpu in gpus]:
            visible = ", ".join(gpu.name for gpu in gpus) or "none"
            checks.append(
                failed(f"gpu {name}", f"no such GPU; this machine shows {visible}", "see CUDA_VISIBLE_DEVICES")
            )
    for gpu in gpus:
        if requested and gpu.name not in requested:
            continue
        title, used_gib = f"gpu {gpu.name}", (gpu.total - gpu.free) / GIB
        description = f"{gpu.model}, {gpu.total / GIB:.1f} GiB, {gpu.free / GIB:.1f} free"
        if gpu.problem:
            without_code = "no kernel image" in gpu.problem  # torch is built for other GPU models
            advice = (
                _suited(serves) if without_code else "nvidia-smi -q shows the GPU's state; leave it out with --exclude"
            )
            checks.append(failed(title, f"{gpu.model}: {gpu.problem}", advice))
        elif used_gib > _IN_USE:
            checks.append(
                warning(title, description, f"{used_gib:.1f} GiB are in use by other processes: see nvidia-smi")
            )
        else:
            checks.append(Check(title, "ok", description))
    models = sorted({gpu.model for gpu in gpus if not gpu.problem and (not requested or gpu.name in requested)})
    if len(models) > 1:
        checks.append(warning("gpus", f"different models: {', '.join(models)}", "all ranks wait for the slowest GPU"))
    return checks


def ability_check(gpus: Sequence[Gpu], torch: Torch) -> Check | None:
    """Returns a check that lists which of bf16, TF32, FP8 and FP4 the oldest working GPU supports. It is a
    warning if that GPU does not support bf16.

    Returns None if no GPU works.
    """
    working = [gpu.capability for gpu in gpus if not gpu.problem]
    if not working:
        return None
    major, minor = lowest = min(working)
    able = {"bf16": (8, 0), "TF32": (8, 0), "FP8": (8, 9), "FP4": (10, 0)}
    words = ", ".join(f"{name} {'yes' if lowest >= minimum else 'no'}" for name, minimum in able.items())
    abilities = f"capability {major}.{minor}: {words}; cuDNN {torch.cudnn or 'missing'}"
    if lowest < able["bf16"]:
        return warning("ability", abilities, "train with precision: fp16")
    return Check("ability", "ok", abilities)
