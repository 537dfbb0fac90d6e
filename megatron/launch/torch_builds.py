"""Chooses the build of torch that fits this machine, and prints the arguments of `pip install` for it.

The choice depends on the Python version, the processor, the GPUs and the CUDA version that the driver
supports. The script runs before anything is installed, so it needs only the standard library:

    python -I megatron/launch/torch_builds.py [--torch 2.11.0] [--cuda 12.6 | --cpu]

Sources: builds and their Python versions are from the release compatibility matrix in RELEASE.md of
pytorch/pytorch; the GPUs of each build are from get_cuda_arch_list of pytorch/test-infra.
"""

import os
import re
import runpy
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.process import run_command
from megatron.process.command_parser import CommandParser

INDEX = "https://download.pytorch.org/whl"
RELEASES = ("2.11.0", "2.13.0")  # the suite passes on both
OLDEST, OLDEST_PYTHON = (2, 11), (3, 11)
PYTHONS = {"2.11.0": (3, 14), "2.13.0": (3, 15)}  # newest Python that each release has wheels for
BUILDS = {"cu130": (13, 0), "cu128": (12, 8), "cu126": (12, 6)}  # newest first, and the CUDA of each
_WITHOUT_CU128 = ("cu130", "cu126")  # releases after 2.11
CAPABILITIES = {  # compute capabilities of each build's code, which also runs on newer minor versions of the same major
    "cu126": ((5, 0), (6, 0), (7, 0), (7, 5), (8, 0), (8, 6), (9, 0)),
    "cu128": ((7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0)),
    "cu130": ((7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0)),
}
PLATFORMS = ("linux-x86_64", "linux-aarch64", "macosx-arm64")
# (torch, build, Python, platform) on which this project's tests have run
TESTED = {
    ("2.13.0", "cpu", (3, 11), "linux-x86_64"),
    ("2.11.0", "cu130", (3, 11), "linux-x86_64"),  # without a GPU
    ("2.11.0", "cu130", (3, 12), "linux-x86_64"),  # the GPU tests
}
# pip's options that say where packages are
_SOURCES = ("index-url", "extra-index-url", "find-links", "no-index")
_UV_SOURCES = ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS")


class NoBuild(ValueError):
    """Raised if no build of torch fits this machine. The message says what was found and what to change."""


@dataclass(frozen=True)
class TorchBuild:
    """A build of torch to install.

    pin: the requirement for pip, such as `torch==2.13.0`; with `+cu126` if the build on PyPI would not run
    here.
    index: the URL of PyTorch's package index.
    cuda: the CUDA version of the build; None without CUDA.
    is_tested: whether this project's tests ran with it.
    """

    pin: str
    index: str
    cuda: str | None
    is_tested: bool

    def words(self, own_index: bool = False) -> list[str]:
        """Returns the arguments of `pip install` for this build.

        own_index: whether pip is already configured with a package index. PyTorch's index is then added only
        for a `+cu` build.
        """
        return [self.pin] if own_index and "+" not in self.pin else [self.pin, "--extra-index-url", self.index]


def choose(
    python: tuple[int, int],
    platform: str,
    driver: tuple[int, int] | None,
    torch: str | None = None,
    devices: Sequence[tuple[int, int]] = (),
) -> TorchBuild:
    """Returns the newest build of torch for a Python, a platform, a driver and GPUs.

    platform: such as `linux-x86_64`.
    driver: the newest CUDA version that the driver supports; None without a driver.
    torch: the requested release. None: 2.13.0, but 2.11.0 for drivers of CUDA 12.
    devices: compute capabilities of the GPUs.

    A driver runs builds for older CUDA versions of the same major number, and mostly for newer ones of that
    number too. Raises NoBuild.
    """
    if platform not in PLATFORMS:
        raise NoBuild(f"PyTorch publishes no wheels of torch for {platform}, only for {', '.join(PLATFORMS)}")
    if platform.startswith("macosx"):
        driver = None
    if driver is not None and driver < (12, 0):
        raise NoBuild(
            f"the driver supports CUDA {_dotted(driver)}, and torch needs 12 or newer: update the driver "
            "(R525 and later), or install for the CPU"
        )
    torch = torch or ("2.13.0" if driver is None or driver >= (13, 0) else "2.11.0")
    if not re.fullmatch(r"\d+\.\d+\.\d+", torch) or _minor(torch) < OLDEST:
        raise NoBuild(f"torch {torch} is not a release X.Y.Z from 2.11 on; name one, such as {' or '.join(RELEASES)}")
    newest = PYTHONS.get(torch)
    if python < OLDEST_PYTHON or newest and python > newest:
        supported = f"3.11 to {_dotted(newest)}" if newest else "3.11 or newer"
        raise NoBuild(f"torch {torch} does not support Python {_dotted(python)}; it needs Python {supported}")
    build = "cpu" if driver is None else _cuda_build(torch, driver, devices)
    pin = f"torch=={torch}+{build}" if build.startswith("cu12") else f"torch=={torch}"
    is_tested = (torch, build, python, platform) in TESTED
    return TorchBuild(pin, f"{INDEX}/{build}", _dotted(BUILDS[build]) if build in BUILDS else None, is_tested)


def _cuda_build(torch: str, driver: tuple[int, int], devices: Sequence[tuple[int, int]]) -> str:
    """Returns the newest build of the release, such as `cu126`, that the driver runs and that supports all
    GPUs. Raises NoBuild."""
    published = tuple(BUILDS) if _minor(torch) == OLDEST else _WITHOUT_CU128
    runs = [build for build in published if BUILDS[build] <= driver] or ["cu126"]
    for build in runs:
        if all(_has_code(build, device) for device in devices):
            return build
    missing = next(device for device in devices if not any(_has_code(build, device) for build in runs))
    fitting = [f"torch {torch} for CUDA {_dotted(BUILDS[b])}" for b in published if _has_code(b, missing)]
    if "cu128" not in published and driver >= BUILDS["cu128"] and _has_code("cu128", missing):
        fitting.append("torch 2.11.0 for CUDA 12.8, which this driver runs")
    verb = "supports" if len(fitting) == 1 else "support"
    advice = f"{' and '.join(fitting)} {verb} it" if fitting else "the GPU is too old or too new"
    raise NoBuild(
        f"a GPU here has compute capability {_dotted(missing)}; no build of torch {torch} that this driver (CUDA "
        f"{_dotted(driver)}) runs supports it; {advice}"
    )


def _has_code(build: str, device: tuple[int, int]) -> bool:
    return any(major == device[0] and minor <= device[1] for major, minor in CAPABILITIES[build])


def _minor(torch: str) -> tuple[int, ...]:
    return tuple(map(int, torch.split(".")))[:2]


def own_index(pip_config: str, env: Mapping[str, str]) -> bool:
    """Returns whether pip or uv is configured with a package index. pip_config: output of `pip config
    list`."""
    keys = {line.partition("=")[0].rpartition(".")[2] for line in pip_config.splitlines()}
    return not keys.isdisjoint(_SOURCES) or any(env.get(name) for name in _UV_SOURCES)


def this_platform() -> str:
    """Returns this machine's platform, such as `linux-x86_64`. The version of macOS is left out."""
    parts = sysconfig.get_platform().split("-")
    return f"{parts[0]}-{parts[-1]}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--torch", metavar="VERSION", help=f"release to install; tested: {' and '.join(RELEASES)}")
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--cuda", metavar="12.6", help="CUDA version that the driver supports; default: ask this machine's driver"
    )
    group.add_argument("--cpu", action="store_true", help="choose the build without CUDA")
    parser.add_argument(
        "--pip", metavar="PYTHON", default=sys.executable, help="Python whose pip configuration names package indexes"
    )
    options = parser.parse_args(argv)
    if options.cuda and not re.fullmatch(r"\d+\.\d+", options.cuda):
        parser.error(f"--cuda {options.cuda}: write the version that nvidia-smi shows, such as 12.6 or 13.0")
    driver, devices = None, []
    if options.cuda:
        major, minor = options.cuda.split(".")
        driver = int(major), int(minor)
    elif not options.cpu:  # only this file, because `megatron.launch` imports more than the standard library
        driver_module = runpy.run_path(str(Path(__file__).with_name("cuda_driver.py")))
        driver, devices = driver_module["driver_cuda"](), driver_module["capabilities"]()
    python = sys.version_info[:2]
    try:
        build = choose(python, this_platform(), driver, options.torch or None, devices)
    except NoBuild as problem:
        sys.exit(f"torch_builds.py: error: {problem}")
    driver_text = "no driver" if driver is None else f"a driver of CUDA {_dotted(driver)}"
    built = f"CUDA {build.cuda}" if build.cuda else "CPU"
    untried = "" if build.is_tested else "; this project has not tested this combination"
    sys.stderr.write(f"{build.pin}, {built}: for Python {_dotted(python)}, {this_platform()}, {driver_text}{untried}\n")
    pip_config = subprocess.run([options.pip, "-m", "pip", "config", "list"], capture_output=True, text=True)
    sys.stdout.write(" ".join(build.words(own_index(pip_config.stdout, os.environ))) + "\n")


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


if __name__ == "__main__":
    run_command(main)
