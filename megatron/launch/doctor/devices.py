"""GPUs: whether the driver, torch and each device work together, and what the devices can do."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.launch.cuda_driver import capabilities
from megatron.launch.doctor.check import Check, failed, warning
from megatron.launch.doctor.software import Torch
from megatron.launch.torch_builds import NoBuild, choose, here

GIB = 1 << 30
_IN_USE = 1.0  # GiB that may be taken: contexts of other processes, displays


@dataclass(frozen=True)
class Gpu:
    """One visible device. name: as CUDA_VISIBLE_DEVICES spells it; total, free: bytes; problem: why a small
    product of matrices on it failed."""

    name: str
    model: str
    total: int
    free: int
    capability: tuple[int, int]
    problem: str = ""


def driver_version(path: str | Path = "/proc/driver/nvidia/version") -> str | None:
    """Version of the loaded kernel module; None without one."""
    try:
        text = Path(path).read_text()
    except OSError:
        return None
    return next((word for word in text.split() if word[0].isdigit() and word.count(".") >= 1), None)


def read_gpus(names: Sequence[str]) -> list[Gpu]:
    """Ask every visible device, and let it compute."""
    if not names:
        return []
    import torch  # not where it cannot be imported: then no names are known

    gpus = []
    for index, name in enumerate(names):
        try:
            properties = torch.cuda.get_device_properties(index)
            ones = torch.ones(64, 64, device=f"cuda:{index}")
            problem = "" if (ones @ ones).sum().item() == 64**3 else "it computes 64 x 64 ones wrongly"
            free, total = torch.cuda.mem_get_info(index)
        except Exception as cause:  # RuntimeError, AcceleratorError, AssertionError: whatever CUDA says
            gpus.append(Gpu(name, "?", 0, 0, (0, 0), str(cause).strip().splitlines()[0]))
            continue
        gpus.append(Gpu(name, properties.name, total, free, (properties.major, properties.minor), problem))
    return gpus


def driver_check(driver: str | None, torch: Torch, gpus: int, serves: tuple[int, int] | None = None) -> Check:
    """Driver, torch's CUDA and devices: a driver too old for torch's CUDA shows none. serves: the driver's
    CUDA."""
    if driver is None and not gpus:
        return Check("driver", "ok", "no NVIDIA driver: ranks are processes on the CPU, with gloo")
    description = f"NVIDIA {driver or 'of unknown version'}, {gpus} GPU{'s' * (gpus != 1)} visible"
    if torch.version is None or torch.problem:
        return warning("driver", description, "torch cannot be asked")
    if torch.cuda is None:
        return warning("driver", f"{description}; torch is built without CUDA", _suited(serves))
    if not gpus and serves is not None and serves[0] < int(torch.cuda.partition(".")[0]):
        description = f"{description}; it serves CUDA {serves[0]}.{serves[1]}, torch is built for {torch.cuda}"
        return failed("driver", description, _suited(serves))
    if not gpus:
        advice = f"CUDA_VISIBLE_DEVICES hides them, or the driver is older than CUDA {torch.cuda} needs: nvidia-smi"
        return warning("driver", description, advice)
    return Check("driver", "ok", description)


def _suited(serves: tuple[int, int] | None) -> str:
    """What to type for the build of torch that the driver and the devices run."""
    if serves is None:
        return "install torch without --cpu"
    try:
        build = choose(sys.version_info[:2], here(), serves, devices=capabilities())
        return f"pip install {' '.join(build.words())}"
    except NoBuild as problem:
        return str(problem)


def gpu_checks(gpus: Sequence[Gpu], wanted: Sequence[str] = (), serves: tuple[int, int] | None = None) -> list[Check]:
    """One check a device, of those wanted or all; a wanted one that is not there fails. serves: the driver's
    CUDA."""
    checks = []
    for name in wanted:
        if name not in [gpu.name for gpu in gpus]:
            visible = ", ".join(gpu.name for gpu in gpus) or "none"
            checks.append(failed(f"gpu {name}", f"not there; this machine shows {visible}", "see CUDA_VISIBLE_DEVICES"))
    for gpu in gpus:
        if wanted and gpu.name not in wanted:
            continue
        title, used = f"gpu {gpu.name}", (gpu.total - gpu.free) / GIB
        description = f"{gpu.model}, {gpu.total / GIB:.1f} GiB, {gpu.free / GIB:.1f} free"
        if gpu.problem:
            without_code = "no kernel image" in gpu.problem  # torch's build is for other devices
            advice = _suited(serves) if without_code else "nvidia-smi -q shows its state; leave it out with --exclude"
            checks.append(failed(title, f"{gpu.model}: {gpu.problem}", advice))
        elif used > _IN_USE:
            checks.append(warning(title, description, f"{used:.1f} GiB are in use by other processes: nvidia-smi"))
        else:
            checks.append(Check(title, "ok", description))
    models = sorted({gpu.model for gpu in gpus if not gpu.problem and (not wanted or gpu.name in wanted)})
    if len(models) > 1:
        checks.append(warning("gpus", f"not alike: {', '.join(models)}", "the slowest sets the pace"))
    return checks


def ability_check(gpus: Sequence[Gpu], torch: Torch) -> Check | None:
    """What the least of the devices can compute with."""
    working = [gpu.capability for gpu in gpus if not gpu.problem]
    if not working:
        return None
    major, minor = least = min(working)
    able = {"bf16": (8, 0), "TF32": (8, 0), "FP8": (8, 9), "FP4": (10, 0)}
    words = ", ".join(f"{name} {'yes' if least >= needed else 'no'}" for name, needed in able.items())
    abilities = f"capability {major}.{minor}: {words}; cuDNN {torch.cudnn or 'missing'}"
    if least < able["bf16"]:
        return warning("ability", abilities, "train with precision: fp16")
    return Check("ability", "ok", abilities)
