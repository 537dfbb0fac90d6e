"""Checks the installed Python, torch, DeepSpeed and optional packages."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from megatron.launch.cuda_driver import is_readable_arch_list
from megatron.launch.doctor.check import Check, failed, warning
from megatron.launch.environment import install_root
from megatron.neox_arguments.validation.deepspeed_versions import FIX, TESTED, wrong_deepspeed

PYTHON, TORCH = (3, 11), (2, 11)
REQUIRED = (
    "argcomplete", "jinja2", "matplotlib", "numpy", "PyYAML", "rich", "tenacity", "tensorboard", "tokenizers", "tqdm",
)  # fmt: skip
OPTIONAL = {  # what each is for
    "transformers": "checks of converted models, chat templates",
    "huggingface_hub": "hf://",
    "datasets": "Parquet, Arrow, hub data",
    "sentencepiece": "SPMTokenizer",
    "tiktoken": "TiktokenTokenizer",
    "lm_eval": "eval.py",
    "wandb": "use_wandb",
    "comet_ml": "use_comet",
    "nvidia-ml-py": "log_device_metrics",
    "s3fs": "save in S3",
    "starlette": "tools/serve.py",
}
# Packages that only some runs need, and that fail if they were compiled for another torch. Values: statements
# that fail if the package does not work.
COMPILED = {
    "flash-attn": "import_compiled('flash_attn', 'flash_attn_func', 'flash_attn_varlen_func')",
    "transformer-engine": "import_compiled('transformer_engine.pytorch', 'DotProductAttention')",
    "apex": "import_compiled('apex.optimizers', 'FusedAdam'); import amp_C, fused_layer_norm_cuda",
}


@dataclass(frozen=True)
class Torch:
    """The versions of the installed torch.

    version: None if torch is not installed.
    cuda, cudnn: None in a build without CUDA.
    """

    version: str | None
    cuda: str | None = None
    cudnn: str | None = None
    problem: str = ""  # why it cannot be imported


def read_torch() -> Torch:
    """Imports torch and reads its versions. If the import fails, `problem` has the reason."""
    try:
        import torch
    except Exception as problem:  # a broken build raises OSError, ImportError or RuntimeError
        return Torch(installed("torch"), problem=f"{type(problem).__name__}: {problem}".splitlines()[0])
    if not torch.version.cuda:
        return Torch(torch.__version__)
    number = torch.backends.cudnn.version() or 0
    cudnn = f"{number // 10000}.{number // 100 % 100}.{number % 100}" if number else None
    return Torch(torch.__version__, torch.version.cuda, cudnn)


def installed(name: str) -> str | None:
    """Returns the version of an installed package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def python_check(number: tuple[int, ...] = sys.version_info[:3], executable: str = sys.executable) -> Check:
    """Checks that this Python is new enough."""
    description = f"{'.'.join(map(str, number))} ({executable})"
    if number[:2] < PYTHON:
        return failed("python", description, "3.11 or newer is needed; PY=/path/to/python3.11 bash setup_uv_env.sh")
    return Check("python", "ok", description)


def torch_check(torch: Torch) -> Check:
    """Checks that torch is installed, can be imported and is new enough. The finding names the CUDA version
    that torch was built for."""
    if torch.version is None:
        return failed("torch", "not installed", "make env, or bash setup_uv_env.sh (docs/install.md)")
    if torch.problem:
        return failed(
            "torch", f"{torch.version} cannot be imported: {torch.problem}", "install torch again (docs/install.md)"
        )
    build = f"{torch.version}, " + (f"for CUDA {torch.cuda}" if torch.cuda else "without CUDA")
    if tuple(map(int, re.findall(r"\d+", torch.version.partition("+")[0])))[:2] < TORCH:
        return failed("torch", build, "torch 2.11 or newer is needed")
    return Check("torch", "ok", build)


def deepspeed_check(release: str | None) -> Check:
    """Checks that the installed DeepSpeed is the tested release. Some other releases compute wrong gradients.

    release: the installed version; None if it is not installed.
    """
    if release is None:
        users = "engine: deepspeed and the launchers pdsh, openmpi and mvapich"
        return Check("deepspeed", "ok", f"not installed; {users} need it")
    problem = wrong_deepspeed(release)
    if problem is not None:
        return failed("deepspeed", problem, FIX)
    if release.split("+")[0] != TESTED:
        return warning("deepspeed", f"{release}: not tested here, and not known to compute wrong gradients", FIX)
    return Check("deepspeed", "ok", f"{release}, the tested release")


def packages_check() -> Check:
    """Checks that the packages that every run needs are installed."""
    versions = {name: installed(name) for name in REQUIRED}
    missing = [name for name, number in versions.items() if number is None]
    if missing:
        return failed("packages", f"missing: {', '.join(missing)}", "pip install -c constraints.txt -e .")
    return Check("packages", "ok", ", ".join(f"{name} {number}" for name, number in versions.items()))


def extras_checks() -> list[Check]:
    """Lists optional packages: the installed ones with versions, the missing ones with their purpose."""
    versions = {name: installed(name) for name in (*OPTIONAL, *COMPILED)}
    installed_text = ", ".join(f"{name} {number}" for name, number in versions.items() if number) or "none"
    missing = ", ".join(f"{name} ({purpose})" for name, purpose in OPTIONAL.items() if not versions[name])
    return [Check("extras", "ok", installed_text), *([Check("not installed", "ok", missing)] if missing else [])]


def compiled_checks(find: Callable[[str], str | None] = installed, gpus: bool = True) -> list[Check]:
    """Checks that the installed compiled packages (flash-attn, transformer-engine, apex) can be imported with
    this torch and CUDA.

    Each is imported in a separate process. gpus: whether there are GPUs; without GPUs no package is checked.
    find: returns the version of a package, or None.
    """
    checks = []
    setup = f"import sys; sys.path.insert(0, {str(install_root())!r}); import torch"
    load = "from megatron.neox_arguments.optional_packages import import_compiled"
    for name, statement in COMPILED.items():
        number = find(name)
        if number is None or not gpus:  # without a GPU these packages cannot be imported
            continue
        command = [sys.executable, "-c", f"{setup}; {load}; {statement}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        except subprocess.TimeoutExpired:
            checks.append(
                failed(name, f"{number}: importing it takes more than 60 s", "install it again, or uninstall it")
            )
            continue
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            reason = reason.removeprefix("megatron.neox_arguments.optional_packages.PackageProblem: ")
            checks.append(failed(name, f"{number}: {reason}", "compile it again for this torch, or uninstall it"))
        else:
            checks.append(Check(name, "ok", number))
    return checks


def arch_list_check() -> Check | None:
    """Returns a warning if DeepSpeed's builder cannot read TORCH_CUDA_ARCH_LIST; else None.

    train.py then replaces the list by the compute capabilities of the GPUs.
    """
    value = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    if is_readable_arch_list(value):
        return None
    finding = f"{value!r}, which DeepSpeed's builder cannot read"
    return warning("TORCH_CUDA_ARCH_LIST", finding, "deepy.py and train.py replace it by the GPUs' own, such as 9.0")
